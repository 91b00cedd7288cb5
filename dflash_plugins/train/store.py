"""The feature store: answers of the target and its features, in shards that are written whole or not at all.

A shard is one safetensors file of S sequences with N tokens in all:

``tokens``          int32 [N], prompt and response of all sequences, one after another
``starts``          int64 [S + 1], sequence s is ``tokens[starts[s]:starts[s + 1]]``
``prompt_lengths``  int64 [S]
``features``        bf16 [N, taps * target hidden], features of each token (the last row of a sequence is zero: its
                    token was never fed to the target)
``final``           bf16 [N, target hidden], the target's final-norm output, for soft labels

Its metadata name the target's fingerprint, the layer ids and the source of each prompt. Shards that disagree are
refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_plugins.errors import BadInput

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class StoreMeta:
    """What every shard of one store must agree on."""

    target_fingerprint: str
    target_layer_ids: tuple[int, ...]

    def as_metadata(self) -> dict[str, str]:
        """As safetensors metadata (strings only)."""
        return {"target_fingerprint": self.target_fingerprint, "target_layer_ids": json.dumps(self.target_layer_ids)}


@dataclass(frozen=True)
class SequenceRef:
    """Where one sequence lies: tokens ``start:stop`` of a shard, the first ``prompt_length`` of them the prompt."""

    shard: int
    start: int
    stop: int
    prompt_length: int


@dataclass(frozen=True)
class StoredSequence:
    """One sequence for a shard: ``ids``, how many are prompt, ``features`` [T, taps * Ht] and ``final`` [T, Ht]."""

    ids: Sequence[int]
    prompt_length: int
    features: torch.Tensor
    final: torch.Tensor


def pack(sequences: Sequence[StoredSequence]) -> dict[str, torch.Tensor]:
    """The tensors of a shard."""
    import torch

    lengths = torch.tensor([0, *(len(sequence.ids) for sequence in sequences)])
    return {
        "tokens": torch.tensor([token for sequence in sequences for token in sequence.ids], dtype=torch.int32),
        "starts": lengths.cumsum(0),
        "prompt_lengths": torch.tensor([sequence.prompt_length for sequence in sequences]),
        "features": torch.cat([sequence.features for sequence in sequences]).to(torch.bfloat16),
        "final": torch.cat([sequence.final for sequence in sequences]).to(torch.bfloat16),
    }


def write_shard(path: Path, tensors: dict[str, torch.Tensor], meta: StoreMeta, sources: Sequence[str]) -> None:
    """Writes one shard beside its place and renames it, so that a shard is either whole or absent."""
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    save_file(tensors, partial, metadata={**meta.as_metadata(), "sources": json.dumps(list(sources))})
    partial.replace(path)


class FeatureStore:
    """Reads the shards of a folder, memory-mapped."""

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        self.paths = sorted(folder.glob("shard-*.safetensors"))
        if not self.paths:
            raise BadInput(f"{folder}: no shard-*.safetensors in it; make the data first")
        self._files = [safe_open(path, framework="pt") for path in self.paths]
        self.meta = self._agreed_meta()
        self.tokens = [file.get_tensor("tokens") for file in self._files]
        self.sequences = list(self._index())

    def _agreed_meta(self) -> StoreMeta:
        metas = {path: file.metadata() for path, file in zip(self.paths, self._files, strict=True)}
        found = {(m["target_fingerprint"], m["target_layer_ids"]) for m in metas.values()}
        if len(found) != 1:
            raise BadInput(f"{self.paths[0].parent}: shards disagree on target or layer ids: {sorted(found)}")
        fingerprint, layer_ids = found.pop()
        return StoreMeta(fingerprint, tuple(json.loads(layer_ids)))

    def _index(self) -> Iterator[SequenceRef]:
        for shard, file in enumerate(self._files):
            starts = file.get_tensor("starts").tolist()
            prompts = file.get_tensor("prompt_lengths").tolist()
            for start, stop, prompt in zip(starts, starts[1:], prompts, strict=False):
                yield SequenceRef(shard, start, stop, prompt)

    def sources(self) -> list[str]:
        """The source name of every sequence, in the order of ``sequences``."""
        return [name for file in self._files for name in json.loads(file.metadata()["sources"])]

    def ids(self, ref: SequenceRef) -> torch.Tensor:
        """int32 [T], prompt and response."""
        tokens: torch.Tensor = self.tokens[ref.shard][ref.start : ref.stop]
        return tokens

    def rows(self, ref: SequenceRef, name: str) -> Any:
        """Rows of ``features`` or ``final`` of one sequence, bf16 [T, width]."""
        return self._files[ref.shard].get_slice(name)[ref.start : ref.stop]
