"""Features that are computed while training runs, for targets whose features are too many to store.

:class:`LiveFeatures` stands where training has a ``FeatureStore``: the answers come from a JSON-lines file, features
from a transformers target in memory. A step's sequences go through the target together (``prepare``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dflash_plugins.errors import BadInput
from dflash_plugins.features import FeatureTap
from dflash_plugins.train.answers import Answer, read_answers, target_fingerprint
from dflash_plugins.train.store import SEQUENCES_PER_SHARD, SequenceRef, StoreMeta

TOKENS_AT_ONCE = 16384
KEPT_SEQUENCES = 8


class LiveFeatures:
    """Answers of a file and features of the target in the folder ``target``, computed when they are asked for.

    ``paths``      the file, once for each shard that ``build_store`` would make of its answers
    ``meta``       fingerprint of the target and the layers that are read
    ``sequences``  one reference per answer, in the order of the file: those of the stored features of the same answers

    The target runs in ``dtype`` on the accelerator, or on the CPU where there is none. ``keep`` bounds the sequences
    whose rows are kept, but those of the last ``prepare`` always are. Raises BadInput, with the line, for an answer
    that ``read_answers`` refuses or that the target cannot read, and for layers that it does not have.
    """

    def __init__(
        self,
        path: Path,
        target: Path,
        target_layer_ids: Sequence[int],
        *,
        dtype: torch.dtype = torch.bfloat16,
        keep: int = KEPT_SEQUENCES,
    ) -> None:
        answers = read_answers(path, target)
        _require_readable(answers, path, target)
        self._model = _load(target, dtype)
        self._tap = FeatureTap(self._model, target_layer_ids)
        self.meta = StoreMeta(target_fingerprint(target), tuple(target_layer_ids))
        shards = [answers[i : i + SEQUENCES_PER_SHARD] for i in range(0, len(answers), SEQUENCES_PER_SHARD)]
        self.paths = [path] * len(shards)
        self.sequences = [ref for number, shard in enumerate(shards) for ref in _refs(number, shard)]
        self._tokens = [_tokens(shard) for shard in shards]
        self._sources = [answer.source for answer in answers]
        self._keep = keep
        self._kept: dict[SequenceRef, dict[str, Tensor]] = {}

    def sources(self) -> list[str]:
        """The source name of every sequence, in the order of ``sequences``."""
        return list(self._sources)

    def ids(self, ref: SequenceRef) -> Tensor:
        """int32 [T], prompt and response."""
        return self._tokens[ref.shard][ref.start : ref.stop]

    def rows(self, ref: SequenceRef, name: str) -> Tensor:
        """Rows of ``features`` or ``final`` of one sequence, bf16 [T, width] on the target's device."""
        if ref not in self._kept:
            self.prepare([ref])
        return self._kept[ref][name]

    def prepare(self, refs: Sequence[SequenceRef]) -> None:
        """Computes what is not kept of ``refs``, together; what was prepared longest ago is dropped."""
        wanted = list(dict.fromkeys(refs))
        for group in _groups([ref for ref in wanted if ref not in self._kept]):
            found = target_rows(self._model, self._tap, [self.ids(ref) for ref in group])
            for ref, (features, final) in zip(group, found, strict=True):
                self._kept[ref] = {"features": _own(features), "final": _own(final)}
        for ref in wanted:
            self._kept[ref] = self._kept.pop(ref)
        for ref in list(self._kept)[: -max(self._keep, len(wanted))]:
            del self._kept[ref]


@torch.no_grad()
def target_rows(model: Any, tap: FeatureTap, sequences: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Features [T, taps * Ht] and final-norm output [T, Ht] of each of ``sequences``, integer ids [T].

    One forward of ``model`` with padding on the right; the results are views in the model's dtype, on its device.
    """
    device = model.device
    ids = pad_sequence([sequence.long() for sequence in sequences], batch_first=True).to(device)
    lengths = [len(sequence) for sequence in sequences]
    mask = torch.arange(ids.shape[1], device=device) < torch.tensor(lengths, device=device)[:, None]
    # Whoever evaluates does so under autocast, which would change the features.
    with tap, torch.autocast(device.type, enabled=False):
        final = model.get_decoder()(ids, attention_mask=mask.long(), use_cache=False).last_hidden_state
        features = tap.take()
    return [(features[row, :length], final[row, :length]) for row, length in enumerate(lengths)]


def _own(rows: Tensor) -> Tensor:
    """bf16 as in a store, and a copy: a view would keep the padded rows of all sequences."""
    return rows.to(torch.bfloat16, copy=True)


def _groups(refs: Sequence[SequenceRef]) -> Iterator[list[SequenceRef]]:
    """Sequences of like length for one forward each, of at most ``TOKENS_AT_ONCE`` tokens with their padding."""
    group: list[SequenceRef] = []
    for ref in sorted(refs, key=_length, reverse=True):
        if group and (len(group) + 1) * _length(group[0]) > TOKENS_AT_ONCE:
            yield group
            group = []
        group.append(ref)
    if group:
        yield group


def _length(ref: SequenceRef) -> int:
    return ref.stop - ref.start


def _refs(shard: int, answers: Sequence[Answer]) -> Iterator[SequenceRef]:
    start = 0
    for answer in answers:
        stop = start + len(answer.prompt_ids) + len(answer.response_ids)
        yield SequenceRef(shard, start, stop, len(answer.prompt_ids))
        start = stop


def _tokens(answers: Sequence[Answer]) -> Tensor:
    ids = [token for answer in answers for part in (answer.prompt_ids, answer.response_ids) for token in part]
    return torch.tensor(ids, dtype=torch.int32)


def _load(target: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    model = AutoModelForCausalLM.from_pretrained(target, dtype=dtype).eval().requires_grad_(False)
    return model.to(here or torch.device("cpu"))


def _require_readable(answers: Sequence[Answer], path: Path, target: Path) -> None:
    """BadInput for an answer with more tokens than the target has positions, or with ids that it does not have."""
    from transformers import AutoConfig

    if not answers:
        raise BadInput(f"{path}: no answer in it")
    config = AutoConfig.from_pretrained(target).get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    for number, answer in enumerate(answers, 1):
        length = len(answer.prompt_ids) + len(answer.response_ids)
        largest = max(*answer.prompt_ids, *answer.response_ids, 0)
        if positions is not None and length > positions:
            raise BadInput(f"{path}, line {number}: {length} tokens, the target has {positions} positions")
        if largest >= config.vocab_size:
            raise BadInput(
                f"{path}, line {number}: token id {largest}, the target's vocabulary has {config.vocab_size}"
            )
