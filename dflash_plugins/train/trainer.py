"""``dflash-plugins train``: a drafter of any method on a feature store, in one process or several, resumable.

A step cuts random blocks out of answers (methods.md section 5). DFlash and DFlash 2 see the anchor alone; D-Loop also
sees a true prefix in a second input of the same blocks (section 4). Drafters with a selector add its loss (section 3).
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor, nn

from dflash_plugins.drafter import Drafter
from dflash_plugins.errors import BadInput
from dflash_plugins.selector import candidates
from dflash_plugins.train.answers import target_fingerprint
from dflash_plugins.train.batches import Batch, Source, make_batch, random_anchors
from dflash_plugins.train.blocks import BatchBackbone
from dflash_plugins.train.data import draft_vocabulary, label_table, require_same_target, split
from dflash_plugins.train.evaluate import HeldOut, held_out
from dflash_plugins.train.initialise import TargetTensors, initialise_from_target
from dflash_plugins.train.losses import (
    ALONE,
    IGNORED,
    Processes,
    at_least_fp32,
    block_loss,
    keep_best,
    selector_loss,
    slot_weights,
)
from dflash_plugins.train.recipe import Recipe, draft_config, learning_rate
from dflash_plugins.train.sharding import average_now, gathered, shard, whole
from dflash_plugins.train.start import freeze_others, load_start, require_same_geometry, take_tensors
from dflash_plugins.train.state import load_state, save_state, state_tensors, trained_parameters
from dflash_plugins.train.store import FeatureStore, SequenceRef

SAVE_EVERY_SECONDS = 300.0
ACCURACY_EVERY = 10
WATCHED_SEQUENCES = 16
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Part:
    """One input of a step: the true tokens of slots 1..``given`` stand in it, slots given + 1..``last`` bear loss."""

    given: int
    last: int


@dataclass(frozen=True)
class Progress:
    """What a run tells its caller after every step of blocks of ``k`` masks.

    ``accuracy``: every few steps, the share of its blocks whose best token is the true one, slot by slot; a slot after
    a given prefix was drafted behind the true tokens. ``held_out``: now and then, rounds walked over a few answers that
    are not trained on.
    """

    step: int
    steps: int
    loss: float
    blocks_per_second: float
    k: int
    accuracy: tuple[float, ...] | None = None
    held_out: HeldOut | None = None


class _Step(nn.Module):
    """The loss of a step as a module, since what averages gradients over processes wraps one."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__()
        self.drafter = trainer.drafter
        self._loss = trainer.loss

    def forward(self, batch: Batch, parts: Sequence[Part], k: int) -> Tensor:
        """See ``Trainer.loss``."""
        return self._loss(batch, parts, k)


class Trainer:
    """One run: builds the drafter, walks the steps, saves, evaluates.

    ``target`` is a folder; ``data`` one of stored features, or whatever else gives answers and features.
    Started in several processes (torchrun, accelerate), each takes its share of the sequences of every step, and the
    gradients are averaged: steps, losses and weights are those of one process. The first one saves. ``divided``: every
    process keeps a part of the drafter (FSDP2) instead of all of it.
    """

    def __init__(self, recipe: Recipe, target: Path, data: Path | Source, out: Path, *, divided: bool = False) -> None:
        recipe.require()
        self.recipe, self.out = recipe, out
        self.accelerator = _accelerator()
        self.processes = _processes(self.accelerator)
        self._divided = divided
        self._require_shares()
        self.store: Source = FeatureStore(data) if isinstance(data, Path) else data
        require_same_target(self.store, target)
        self.tensors = TargetTensors(target)
        self.train_refs, self.held_refs = split(self.store, recipe.held_out_sequences, recipe.block_size)
        start = load_start(recipe.start_from)
        self.vocabulary = self._vocabulary(start)
        self.taken: list[str] = []
        self.drafter = self._build(target, start).to(self.device)
        freeze_others(self.drafter, recipe.train_only)
        self.label_of = label_table(self.vocabulary, self.drafter.config.vocab_size).to(self.device)
        self._right: Tensor | None = None
        self._module = self._shared(_Step(self))
        groups = _parameter_groups(self.drafter, recipe.weight_decay)
        self.optimizer = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95))
        self.facts = self._facts()
        found = load_state(out, self.drafter, self.optimizer, self.facts, asdict(Recipe()))
        self.step = int(found.get("step", 0))
        self._refuse_lost_data(int(found.get("shards", 0)))
        self.seconds = float(found.get("seconds", 0.0))

    @property
    def device(self) -> torch.device:
        """Where this process trains."""
        return cast(torch.device, self.accelerator.device)

    def _require_shares(self) -> None:
        processes, sequences = self.accelerator.num_processes, self.recipe.sequences_per_step
        if self._divided and processes == 1:
            raise BadInput("--divide: there is one process, and nobody to share with; start with torchrun")
        if sequences % (processes * self.recipe.accumulate):
            raise BadInput(
                f"sequences_per_step {sequences} cannot be shared by {processes} processes in {self.recipe.accumulate} "
                "turns (accumulate): choose a multiple of both"
            )

    def _shared(self, step: _Step) -> nn.Module:
        """The step, so that its gradients are averaged over processes."""
        if not self._divided:
            return cast(nn.Module, self.accelerator.prepare_model(step))
        shard(step, self.device)
        return step

    def _vocabulary(self, start: Drafter | None) -> Tensor:
        """Target ids of the draft's head: those of the drafter the run starts from, or the most frequent ones."""
        if start is not None and start.d2t is not None:
            return start.target_ids(torch.arange(len(start.d2t)))
        size, rows = self.recipe.draft_vocab_size, self.tensors.head().shape[0]
        return draft_vocabulary(self.store, self.train_refs, size, rows)

    def _build(self, target: Path, start: Drafter | None) -> Drafter:
        head = self.tensors.head()
        cut = len(self.vocabulary) if len(self.vocabulary) != head.shape[0] else None
        config = draft_config(self.recipe, target, self.store.meta.target_layer_ids, cut)
        if start is not None:
            require_same_geometry(config, start.config)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.recipe.seed)
            drafter = Drafter(config)
        initialise_from_target(drafter, self.tensors, int(config.num_target_layers or 0))
        drafter.bind(self.tensors.embedding(), head)
        if drafter.lm_head is not None and drafter.d2t is not None:
            drafter.lm_head.weight.data.copy_(head[self.vocabulary])
            drafter.lm_head.weight.requires_grad_(False)
            drafter.d2t.copy_(self.vocabulary - torch.arange(len(self.vocabulary)))
        if drafter.candidate_selector is not None:  # what the draft cannot say is no candidate
            said = torch.zeros(head.shape[0], dtype=torch.bool).index_fill_(0, self.vocabulary, True)
            drafter.candidate_selector.successor_codebook.data[~said] = 0.0
        if start is not None:
            self.taken = take_tensors(drafter, start)
        return drafter

    def _facts(self) -> dict[str, Any]:
        """What a state of this run must agree on, as JSON gives it back; a drafter is known by its weights."""
        facts: dict[str, Any] = {**asdict(self.recipe), "target": self.store.meta.target_fingerprint}
        if self.recipe.start_from is not None:
            facts["start_from"] = target_fingerprint(Path(self.recipe.start_from))
        del facts["steps"]
        return dict(json.loads(json.dumps(facts)))

    def run(
        self,
        *,
        until: float = math.inf,
        tell: Callable[[Progress], None] = lambda progress: None,
        held_out_every: int | None = None,
    ) -> bool:
        """Trains to the last step or for ``until`` seconds; True when the last step was reached. State is saved.

        ``held_out_every`` that many steps a few held-out answers are drafted; that changes no weight.
        """
        leg = saved = 0.0
        blocks = 0
        while self.step < self.recipe.steps and not self._anywhere(leg > until):
            began = time.perf_counter()
            loss, k = self._train_step()
            spent = time.perf_counter() - began
            self.step, blocks = self.step + 1, blocks + self.recipe.blocks_per_step()
            leg, self.seconds = leg + spent, self.seconds + spent
            watched = held_out_every is not None and self.step % held_out_every == 0
            found = self.evaluate(self.recipe.watched_k(), WATCHED_SEQUENCES) if watched else None
            tell(Progress(self.step, self.recipe.steps, loss, blocks / leg, k, self._accuracy(), found))
            if self._anywhere(leg - saved > SAVE_EVERY_SECONDS):
                self.save()
                saved = leg
        self.save()
        return self.step >= self.recipe.steps

    def leave(self) -> None:
        """The end of training, in all processes together: each has the whole drafter, and no channel to the others."""
        if self._divided:
            self._undivide()
        # Whatever still holds the channel when the interpreter ends aborts it: the wrapped step, parts of a drafter.
        self._module = _Step(self)
        del self.optimizer
        self.accelerator.free_memory()
        leave_together()

    def _undivide(self) -> None:
        divided, copy = self.drafter, Drafter(self.drafter.config).to(self.device)
        copy.bind(self.tensors.embedding(), self.tensors.head())
        with torch.no_grad():
            for mine, theirs in zip(copy.parameters(), divided.parameters(), strict=True):
                mine.copy_(whole(theirs.detach()))
                mine.requires_grad_(theirs.requires_grad)
            for buffer, other in zip(copy.buffers(), divided.buffers(), strict=True):
                buffer.copy_(other)
        self.drafter, self._divided = copy, False

    def _anywhere(self, here: bool) -> bool:
        """Whether it holds in any process: clocks differ, and all have to do the same."""
        if self.processes.count == 1:
            return here
        return bool(self.processes.total(torch.tensor(float(here), device=self.device)) > 0)

    def save(self) -> None:
        """Writes the resumable state, in the first process; the others wait for it."""
        tensors = (
            state_tensors(self.drafter, self.optimizer) if self._divided or self.accelerator.is_main_process else {}
        )
        if self.accelerator.is_main_process:
            save_state(self.out, tensors, self._progress())
        self.accelerator.wait_for_everyone()

    def _progress(self) -> dict[str, Any]:
        return {**self.facts, "step": self.step, "seconds": self.seconds, "shards": len(self.store.paths)}

    def _refuse_lost_data(self, shards: int) -> None:
        """A run may go on with more data, which keeps the held-out sequences; not with less."""
        if len(self.store.paths) < shards:
            raise BadInput(f"the run saw {shards} shards of data, now there are {len(self.store.paths)}")

    def _train_step(self) -> tuple[float, int]:
        """The loss of one step, and the K of its blocks."""
        generator = torch.Generator().manual_seed(self.recipe.seed * 1_000_003 + self.step)
        refs, anchors, k = self._draw(generator)
        parts = self._draw_parts(k, generator)
        self._right = torch.zeros(2, k, device=self.device) if (self.step + 1) % ACCURACY_EVERY == 0 else None
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.recipe, self.step)
        self.optimizer.zero_grad(set_to_none=True)
        turns, losses = self.recipe.accumulate, []
        for turn in range(turns):
            mine = slice(self.accelerator.process_index * turns + turn, None, self.accelerator.num_processes * turns)
            with self._averaging(last=turn == turns - 1):
                losses.append(self._backward(refs[mine], anchors[mine], parts, k))
        nn.utils.clip_grad_norm_(trained_parameters(self.drafter).values(), 1.0)
        self.optimizer.step()
        return sum(losses) / turns, k

    def _accuracy(self) -> tuple[float, ...] | None:
        """Of this process's blocks in the last step, slot by slot; None where it was not counted."""
        if self._right is None:
            return None
        right, known = self._right
        return tuple((right / known.clamp_min(1)).tolist())

    def _averaging(self, *, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Gradients are averaged over processes once, in the last turn."""
        if self._divided:
            average_now(self._module, now=last)
            return contextlib.nullcontext()
        return contextlib.nullcontext() if last else self.accelerator.no_sync(self._module)

    def _backward(self, refs: Sequence[SequenceRef], anchors: Sequence[Tensor], parts: Sequence[Part], k: int) -> float:
        """Adds the gradients of these sequences' blocks; their loss, averaged over processes."""
        batch = make_batch(self.store, refs, anchors, k).to(self.device)
        loss = self._module(batch, parts, k)
        mean = float(self.processes.total(loss.detach())) / self.processes.count
        if not math.isfinite(mean):
            self._refuse_non_finite(mean, batch, refs)
        self.accelerator.backward(loss / self.recipe.accumulate)
        return mean

    def _refuse_non_finite(self, loss: float, batch: Batch, refs: Sequence[SequenceRef]) -> NoReturn:
        """Before a step is taken, in every process: weights that were NaN once stay so."""
        finite = torch.isfinite(batch.features).flatten(1).all(dim=1).tolist()
        names = sorted({self.store.paths[ref.shard].name for ref, good in zip(refs, finite, strict=True) if not good})
        cause = "the learning rate may be too high, or another process names the data"
        if names:
            cause = f"features in {', '.join(names)} are not finite: make them again"
        raise BadInput(f"the loss of step {self.step + 1} is {loss}: {cause}. {self.out} is as it was last saved")

    def _draw(self, generator: torch.Generator) -> tuple[list[SequenceRef], list[Tensor], int]:
        """Sequences of a step, their anchors, and K: the same in every process."""
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
        return refs, anchors, recipe.short_k if short and recipe.short_k else recipe.block_size - 1

    def _draw_parts(self, k: int, generator: torch.Generator) -> list[Part]:
        """One input of all slots, or for D-Loop the prefix slots and, with them given, the slots after them."""
        choices = self.recipe.prefix_choices(k)
        if not choices:
            return [Part(0, k)]
        given = choices[int(torch.randint(len(choices), (), generator=generator))]
        return [Part(0, given), Part(given, k)]

    def loss(self, batch: Batch, parts: Sequence[Part], k: int) -> Tensor:
        """Mean over ``parts`` of the loss of each, a scalar; they share the context and differ in what is given."""
        with self._precision():
            backbone = BatchBackbone.of(self.drafter, batch, k)
            return torch.stack([self._part_loss(backbone, part) for part in parts]).mean()

    def _part_loss(self, backbone: BatchBackbone, part: Part) -> Tensor:
        slots = slice(part.given, part.last)
        labels = backbone.labels
        # Beyond the sequence there is no true token; nothing of such a block is judged, so any token may stand there.
        hidden = backbone.hidden(labels[:, : part.given].clamp_min(0), slots)
        logits = backbone.logits(hidden)
        rows = torch.where(labels == IGNORED, labels, self.label_of[labels])[:, slots]
        weights = slot_weights(part.last - part.given, self.recipe.decay()).to(hidden.device)
        if self._right is not None:
            right = (logits.detach().argmax(-1) == rows) & (rows != IGNORED)
            self._right[:, slots] += torch.stack([right.sum(0), (labels[:, slots] != IGNORED).sum(0)])
        share, expected = self.recipe.soft_share, self.recipe.expected_weight
        teacher = self._teacher(backbone.batch.final[:, :, slots]) if share else None
        loss = block_loss(
            logits,
            rows,
            weights,
            teacher=teacher,
            soft_share=share,
            expected_weight=expected,
            processes=self.processes,
        )
        if self.drafter.candidate_selector is None:
            return loss
        return loss + self._selector_loss(backbone, hidden, logits, slots, weights)

    def _selector_loss(
        self, backbone: BatchBackbone, hidden: Tensor, logits: Tensor, slots: slice, weights: Tensor
    ) -> Tensor:
        selector = self.drafter.candidate_selector
        assert selector is not None
        labels = backbone.labels
        previous = torch.cat([backbone.anchors[:, None], labels[:, :-1]], dim=1)
        unary, draft_ids = candidates(at_least_fp32(logits), selector.top_k)
        ids = backbone.target_ids(draft_ids)
        with torch.autocast(self.device.type, enabled=False):
            hidden, true, before = at_least_fp32(hidden), labels[:, slots], previous[:, slots]
            expected = self.recipe.expected_weight
            return selector_loss(
                selector,
                hidden,
                ids,
                unary,
                true,
                before,
                weights,
                expected_weight=expected,
                processes=self.processes,
            )

    @torch.no_grad()
    def _teacher(self, final: Tensor) -> Tensor:
        """The target's logits over the rows of the draft's head, from its final hidden states [R, n, S, Ht]."""
        head = self.drafter.lm_head.weight if self.drafter.lm_head is not None else self.drafter.shared_head
        dtype = _DTYPES[self.recipe.precision]
        blocks = final.flatten(0, 1)
        # As one matrix: some of a block's slots are no contiguous rows, and a batched product copies the head for each.
        logits = nn.functional.linear(blocks.flatten(0, 1).to(dtype), head.to(dtype))  # type: ignore[union-attr]
        return keep_best(logits.unflatten(0, blocks.shape[:2]), self.recipe.soft_top_k)

    def _precision(self) -> contextlib.AbstractContextManager[None]:
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.recipe.precision == "bf16")

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the exported weights."""
        return _DTYPES[self.recipe.precision]

    def evaluate(self, k: int, sequences: int | None = None) -> HeldOut:
        """Held-out rounds at K proposals, drafted as the method drafts; of the first ``sequences`` answers, or all."""
        with gathered(self._module), _evaluating(self.drafter), self._precision():
            return held_out(self.drafter, self.store, self.held_refs[:sequences], k)

    def multiplications_per_step(self) -> float:
        """Multiply-adds of a mean step, forward: block rows of all inputs, slots in the head, context columns."""
        recipe, config = self.recipe, self.drafter.config
        rows = slots = 0.0
        for k, share in recipe.masks():
            inputs = 2 if recipe.prefix_choices(k) else 1
            rows += share * inputs * recipe.blocks_per_step() * (k + 1)
            slots += share * recipe.blocks_per_step() * k
        columns = (
            sum(ref.stop - ref.start for ref in self.train_refs) * recipe.sequences_per_step // len(self.train_refs)
        )
        layers = sum(p.numel() for p in self.drafter.layers.parameters())
        head = (config.draft_vocab_size or config.vocab_size) * config.hidden_size
        context = (
            self.drafter.fc.weight.numel()
            + 2 * config.num_layers * config.num_kv_heads * config.head_dim * config.hidden_size
        )
        return rows * layers + slots * head + columns * context

    def response_tokens(self) -> int:
        """Response tokens in the training part of the data."""
        return sum(ref.stop - ref.start - ref.prompt_length for ref in self.train_refs)


def _accelerator() -> Accelerator:
    """Of this process among those that train together; it looks for others on a CPU only if told that it is on one."""
    # What is lent by the target never changes: it need not be sent around.
    handlers = [DistributedDataParallelKwargs(broadcast_buffers=False)]
    return Accelerator(cpu=on_cpu(), kwargs_handlers=handlers)


def _processes(accelerator: Accelerator) -> Processes:
    count = accelerator.num_processes
    return Processes(count, lambda scalar: accelerator.reduce(scalar.detach(), reduction="sum")) if count > 1 else ALONE


def leave_together() -> None:
    """The end of training in several processes: left to the interpreter, threads of the channel between them abort."""
    state = PartialState()
    state.wait_for_everyone()
    if state.num_processes > 1:
        state.destroy_process_group()


def on_cpu() -> bool:
    """Whether nothing faster is there."""
    return not torch.accelerator.is_available()


@contextlib.contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    module.eval()
    yield
    module.train()


def _parameter_groups(drafter: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    parameters = trained_parameters(drafter).values()
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
