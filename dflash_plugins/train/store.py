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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from dflash_plugins.errors import BadInput
from dflash_plugins.whole_file import whole_file

if TYPE_CHECKING:
    import torch


SEQUENCES_PER_SHARD = 256


@dataclass(frozen=True)
class StoreMeta:
    """What every shard of one store must agree on."""

    target_fingerprint: str
    target_layer_ids: tuple[int, ...]

    @classmethod
    def of(cls, metadata: Mapping[str, str]) -> StoreMeta:
        """From safetensors metadata."""
        return cls(metadata["target_fingerprint"], tuple(json.loads(metadata["target_layer_ids"])))

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


def shard_path(folder: Path, number: int) -> Path:
    """Where shard ``number`` of a store lies."""
    return folder / f"shard-{number:05d}.safetensors"


def write_shard(path: Path, tensors: dict[str, torch.Tensor], meta: StoreMeta, sources: Sequence[str]) -> None:
    """Writes one shard beside its place and renames it, so that a shard is either whole or absent."""
    from safetensors.torch import save_file

    with whole_file(path) as partial:
        save_file(tensors, partial, metadata={**meta.as_metadata(), "sources": json.dumps(list(sources))})


def has_shard(path: Path, meta: StoreMeta) -> bool:
    """Whether the shard is there already, so that a store is gone on with; BadInput when it is broken or another's."""
    if not path.exists():
        return False
    (file,) = _opened([path])
    found = StoreMeta.of(file.metadata())
    if found != meta:
        raise BadInput(
            f"{path} holds features of {found.target_fingerprint}, layers {list(found.target_layer_ids)}, not of "
            f"{meta.target_fingerprint}, layers {list(meta.target_layer_ids)}: choose another folder or remove it"
        )
    return True


def _opened(paths: Sequence[Path]) -> list[Any]:
    """Files of shards; BadInput names all that are no whole shard."""
    from safetensors import safe_open

    files, broken = [], []
    for path in paths:
        try:
            file = safe_open(path, framework="pt")
            _require_shard(file)
            files.append(file)
        except (OSError, SafetensorError, BadInput) as error:
            broken.append(f"{path.name}: {error}")
    if broken:
        raise BadInput(f"{paths[0].parent}: {'; '.join(broken)}. Remove these files and make them again")
    return files


def _require_shard(file: Any) -> None:
    """BadInput with the first thing that does not fit in the small tensors and the shapes of a shard."""
    missing = {"tokens", "starts", "prompt_lengths", "features", "final"} - set(file.keys())
    keys = {"target_fingerprint", "target_layer_ids", "sources"} - set(file.metadata() or {})
    if missing or keys:
        raise BadInput(f"has no {', '.join(sorted(missing | keys))}")
    starts, prompts = file.get_tensor("starts"), file.get_tensor("prompt_lengths")
    rows = {name: file.get_slice(name).get_shape()[0] for name in ("tokens", "features", "final")}
    lengths = starts.diff()
    fits = (
        int(starts[0]) == 0 and {int(starts[-1]), *rows.values()} == {rows["tokens"]} and len(prompts) == len(lengths)
    )
    if not fits or bool((lengths < prompts).any()) or bool((prompts < 0).any()):
        raise BadInput(f"its sequences do not fill its {rows['tokens']} tokens")
    if bool((file.get_tensor("tokens") < 0).any()):
        raise BadInput("holds token ids below 0")


class FeatureStore:
    """Reads the shards of a folder, memory-mapped, or of several folders one after another."""

    def __init__(self, *folders: Path) -> None:
        self._folders = ", ".join(map(str, folders))
        shards = {folder: sorted(folder.glob("shard-*.safetensors")) for folder in folders}
        if empty := [str(folder) for folder, paths in shards.items() if not paths]:
            raise BadInput(f"{', '.join(empty)}: no shard-*.safetensors in it; make the data first")
        self.paths = [path for paths in shards.values() for path in paths]
        self._files = _opened(self.paths)
        self.meta = self._agreed_meta()
        self.tokens = [file.get_tensor("tokens") for file in self._files]
        self.sequences = list(self._index())

    def _agreed_meta(self) -> StoreMeta:
        found = {StoreMeta.of(file.metadata()) for file in self._files}
        if len(found) != 1:
            listed = "; ".join(sorted(f"{one.target_fingerprint} {list(one.target_layer_ids)}" for one in found))
            raise BadInput(f"{self._folders}: shards disagree on target or layer ids: {listed}")
        return found.pop()

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

    def prepare(self, refs: Sequence[SequenceRef]) -> None:
        """Nothing to do: all rows are there."""
