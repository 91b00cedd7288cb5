"""The information boundary of training for flex attention: the same rules as ``layout.training_mask``, tile by tile.

On a GPU a dense mask of many blocks over a long context costs memory and time that whole tiles without a visible key
need not cost. On a CPU the dense mask is faster; tests run this there without compiling it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class FlexMasks:
    """What blocks of several sequences may see, for each kind of layer; ``drafter.Drafter.hidden`` asks for it.

    ``anchors`` int [R, n] are positions in the sequences; ``lengths`` int [R] say how many of ``num_context`` columns
    are real. Blocks of ``block`` rows are flattened, keys are context columns first, as in ``layout.training_mask``.
    """

    def __init__(self, anchors: Tensor, lengths: Tensor, num_context: int, block: int) -> None:
        self._anchors, self._lengths, self._num_context, self._block = anchors, lengths, num_context, block
        self._made: dict[tuple[bool, int | None], BlockMask] = {}

    def rule(self, causal: bool, window: int | None) -> Rule:
        """``mask_mod`` of a layer: whether query row q of sequence b may see key column k."""
        anchors, lengths, num_context, block = self._anchors, self._lengths, self._num_context, self._block

        def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            anchor = anchors[b, q // block]
            own = k - num_context
            is_own = own >= 0
            before = (k < anchor) & (k < lengths[b]) & ~is_own
            allowed = torch.where(is_own, own // block == q // block, before)
            distance = anchor + q % block - torch.where(is_own, anchor + own % block, k)
            if causal:
                allowed = allowed & (distance >= 0)
            if window is not None:
                allowed = allowed & (distance < window) & (-distance < window)
            return allowed

        return seen

    def attend(self, causal: bool, window: int | None) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """Attention of such a layer: (query [R, heads, Q, D], key and value [R, kv_heads, C + Q, D]) -> as query."""
        made = self._made.get((causal, window))
        if made is None:
            rows = self._anchors.shape[1] * self._block
            made = self._made[causal, window] = create_block_mask(
                self.rule(causal, window),
                self._anchors.shape[0],
                None,
                rows,
                self._num_context + rows,
                device=str(self._anchors.device),
            )
        return functools.partial(_attend, made)


def _attend(mask: BlockMask, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    run = _compiled() if query.is_cuda else flex_attention
    return cast(Tensor, run(query, key, value, block_mask=mask, enable_gqa=query.shape[1] != key.shape[1]))


@functools.cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=True)
