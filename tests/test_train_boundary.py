"""The information boundary of training, by gradients in fp64: what a block's loss may depend on, and what it learns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

from dflash_plugins.train.batches import Batch, make_batch
from dflash_plugins.train.evaluate import matches
from dflash_plugins.train.losses import IGNORED
from dflash_plugins.train.recipe import Recipe
from dflash_plugins.train.trainer import Part, Trainer

RECIPE: dict[str, Any] = {
    "mask_token_id": tiny.MASK, "draft_vocab_size": None, "steps": 300, "sequences_per_step": 2,
    "anchors_per_sequence": 4, "held_out_sequences": 2, "conv_group_size": 16, "selector_top_k": 4, "selector_rank": 8,
    "precision": "fp32", "short_k": None, "soft_share": 0.0,
}  # fmt: skip
METHODS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dflash2": {"method": "dflash2"},
    "dloop": {"method": "dloop", "prefix_lengths": (1, 3)},
    "dloop-selector": {"method": "dloop", "prefix_lengths": (1, 3), "dloop_selector": True},
}
PROMPT, LENGTH, K = 6, 26, 7
# The first response token, neighbours, two blocks that overlap, and the last token that has a successor.
ANCHORS = (PROMPT, 9, 10, 13, LENGTH - 2)
Make = Callable[..., Trainer]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return tiny.write_store(tmp_path_factory.mktemp("train"), dtype=torch.float32)


@pytest.fixture
def make(data: tuple[Path, Path], tmp_path: Path) -> Make:
    return lambda method, **changes: Trainer(Recipe(**(RECIPE | METHODS[method] | changes)), *data, tmp_path / "run")


def in_fp64(trainer: Trainer) -> Trainer:
    trainer.drafter.double()
    trainer.drafter.shared_embedding = trainer.drafter.shared_embedding.double()
    trainer.drafter.shared_head = trainer.drafter.shared_head.double()
    return trainer


def batch_of(trainer: Trainer, anchors: tuple[int, ...] = ANCHORS) -> Batch:
    """All blocks of one sequence."""
    batch = make_batch(trainer.store, trainer.train_refs[:1], [torch.tensor(anchors)], K)
    return replace(batch, features=batch.features.double())


def only(batch: Batch, block: int) -> Batch:
    """The same blocks, with a loss on one of them."""
    labels = torch.full_like(batch.labels, IGNORED)
    labels[:, block] = batch.labels[:, block]
    return replace(batch, labels=labels)


def parts_of(trainer: Trainer, given: int) -> list[Part]:
    """With a prefix where the method has one."""
    return [Part(0, given), Part(given, K)] if trainer.recipe.method == "dloop" else [Part(0, K)]


def loss_of(trainer: Trainer, batch: Batch, given: int = 3) -> Tensor:
    return trainer.loss(batch, parts_of(trainer, given), K)


def make_selector_matter(trainer: Trainer) -> None:
    """A fresh selector and fresh convolutions change nothing, so that they could not leak either."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in trainer.drafter.named_parameters():
        if "selector" in name or "conv" in name:
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data += 0.3 * noise.to(parameter.dtype)


@pytest.mark.parametrize("method", METHODS)
def test_no_gradient_reaches_a_block_from_its_own_answer(make: Make, method: str) -> None:
    trainer = in_fp64(make(method))
    make_selector_matter(trainer)
    batch = batch_of(trainer)
    for block, anchor in enumerate(ANCHORS):
        features = batch.features.clone().requires_grad_()
        loss = loss_of(trainer, only(replace(batch, features=features), block))
        assert float(loss.detach()) > 0
        (gradient,) = torch.autograd.grad(loss, features)
        by_position = gradient[0].abs().sum(-1)
        assert bool((by_position[anchor:] == 0).all()), f"block {block}"
        assert bool((by_position[:anchor] > 0).any()), f"block {block}"


@pytest.mark.parametrize("method", METHODS)
def test_noise_in_its_own_answer_changes_no_bit_of_a_blocks_loss(make: Make, method: str) -> None:
    trainer = in_fp64(make(method))
    make_selector_matter(trainer)
    batch, generator = batch_of(trainer), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for block, anchor in enumerate(ANCHORS):
            before = loss_of(trainer, only(batch, block))
            noisy = batch.features.clone()
            noisy[:, anchor:] = 1e3 * torch.randn(noisy[:, anchor:].shape, generator=generator, dtype=torch.float64)
            after = loss_of(trainer, only(replace(batch, features=noisy), block))
            assert torch.equal(before, after), f"block {block}"
            noisy[:, anchor - 1] = 0.0
            assert not torch.equal(before, loss_of(trainer, only(replace(batch, features=noisy), block)))


@pytest.mark.parametrize("method", METHODS)
def test_a_block_alone_has_the_loss_it_has_among_others(make: Make, method: str) -> None:
    """No block sees another: neither its rows nor what is given in them."""
    trainer = in_fp64(make(method))
    make_selector_matter(trainer)
    batch = batch_of(trainer)
    with torch.no_grad():
        for block, anchor in enumerate(ANCHORS):
            alone = loss_of(trainer, batch_of(trainer, (anchor,)))
            among = loss_of(trainer, only(batch, block))
            assert float(alone) == pytest.approx(float(among), rel=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_a_step_on_one_batch_is_learnt_by_heart(make: Make, method: str) -> None:
    trainer = make(method, learning_rate=3e-3)
    anchors = [torch.tensor([PROMPT, 9, 12, 15])] * 2
    batch = make_batch(trainer.store, trainer.train_refs[:2], anchors, K)
    for step in range(300):
        loss = loss_of(trainer, batch, (1, 3)[step % 2])
        trainer.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainer.drafter.parameters(), 1.0)
        trainer.optimizer.step()
    trainer.drafter.eval()
    with torch.no_grad():
        accepted = matches(trainer.drafter, batch, K)
    assert accepted.tolist() == [[K] * 4] * 2
