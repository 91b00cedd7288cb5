"""Training of DFlash 2 and D-Loop: losses by hand, what is given, what starts a run and what it leaves alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

from dflash_plugins.config import read_draft_config
from dflash_plugins.drafter import load_drafter
from dflash_plugins.errors import BadInput, Refused
from dflash_plugins.train.batches import every_anchor, make_batch
from dflash_plugins.train.blocks import BatchBackbone
from dflash_plugins.train.evaluate import matches
from dflash_plugins.train.losses import IGNORED, selector_loss, slot_weights
from dflash_plugins.train.recipe import Recipe
from dflash_plugins.train.run import run
from dflash_plugins.train.trainer import Part, Trainer

RECIPE: dict[str, Any] = {
    "mask_token_id": tiny.MASK, "draft_vocab_size": 64, "steps": 4, "sequences_per_step": 2, "anchors_per_sequence": 4,
    "held_out_sequences": 2, "conv_group_size": 16, "selector_top_k": 4, "selector_rank": 8, "precision": "fp32",
    "short_k": None, "soft_share": 0.0,
}  # fmt: skip
DFLASH2 = {**RECIPE, "method": "dflash2"}
DLOOP = {**RECIPE, "method": "dloop", "prefix_lengths": (1, 3)}
Make = Callable[..., Trainer]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny target and a feature store of 24 answers of 20 tokens each."""
    return tiny.write_store(tmp_path_factory.mktemp("train"))


@pytest.fixture
def make(data: tuple[Path, Path], tmp_path: Path) -> Make:
    """A trainer with changes to a recipe."""
    return lambda recipe, **changes: Trainer(Recipe(**(recipe | changes)), *data, tmp_path / "run")


class Tables:
    """A selector over 10 tokens whose move from a to b adds a table's entry to the candidate's logit."""

    top_k = 2

    def __init__(self, moves: dict[tuple[int, int], float]) -> None:
        table = torch.zeros(10, 10)
        for (before, after), added in moves.items():
            table[before, after] = added
        self.predecessor_codebook, self.successor_codebook = table, torch.eye(10)

    def hidden_projection(self, hidden: Tensor) -> Tensor:
        return torch.ones(*hidden.shape[:-1], 10)


def test_selector_loss_is_over_the_candidates_given_the_true_predecessor() -> None:
    # One block, two slots. The true tokens are 4 and 5; the move 4 -> 5 adds ln 3, the move 7 -> 5 would add more.
    tables = Tables({(4, 5): math.log(3.0), (7, 5): 50.0, (1, 4): math.log(2.0)})
    candidate_ids, unary = torch.tensor([[[7, 4], [5, 6]]]), torch.zeros(1, 2, 2)
    labels, previous = torch.tensor([[4, 5]]), torch.tensor([[1, 4]])
    loss = selector_loss(tables, torch.zeros(1, 2, 3), candidate_ids, unary, labels, previous, torch.tensor([1.0, 0.5]))
    # Slot 1: 2 of 1 + 2; slot 2: 3 of 3 + 1.
    assert float(loss) == pytest.approx((math.log(3 / 2) + 0.5 * math.log(4 / 3)) / 1.5)


def test_a_slot_whose_true_token_is_no_candidate_carries_no_selector_loss() -> None:
    candidate_ids, unary = torch.tensor([[[7, 4], [5, 6], [5, 6]]]), torch.zeros(1, 3, 2)
    labels, previous = torch.tensor([[4, 9, IGNORED]]), torch.tensor([[1, 4, 9]])
    weights = torch.tensor([1.0, 5.0, 5.0])
    loss = selector_loss(Tables({}), torch.zeros(1, 3, 3), candidate_ids, unary, labels, previous, weights)
    assert float(loss) == pytest.approx(math.log(2.0))
    nowhere = torch.tensor([[9, 9, 9]])
    assert float(selector_loss(Tables({}), torch.zeros(1, 3, 3), candidate_ids, unary, nowhere, previous, weights)) == 0


def _cross_entropies(trainer: Trainer, batch: Any, given: int) -> Tensor:
    """Of the true token of every slot [N, 7], with the true tokens of the first ``given`` slots in the input."""
    backbone = BatchBackbone.of(trainer.drafter, batch, 7)
    labels = batch.labels.flatten(0, 1)
    log_q = trainer.drafter.logits(backbone.rows(labels[:, :given])[:, 1:]).log_softmax(-1)
    return -log_q.gather(-1, trainer.label_of[labels][..., None])[..., 0]


def _batch(trainer: Trainer, first: int = 8) -> Any:
    trainer.label_of = torch.arange(512).clamp_max(63)  # every token has a row, so that no slot is left out
    return make_batch(trainer.store, trainer.train_refs[:1], [torch.tensor([first, first + 3])], 7)


def test_the_loop_loss_is_the_mean_of_prefix_slots_and_of_slots_after_a_true_prefix(make: Make) -> None:
    trainer = make(DLOOP)
    batch = _batch(trainer)
    with torch.no_grad():
        blind, led = (_cross_entropies(trainer, batch, given) for given in (0, 3))
        assert not torch.allclose(blind[:, 3:], led[:, 3:], atol=1e-4)
        decay = torch.tensor([math.exp(-i / 4) for i in range(7)])
        first = (blind[:, :3] * decay[:3]).sum() / (2 * decay[:3].sum())
        # The first masked slot, the fourth, counts whole again.
        second = (led[:, 3:] * decay[:4]).sum() / (2 * decay[:4].sum())
        loss = trainer.loss(batch, [Part(0, 3), Part(3, 7)], 7)
    assert float(loss) == pytest.approx(float((first + second) / 2), rel=1e-5)


def test_the_selectors_loss_is_added_to_that_of_the_slots(make: Make) -> None:
    trainer = make(DFLASH2)
    batch = _batch(trainer)
    with torch.no_grad():
        torch.nn.init.normal_(trainer.drafter.candidate_selector.predecessor_codebook)
        backbone = BatchBackbone.of(trainer.drafter, batch, 7)
        hidden = backbone.rows(torch.empty(2, 0, dtype=torch.int64))[:, 1:]
        best = trainer.drafter.logits(hidden).topk(4)
        ids, labels = trainer.drafter.target_ids(best.indices), batch.labels.flatten(0, 1)
        labels[:, ::2] = ids[:, ::2, 1]  # some true tokens are the second candidate
        previous = torch.cat([batch.anchor_ids.T, labels[:, :-1]], dim=1)
        selector, total, weight = trainer.drafter.candidate_selector, 0.0, 0.0
        for block in range(2):
            for slot in range(7):
                turned = selector.predecessor_codebook[previous[block, slot]] * (
                    selector.hidden_projection.weight @ hidden[block, slot]
                )
                scores = best.values[block, slot] + selector.successor_codebook[ids[block, slot]] @ turned
                place = (ids[block, slot] == labels[block, slot]).nonzero().flatten().tolist()
                for index in place:
                    total += math.exp(-slot / 4) * float(scores.logsumexp(0) - scores[index])
                    weight += math.exp(-slot / 4)
        batch.labels.copy_(labels.view_as(batch.labels))
        slots = _cross_entropies(trainer, batch, 0)
        decay = slot_weights(7, 4.0)
        expected = float((slots * decay).sum() / (2 * decay.sum())) + total / weight
        assert float(trainer.loss(batch, [Part(0, 7)], 7)) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("sampling", "lengths"), [("scheduled", {1, 3}), ("any", {1, 2, 3, 4, 5, 6})])
def test_the_given_length_is_drawn(make: Make, sampling: str, lengths: set[int]) -> None:
    trainer, generator = make(DLOOP, prefix_sampling=sampling), torch.Generator().manual_seed(1)
    drawn = [trainer._draw_parts(7, generator) for _ in range(100)]
    assert {second.given for _, second in drawn} == lengths
    assert all(first == Part(0, second.given) and second.last == 7 for first, second in drawn)


def test_a_short_block_draws_only_prefixes_that_are_served_there(make: Make) -> None:
    trainer, generator = make(DLOOP), torch.Generator().manual_seed(1)
    assert {trainer._draw_parts(3, generator)[-1] for _ in range(20)} == {Part(1, 3)}
    assert make(DLOOP, prefix_lengths=(3,))._draw_parts(3, generator) == [Part(0, 3)]


@pytest.mark.parametrize("recipe", [DFLASH2, {**DLOOP, "dloop_selector": True}])
def test_gradients_reach_convolution_and_selector(make: Make, recipe: dict[str, Any]) -> None:
    trainer = make(recipe)
    before = {name: p.clone() for name, p in trainer.drafter.named_parameters()}
    for _ in range(2):  # fresh predecessors are zero, so the other tables only learn in the second step
        trainer._train_step()
        trainer.step += 1
    moved = {name for name, p in trainer.drafter.named_parameters() if not torch.equal(p, before[name])}
    assert moved == before.keys() - {"lm_head.weight"}


def test_a_selector_scores_no_move_of_tokens_that_training_never_meets(make: Make) -> None:
    trainer = make(DFLASH2, draft_vocab_size=16)
    assert trainer.run()
    selector = trainer.drafter.candidate_selector
    assert selector is not None
    before = {int(row) for row in selector.predecessor_codebook.any(1).nonzero()}
    after = {int(row) for row in selector.successor_codebook.any(1).nonzero()}
    assert before
    assert before <= {int(token) for ref in trainer.train_refs for token in trainer.store.ids(ref)}
    assert after == set(trainer.vocabulary.tolist())
    unsaid = [token for token in range(len(selector.successor_codebook)) if token not in after]
    assert not selector.successor_codebook[unsaid].signbit().any(), "-0 would be shipped, and 0 is not"


def test_frozen_parameters_do_not_move(make: Make) -> None:
    patterns = ("candidate_selector.*", "layers.1.*_conv.*")
    trainer = make(DFLASH2, train_only=patterns)
    before = {name: p.clone() for name, p in trainer.drafter.named_parameters()}
    assert trainer.run()
    moved = {name for name, p in trainer.drafter.named_parameters() if not torch.equal(p, before[name])}
    wanted = {name for name in before if name.startswith(("candidate_selector.", "layers.1.attention_conv."))}
    assert moved == wanted | {"layers.1.mlp_conv.base_kernel", "layers.1.mlp_conv.kernel_projection.weight"}


def test_patterns_that_match_nothing_are_named(make: Make) -> None:
    with pytest.raises(BadInput, match=r"candidate_selector\.\*, lm_head\.\*: matches no parameter"):
        make(RECIPE, train_only=("layers.0.*", "candidate_selector.*", "lm_head.*"))


@pytest.fixture
def start(data: tuple[Path, Path], tmp_path: Path) -> Path:
    """The folder of a DFlash drafter after a few steps, and in it weights that no fresh drafter has."""
    settings = {key: value for key, value in RECIPE.items() if key != "steps"}
    done = run(method="dflash", target=data[0], data=data[1], out=tmp_path / "start", steps=3, settings=settings)
    return Path(done.path)


@pytest.mark.parametrize("recipe", [DFLASH2, DLOOP, {**DLOOP, "dloop_selector": True}])
def test_a_run_begins_as_exactly_the_drafter_it_starts_from(make: Make, start: Path, recipe: dict[str, Any]) -> None:
    trainer = make(recipe, start_from=str(start), draft_vocab_size=64)
    first = load_drafter(start)
    first.bind(trainer.tensors.embedding(), trainer.tensors.head())
    assert set(trainer.taken) == set(first.state_dict())
    nothing = torch.empty(2, 0, dtype=torch.int64)
    with torch.no_grad():
        batch = _batch(trainer)
        mine, theirs = (BatchBackbone.of(drafter, batch, 7).rows(nothing) for drafter in (trainer.drafter, first))
        assert torch.equal(mine, theirs)
        if recipe["method"] == "dflash2":
            assert torch.equal(matches(trainer.drafter, batch, 7), matches(first, batch, 7))


def test_a_start_of_another_geometry_is_refused_with_every_reason(make: Make, start: Path) -> None:
    with pytest.raises(Refused) as caught:
        make(DFLASH2, start_from=str(start), block_size=5, num_layers=3, mask_token_id=7)
    assert {finding.key for finding in caught.value.findings} >= {"block_size", "num_layers", "mask_token_id"}


def test_a_run_that_started_elsewhere_does_not_resume(make: Make, start: Path) -> None:
    make(DFLASH2, start_from=str(start)).save()
    make(DFLASH2, start_from=str(start.rename(start.parent / "moved"))).save()
    with pytest.raises(BadInput, match="start_from"):
        make(DFLASH2)


def test_held_out_blocks_are_drafted_in_the_passes_of_the_method(make: Make) -> None:
    """Pass by pass with plain forwards: the second pass reads what the first one chose, not the truth."""
    trainer = make(DLOOP, prefix_lengths=(2,))
    batch = _batch(trainer, first=12)
    drafter, backbone = trainer.drafter, BatchBackbone.of(trainer.drafter, batch, 7)
    with torch.no_grad():
        one = drafter.logits(backbone.rows(torch.empty(2, 0, dtype=torch.int64))).argmax(-1)
        known = drafter.target_ids(one[:, 1:3])
        rest = drafter.target_ids(drafter.logits(backbone.rows(known)).argmax(-1)[:, 3:])
        drafted = torch.cat([known, rest], dim=1)
        batch.labels.copy_(drafted.view_as(batch.labels))
        batch.labels[0, 1, 4] += 1
        # The one pass would have chosen otherwise in the first block, so it cannot be taken for the two.
        assert not torch.equal(drafter.target_ids(one[0, 1:]), drafted[0])
        assert matches(drafter, batch, 7).tolist() == [[7, 4]]


def _hits(trainer: Trainer, top_k: int) -> list[float]:
    """Share of positions whose true token is among the best rows of the head, by slot of K = 3, one at a time."""
    hits: list[list[bool]] = []
    with torch.no_grad():
        for ref in trainer.held_refs:
            for anchor in every_anchor(ref)[:-2]:
                batch = make_batch(trainer.store, [ref], [anchor[None]], 3)
                rows = BatchBackbone.of(trainer.drafter, batch, 3).rows(torch.empty(1, 0, dtype=torch.int64))
                best = trainer.drafter.target_ids(trainer.drafter.logits(rows[0, 1:]).topk(top_k).indices)
                hits.append([bool((b == true).any()) for b, true in zip(best, batch.labels[0, 0], strict=True)])
    share: list[float] = torch.tensor(hits).float().mean(dim=0).tolist()
    return share


def test_candidate_recall_counts_true_tokens_among_the_candidates(make: Make) -> None:
    few, many = make(DFLASH2, selector_top_k=4), make(DFLASH2, selector_top_k=32)
    found = [trainer.evaluate(3).candidate_recall for trainer in (few, many)]
    assert found[0] is not None
    assert found[1] is not None
    assert list(found[0]) == pytest.approx(_hits(few, 4))
    assert list(found[1]) == pytest.approx(_hits(many, 32))
    assert sum(found[0]) < sum(found[1])
    assert make(DLOOP).evaluate(3).candidate_recall is None


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"method": "dloop"}, "prefix_lengths"),
        ({"method": "dloop", "prefix_lengths": [3, 1]}, "rise strictly"),
        ({"method": "dloop", "prefix_lengths": [7]}, "K = 7"),
        ({"method": "dflash2", "prefix_lengths": [1], "dloop_selector": True}, "no loop; dloop_selector"),
        ({"learning_rate": -1, "selector_top_k": 0, "unheard_of": 1}, "learning_rate.*selector_top_k.*unheard_of"),
    ],
)
def test_settings_that_cannot_be_are_named_all_at_once(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(BadInput, match=named):
        Recipe.of(settings)


@pytest.mark.parametrize(("recipe", "architecture"), [(DFLASH2, "DFlash2DraftModel"), (DLOOP, "DLoopDraftModel")])
def test_what_is_exported_says_what_it_is(
    data: tuple[Path, Path], tmp_path: Path, recipe: dict[str, Any], architecture: str
) -> None:
    settings = {key: value for key, value in recipe.items() if key not in ("method", "steps")}
    done = run(method=recipe["method"], target=data[0], data=data[1], out=tmp_path, steps=1, settings=settings)
    config = read_draft_config(Path(done.path)).require()
    assert (config.architecture, config.causal) == (architecture, (False, False))
    if config.loop is None:
        assert config.selector
        assert config.conv
        assert (config.selector.top_k, config.selector.rank, config.conv.group_size) == (4, 8, 16)
    else:
        assert (config.loop.prefix_lengths, config.selector) == ((1, 3), None)
    assert load_drafter(Path(done.path)).dtype == torch.float32
