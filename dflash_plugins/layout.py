"""Where a block's rows stand and what they may see: pure index rules on tensors (methods.md sections 1, 2 and 5).

Masks are boolean, True where a query may see a key. Keys are always ordered context columns first, block rows after.
"""

from __future__ import annotations

import torch
from torch import Tensor


def block_input_ids(anchors: Tensor, mask_token_id: int, k: int, prefix: Tensor | None = None) -> Tensor:
    """Input ids of one pass: ``[anchor, prefix.., MASK..]``.

    ``anchors`` int [R]; ``prefix`` int [R, m] with 0 <= m <= k, the tokens that earlier passes selected.
    Returns int64 [R, k + 1]. There are always k slots after the anchor, whatever is cut later.
    """
    ids = anchors.new_full((anchors.shape[0], k + 1), mask_token_id, dtype=torch.int64)
    ids[:, 0] = anchors
    if prefix is not None:
        ids[:, 1 : 1 + prefix.shape[1]] = prefix
    return ids


def block_positions(anchor_positions: Tensor, k: int) -> Tensor:
    """Positions n-1 .. n-1+k of a block. ``anchor_positions`` int [R] (each n-1); returns int64 [R, k + 1]."""
    return anchor_positions[:, None].long() + torch.arange(k + 1, device=anchor_positions.device)


def layer_visibility(query_positions: Tensor, key_positions: Tensor, *, causal: bool, window: int | None) -> Tensor:
    """The rule of one drafter layer: position i sees j iff i - j < window and, unless causal, also j - i < window.

    A causal layer sees j <= i only. Distances count from each query, not from the anchor.
    ``query_positions`` int [..., Q], ``key_positions`` int [..., S]; returns bool [..., Q, S].
    """
    distance = query_positions[..., :, None] - key_positions[..., None, :]
    seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if window is None:
        return seen
    seen = seen & (distance < window)
    return seen if causal else seen & (-distance < window)


def real_columns(lengths: Tensor, num_columns: int) -> Tensor:
    """Which padded context columns are real. ``lengths`` int [R]; returns bool [R, num_columns]."""
    return torch.arange(num_columns, device=lengths.device) < lengths[:, None]


def serving_mask(positions: Tensor, context_positions: Tensor, lengths: Tensor) -> Tensor:
    """One block per row: real context strictly before the row's anchor, and the whole own block.

    ``positions`` int [R, B] (column 0 is the anchor), ``context_positions`` int [R, C], ``lengths`` int [R].
    Returns bool [R, B, C + B].
    """
    rows, block = positions.shape
    before = real_columns(lengths, context_positions.shape[1]) & (context_positions < positions[:, :1])
    own = torch.ones(rows, block, dtype=torch.bool, device=positions.device)
    return torch.cat([before, own], dim=1)[:, None, :].expand(rows, block, -1)


def training_mask(anchors: Tensor, num_context: int, block: int) -> Tensor:
    """Many blocks of one sequence over the same context: the information boundary of training.

    A block sees context columns strictly before ITS anchor and its own rows; never another block, never the features
    of its own answer. ``anchors`` int [..., n] are positions in the sequence; context column j holds position j.
    Blocks are flattened: returns bool [..., n * block, num_context + n * block].
    """
    columns = torch.arange(num_context, device=anchors.device)
    before = (columns < anchors[..., None]).repeat_interleave(block, dim=-2)
    owner = torch.arange(anchors.shape[-1], device=anchors.device).repeat_interleave(block)
    own = (owner[:, None] == owner[None, :]).expand(*before.shape[:-1], -1)
    return torch.cat([before, own], dim=-1)


def training_positions(anchors: Tensor, block: int) -> Tensor:
    """Positions of flattened training blocks. ``anchors`` int [..., n]; returns int64 [..., n * block]."""
    positions = anchors[..., None].long() + torch.arange(block, device=anchors.device)
    return positions.flatten(-2)
