"""SGLang's attention in torch, which also knows how a block attends."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class BlockAttention(TorchNativeAttnBackend):
    """As shipped, and for the rows of a block: each request's B rows after its committed ones, in one call.

    On the target the rows attend causally. On the drafter a layer attends as its type says: causally, or to the whole
    block. Windows are counted from each row, to both sides where it is not causal.
    """

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self._blocks: tuple[Any, dict[tuple[bool, int | None], tuple[Tensor, Tensor]]] = (None, {})

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """As shipped; what was laid out for an earlier forward is void, also where its record is used again."""
        super().init_forward_metadata(forward_batch)
        self._blocks = (None, {})

    def forward_extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> Tensor:
        """Output [N, heads * head_dim] of the rows q, k, v [N, ...] of this forward."""
        if not forward_batch.forward_mode.is_target_verify():
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
        if save_kv_cache and k is not None:
            slots = KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc)
            self.token_to_kv_pool.set_kv_buffer(layer, slots, k, v)
        rows = len(forward_batch.seq_lens)
        query = q.view(rows, -1, layer.tp_q_head_num, layer.qk_head_dim).transpose(1, 2)
        slots, allowed = self._block(forward_batch, query.shape[2], layer)
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)[slots].to(query.dtype)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)[slots].to(query.dtype)
        out = scaled_dot_product_attention(
            query,
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=allowed[:, None],
            scale=layer.scaling,
            enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
        )
        return out.transpose(1, 2).reshape(q.shape[0], -1)

    def _block(self, forward_batch: Any, width: int, layer: Any) -> tuple[Tensor, Tensor]:
        """As ``_laid_out``: once per forward for all layers that attend alike."""
        if self._blocks[0] is not forward_batch:
            self._blocks = (forward_batch, {})
        causal = layer.attn_type != AttentionType.ENCODER_ONLY
        key, known = (causal, layer.sliding_window_size), self._blocks[1]
        if key not in known:
            known[key] = self._laid_out(forward_batch.req_pool_indices, forward_batch.seq_lens.long(), width, *key)
        return known[key]

    def _laid_out(
        self, requests: Tensor, lengths: Tensor, width: int, causal: bool, window: int | None
    ) -> tuple[Tensor, Tensor]:
        """Cache slots [R, L] of each request's context and block, and which of them its rows see, bool [R, B, L]."""
        last = int(lengths.max()) + width
        key = torch.arange(last, device=lengths.device)
        position = lengths[:, None] + torch.arange(width, device=lengths.device)
        there = key < lengths[:, None] + width
        slots = self.req_to_token_pool.req_to_token[requests, :last].long()
        # Beyond its end a row names slots of others: whatever stands there must not get into a sum, not even times 0.
        slots = torch.where(there, slots, slots[:, :1])
        distance = position[..., None] - key  # [R, B, L]
        allowed = there[:, None].expand(distance.shape)
        if causal:
            allowed = allowed & (distance >= 0)
        if window is not None and window > -1:
            # The engine keeps the number of tokens to the left, which is one less than the window.
            allowed = allowed & (distance <= window) & (distance >= -window)
        return slots, allowed
