"""``train --method dflash``: the DFlash recipe on a feature store, single process, resumable (methods.md section 5)."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dflash_plugins.config import DraftConfig, read_target_config
from dflash_plugins.drafter import Drafter
from dflash_plugins.errors import BadInput
from dflash_plugins.train.batches import Batch, make_batch, random_anchors
from dflash_plugins.train.evaluate import HeldOut, block_hidden, held_out
from dflash_plugins.train.initialise import TargetTensors, initialise_from_target
from dflash_plugins.train.losses import GAMMA_BY_BLOCK, IGNORED, block_loss, slot_weights
from dflash_plugins.train.state import load_state, save_state, trained_parameters
from dflash_plugins.train.store import FeatureStore, SequenceRef

SAVE_EVERY_SECONDS = 300.0
WARMUP_STEPS = 100
FINAL_LR_SHARE = 0.02


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the weights besides the data.

    A run resumes only under the same recipe, but for ``steps``: a longer or shorter end may be chosen on the way.
    """

    method: str = "dflash"
    num_layers: int = 2
    block_size: int = 8
    mask_token_id: int = 16
    draft_vocab_size: int | None = 8192
    steps: int = 3000
    sequences_per_step: int = 8
    anchors_per_sequence: int = 24
    short_k: int | None = 3
    short_share: float = 0.5
    learning_rate: float = 1e-3
    weight_decay: float = 0.05
    soft_share: float = 0.5
    seed: int = 1
    held_out_sequences: int = 128

    def gamma(self) -> float:
        """Decay of the slot weights."""
        return GAMMA_BY_BLOCK.get(self.block_size, self.block_size / 2)


@dataclass
class Progress:
    """What a run tells its caller after every step."""

    step: int
    steps: int
    loss: float
    blocks_per_second: float


class Trainer:
    """One run: builds the drafter, walks the steps, saves, evaluates. ``target`` and ``data`` are folders."""

    def __init__(self, recipe: Recipe, target: Path, data: Path, out: Path) -> None:
        self.recipe, self.out = recipe, out
        self.store = FeatureStore(data)
        self.tensors = TargetTensors(target)
        self.train_refs, self.held_refs = _split(self.store, recipe.held_out_sequences)
        head = self.tensors.head()
        self.vocabulary = _draft_vocabulary(self.store, self.train_refs, recipe.draft_vocab_size, head.shape[0])
        self.drafter = self._build(target, head)
        self.label_of = _label_table(self.vocabulary, head.shape[0])
        groups = _parameter_groups(self.drafter, recipe.weight_decay)
        self.optimizer = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95))
        self.weights = slot_weights(recipe.block_size - 1, recipe.gamma())
        self.facts = {**asdict(recipe), "target": self.store.meta.target_fingerprint}
        del self.facts["steps"]
        found = load_state(out, self.drafter, self.optimizer, self.facts)
        self.step = int(found.get("step", 0))
        self._refuse_lost_data(int(found.get("shards", 0)))
        self.seconds = float(found.get("seconds", 0.0))

    def _build(self, target: Path, head: Tensor) -> Drafter:
        config = _draft_config(self.recipe, target, self.store, self.vocabulary)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.recipe.seed)
            drafter = Drafter(config)
        initialise_from_target(drafter, self.tensors, int(config.num_target_layers or 0))
        drafter.bind(self.tensors.embedding(), head)
        if drafter.lm_head is not None and drafter.d2t is not None:
            drafter.lm_head.weight.data.copy_(head[self.vocabulary])
            drafter.lm_head.weight.requires_grad_(False)
            drafter.d2t.copy_(self.vocabulary - torch.arange(len(self.vocabulary)))
        return drafter

    def run(self, *, until: float = math.inf, tell: Callable[[Progress], None] = lambda progress: None) -> bool:
        """Trains to the last step or for ``until`` seconds; True when the last step was reached. State is saved."""
        leg = saved = 0.0
        blocks = 0
        while self.step < self.recipe.steps and leg <= until:
            began = time.perf_counter()
            loss, new_blocks = self._train_step()
            spent = time.perf_counter() - began
            self.step, blocks = self.step + 1, blocks + new_blocks
            leg, self.seconds = leg + spent, self.seconds + spent
            tell(Progress(self.step, self.recipe.steps, loss, blocks / leg))
            if leg - saved > SAVE_EVERY_SECONDS:
                self.save()
                saved = leg
        self.save()
        return self.step >= self.recipe.steps

    def save(self) -> None:
        """Writes the resumable state."""
        save_state(self.out, self.drafter, self.optimizer, self._progress())

    def _progress(self) -> dict[str, Any]:
        return {**self.facts, "step": self.step, "seconds": self.seconds, "shards": len(self.store.paths)}

    def _refuse_lost_data(self, shards: int) -> None:
        """A run may go on with more data, which keeps the held-out sequences; not with less."""
        if len(self.store.paths) < shards:
            raise BadInput(f"the run saw {shards} shards of data, now there are {len(self.store.paths)}")

    def _train_step(self) -> tuple[float, int]:
        generator = torch.Generator().manual_seed(self.recipe.seed * 1_000_003 + self.step)
        batch, k = self._draw(generator)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.recipe, self.step)
        loss = self._loss(batch, k)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(trained_parameters(self.drafter).values(), 1.0)
        self.optimizer.step()
        return float(loss.detach()), batch.num_blocks

    def _draw(self, generator: torch.Generator) -> tuple[Batch, int]:
        recipe = self.recipe
        per_epoch = len(self.train_refs) // recipe.sequences_per_step
        epoch, place = divmod(self.step, per_epoch)
        order = torch.randperm(
            len(self.train_refs), generator=torch.Generator().manual_seed(recipe.seed + 7919 * epoch)
        )
        chosen = order[place * recipe.sequences_per_step : (place + 1) * recipe.sequences_per_step].tolist()
        refs = [self.train_refs[i] for i in chosen]
        anchors = [random_anchors(ref, recipe.anchors_per_sequence, generator) for ref in refs]
        short = bool(torch.rand((), generator=generator) < recipe.short_share)
        k = recipe.short_k if short and recipe.short_k else recipe.block_size - 1
        return make_batch(self.store, refs, anchors, k), k

    def _loss(self, batch: Batch, k: int) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = block_hidden(self.drafter, batch, k)[:, :, 1:].flatten(0, 1)
            logits = self.drafter.logits(hidden)
            teacher = self._teacher(batch) if self.recipe.soft_share else None
        labels = batch.labels.flatten(0, 1)
        rows = torch.where(labels == IGNORED, labels, self.label_of[labels])
        return block_loss(logits, rows, self.weights[:k], teacher=teacher, soft_share=self.recipe.soft_share)

    @torch.no_grad()
    def _teacher(self, batch: Batch) -> Tensor:
        head = self.drafter.lm_head.weight if self.drafter.lm_head is not None else self.drafter.shared_head
        return nn.functional.linear(batch.final.flatten(0, 1).to(torch.bfloat16), head.to(torch.bfloat16))  # type: ignore[union-attr]

    def evaluate(self, k: int) -> HeldOut:
        """Held-out rounds at K proposals."""
        with _evaluating(self.drafter), torch.autocast("cpu", dtype=torch.bfloat16):
            return held_out(self.drafter, self.store, self.held_refs, k)

    def multiplications_per_step(self) -> int:
        """Multiply-adds of one forward pass of a full-K step: block rows, slots through the head, context columns."""
        recipe, config = self.recipe, self.drafter.config
        rows = recipe.sequences_per_step * recipe.anchors_per_sequence * recipe.block_size
        columns = (
            sum(ref.stop - ref.start for ref in self.train_refs) * recipe.sequences_per_step // len(self.train_refs)
        )
        layers = sum(p.numel() for p in self.drafter.layers.parameters())
        head = (config.draft_vocab_size or config.vocab_size) * config.hidden_size
        context = (
            self.drafter.fc.weight.numel()
            + 2 * config.num_layers * config.num_kv_heads * config.head_dim * config.hidden_size
        )
        return rows * (layers + head) + columns * context

    def response_tokens(self) -> int:
        """Response tokens in the training part of the data."""
        return sum(ref.stop - ref.start - ref.prompt_length for ref in self.train_refs)


@contextlib.contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    module.eval()
    yield
    module.train()


def learning_rate(recipe: Recipe, step: int) -> float:
    """Linear warm-up, then a cosine down to ``FINAL_LR_SHARE`` of the peak."""
    warm = min(1.0, (step + 1) / min(WARMUP_STEPS, max(1, recipe.steps // 10)))
    share = min(1.0, step / max(1, recipe.steps))
    cosine = 0.5 * (1.0 + math.cos(math.pi * share))
    return recipe.learning_rate * warm * (FINAL_LR_SHARE + (1.0 - FINAL_LR_SHARE) * cosine)


def _split(store: FeatureStore, held: int) -> tuple[list[SequenceRef], list[SequenceRef]]:
    """The first sequences are held out: prompts are shuffled, so they are a fair sample that stays as data grow."""
    usable = [ref for ref in store.sequences if ref.stop - ref.start - ref.prompt_length >= 2]
    held = min(held, len(usable) // 10)
    if len(usable) - held < 1 or held < 1:
        raise BadInput(f"{len(usable)} sequences are too few to train on and to hold some out")
    return usable[held:], usable[:held]


def _draft_vocabulary(store: FeatureStore, refs: Sequence[SequenceRef], size: int | None, target_rows: int) -> Tensor:
    """Target ids of the draft's head, rising: the most frequent response tokens, int64 [V_draft]."""
    if size is None or size >= target_rows:
        return torch.arange(target_rows)
    counts: Counter[int] = Counter()
    for ref in refs:
        counts.update(store.ids(ref)[ref.prompt_length :].tolist())
    frequent = [token for token, _ in counts.most_common(size)]
    # Ids are roughly in order of frequency in a byte-pair vocabulary, so small unseen ones fill up.
    unseen = (token for token in range(target_rows) if token not in counts)
    chosen = [*frequent, *(next(unseen) for _ in range(size - len(frequent)))]
    return torch.tensor(sorted(chosen))


def _label_table(vocabulary: Tensor, target_rows: int) -> Tensor:
    table = torch.full((target_rows,), IGNORED)
    table[vocabulary] = torch.arange(len(vocabulary))
    return table


def _draft_config(recipe: Recipe, target: Path, store: FeatureStore, vocabulary: Tensor) -> DraftConfig:
    about = read_target_config(target)
    raw = json.loads((target / "config.json").read_text(encoding="utf-8"))
    heads = raw["num_attention_heads"]
    cut = len(vocabulary) != about.vocab_size
    return DraftConfig(
        method="dflash",
        architecture="DFlashDraftModel",
        block_size=recipe.block_size,
        mask_token_id=recipe.mask_token_id,
        target_layer_ids=store.meta.target_layer_ids,
        num_layers=recipe.num_layers,
        hidden_size=about.hidden_size,
        intermediate_size=raw["intermediate_size"],
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads", heads),
        head_dim=raw.get("head_dim") or about.hidden_size // heads,
        rms_norm_eps=raw["rms_norm_eps"],
        rope_theta=float(about.rope_theta or 10_000.0),
        vocab_size=about.vocab_size,
        draft_vocab_size=len(vocabulary) if cut else None,
        target_hidden_size=about.hidden_size,
        num_target_layers=about.num_layers,
        causal=(False,) * recipe.num_layers,
        windows=(None,) * recipe.num_layers,
        dtype="bfloat16",
        max_position_embeddings=raw["max_position_embeddings"],
    )


def _parameter_groups(drafter: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    parameters = trained_parameters(drafter).values()
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
