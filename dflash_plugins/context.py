"""``ContextKV``: what a drafter keeps of the target's features, one K and V per drafter layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name everybody reads

from dflash_plugins.errors import BadInput


@dataclass(frozen=True)
class ContextKV:
    """Context keys and values of R requests, padded to C columns. Column order is position order.

    ``keys``, ``values``: one [R, C, kv_heads, head_dim] per drafter layer, in the drafter's dtype; keys are rotated.
    ``positions`` int64 [R, C]; ``lengths`` int64 [R], the real columns of each request. What stands in columns at or
    beyond the length is never read.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    positions: Tensor
    lengths: Tensor

    @property
    def num_columns(self) -> int:
        """C, padding included."""
        return self.positions.shape[1]

    def crop(self, lengths: Tensor) -> ContextKV:
        """The first ``lengths`` [R] columns of each request; BadInput when one is longer than what is there."""
        if bool((lengths > self.lengths).any()):
            raise BadInput(f"context cannot be cropped to {lengths.tolist()}: it holds {self.lengths.tolist()}")
        return _columns(self, slice(0, int(lengths.max())), lengths.to(self.lengths))

    def append(self, other: ContextKV) -> ContextKV:
        """Add the columns of ``other`` after the last real one. Only for contexts without padding of their own."""
        if bool((self.lengths != self.num_columns).any()):
            raise BadInput("columns can only be appended to a context without padding: crop it or keep rows apart")
        return ContextKV(
            tuple(torch.cat(pair, dim=1) for pair in zip(self.keys, other.keys, strict=True)),
            tuple(torch.cat(pair, dim=1) for pair in zip(self.values, other.values, strict=True)),
            torch.cat([self.positions, other.positions], dim=1),
            self.lengths + other.lengths,
        )

    def row(self, index: int) -> ContextKV:
        """The context of one request, R = 1, without padding."""
        length = int(self.lengths[index])
        return ContextKV(
            tuple(key[index : index + 1, :length] for key in self.keys),
            tuple(value[index : index + 1, :length] for value in self.values),
            self.positions[index : index + 1, :length],
            self.lengths[index : index + 1],
        )

    @staticmethod
    def stack(contexts: Sequence[ContextKV]) -> ContextKV:
        """Contexts of different widths as the rows of one, padded on the right."""
        columns = max(context.num_columns for context in contexts)
        wide = [_widened(context, columns) for context in contexts]
        layers = range(len(wide[0].keys))
        return ContextKV(
            tuple(torch.cat([context.keys[i] for context in wide]) for i in layers),
            tuple(torch.cat([context.values[i] for context in wide]) for i in layers),
            torch.cat([context.positions for context in wide]),
            torch.cat([context.lengths for context in wide]),
        )


def _columns(context: ContextKV, columns: slice, lengths: Tensor) -> ContextKV:
    return ContextKV(
        tuple(key[:, columns] for key in context.keys),
        tuple(value[:, columns] for value in context.values),
        context.positions[:, columns],
        lengths,
    )


def _widened(context: ContextKV, columns: int) -> ContextKV:
    missing = columns - context.num_columns
    return ContextKV(
        tuple(F.pad(key, (0, 0, 0, 0, 0, missing)) for key in context.keys),
        tuple(F.pad(value, (0, 0, 0, 0, 0, missing)) for value in context.values),
        F.pad(context.positions, (0, missing)),
        context.lengths,
    )
