"""The layers of a drafter, with the parameter names of the released checkpoints (methods.md sections 2 and 3)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name everybody reads

from dflash_plugins.config import ConvConfig, DraftConfig
from dflash_plugins.errors import Refused
from dflash_plugins.findings import Finding, Severity

INIT_STD = 0.02

Mask = Tensor | Callable[[Tensor, Tensor, Tensor], Tensor]
"""What rows may see: bool [R or 1, Q, C + Q], or the whole attention that knows it, as ``train.flex`` gives."""


class Rotary:
    """Rotary angles of the "neox halves" layout: channel c turns with channel c + head_dim / 2.

    Frequencies stay fp32 whatever the drafter's dtype is, so this is no module: casting one would round them.
    """

    def __init__(self, config: DraftConfig) -> None:
        self._inverse, self._scale = _inverse_frequencies(config)

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, fp32 [..., 1, head_dim] of int ``positions`` [...]; the 1 stands for the heads."""
        angles = positions[..., None].float() * self._inverse.to(positions.device)
        angles = torch.cat([angles, angles], dim=-1)[..., None, :]
        return angles.cos() * self._scale, angles.sin() * self._scale


def _inverse_frequencies(config: DraftConfig) -> tuple[Tensor, float]:
    scaling = dict(config.rope_scaling or {})
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu") / config.head_dim
        return 1.0 / config.rope_theta**exponents, 1.0
    # The scaled variants are the target library's own; the core does without it until a drafter asks for one.
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    described = Qwen3Config(
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters={**scaling, "rope_type": kind, "rope_theta": config.rope_theta},
    )
    inverse, scale = ROPE_INIT_FUNCTIONS[kind](described, torch.device("cpu"))
    return inverse.float(), float(scale)


def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Turn ``x`` [..., heads, head_dim] by ``angles`` (cos, sin), computed in fp32, in the dtype of ``x``."""
    cos, sin = angles
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (x.float() * cos + turned * sin).to(x.dtype)


class RMSNorm(nn.RMSNorm):
    """Root-mean-square norm in the dtype of its weight: under autocast the input may be narrower."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., channels] to the same."""
        return super().forward(x.to(self.weight.dtype))


class Attention(nn.Module):
    """Block rows attend to context columns and to block rows; q and k are normed per head, then rotated."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        hidden, heads, kv_heads = config.hidden_size, config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        self.groups = heads // kv_heads
        bias = config.attention_bias
        self.q_proj = nn.Linear(hidden, heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden, kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden, kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * self.head_dim, hidden, bias=bias)
        self.q_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def key_value(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """K (normed, rotated) and V of rows ``x`` [R, N, H]; both [R, N, kv_heads, head_dim].

        Block rows and context rows (after ``hidden_norm``; no ``input_layernorm``) both come through here.
        """
        key = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        value = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        return rotate(self.k_norm(key), angles), value

    def forward(
        self, x: Tensor, angles: tuple[Tensor, Tensor], context_key: Tensor, context_value: Tensor, mask: Mask
    ) -> Tensor:
        """``x`` [R, Q, H], context K/V [R, C, kv_heads, head_dim] and ``mask`` of C + Q keys -> [R, Q, H]."""
        query = self.q_proj(x).unflatten(-1, (-1, self.head_dim))
        query = rotate(self.q_norm(query), angles)
        key, value = self.key_value(x, angles)
        query, keys, values = query.transpose(1, 2), _joined(context_key, key), _joined(context_value, value)
        if isinstance(mask, Tensor):
            # Repeated by hand because few kernels take grouped heads with a mask.
            keys, values = (one.repeat_interleave(self.groups, dim=1).to(query.dtype) for one in (keys, values))
            mixed = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask[:, None])
        else:
            mixed = mask(query, keys.to(query.dtype), values.to(query.dtype))
        mixed = mixed.transpose(1, 2).flatten(-2)
        projected: Tensor = self.o_proj(mixed)
        return projected


def _joined(context: Tensor, own: Tensor) -> Tensor:
    """[R, kv_heads, C + Q, head_dim]."""
    return torch.cat([context.to(own.dtype), own], dim=1).transpose(1, 2)


class Mlp(nn.Module):
    """The gated MLP: down(silu(gate(x)) * up(x)), [..., H] to [..., H]."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] to [..., H]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class BlockConv(nn.Module):
    """The dynamic convolution around one sublayer (DFlash 2).

    ``base_kernel`` [2, taps, H] and a predicted part, one coefficient per group of channels, for each of the two sides
    (0: the sublayer's input, 1: its output). Fresh weights pass everything through unchanged.
    """

    def __init__(self, hidden_size: int, conv: ConvConfig) -> None:
        super().__init__()
        self.taps, self.num_groups = conv.kernel_size, hidden_size // conv.group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, self.taps, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, 2 * self.taps * self.num_groups, bias=False)
        self.pass_through()

    def pass_through(self) -> None:
        """Set weights that change nothing: 1 on the own row, 0 elsewhere."""
        nn.init.zeros_(self.base_kernel)
        nn.init.ones_(self.base_kernel[:, 0])
        nn.init.zeros_(self.kernel_projection.weight)

    def kernels(self, normed: Tensor) -> Tensor:
        """Coefficients of both sides from the normed sublayer input [R, Q, H]; [R, Q, 2, taps, groups]."""
        predicted: Tensor = self.kernel_projection(normed)
        return predicted.view(*normed.shape[:-1], 2, self.taps, self.num_groups)

    def convolve(self, x: Tensor, kernels: Tensor, side: int, block: int) -> Tensor:
        """y_i = sum over taps o of (base + predicted) * x_{i-o}; taps never leave the block. [R, Q, H] to [R, Q, H]."""
        rows = x.reshape(x.shape[0], -1, block, self.num_groups, x.shape[-1] // self.num_groups)
        base = self.base_kernel[side].view(self.taps, self.num_groups, -1)
        coefficients = kernels[:, :, side].reshape(x.shape[0], -1, block, self.taps, self.num_groups, 1)
        out = torch.zeros_like(rows)
        for tap in range(min(self.taps, block)):
            shifted = F.pad(rows[:, :, : block - tap], (0, 0, 0, 0, tap, 0))
            out = out + (base[tap] + coefficients[:, :, :, tap]) * shifted
        return out.view(x.shape)


class DecoderLayer(nn.Module):
    """Norm, attention, residual; norm, MLP, residual; in DFlash 2 a convolution on both ends of both sublayers."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = Mlp(config)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.attention_conv = BlockConv(config.hidden_size, config.conv) if config.conv else None
        self.mlp_conv = BlockConv(config.hidden_size, config.conv) if config.conv else None

    def forward(
        self,
        x: Tensor,
        angles: tuple[Tensor, Tensor],
        context: tuple[Tensor, Tensor],
        mask: Mask,
        block: int,
    ) -> Tensor:
        """Residual stream [R, Q, H] to the same; Q holds whole blocks of ``block`` rows."""
        normed = self.input_layernorm(x)
        if self.attention_conv is None:
            x = x + self.self_attn(normed, angles, *context, mask)
        else:
            kernels = self.attention_conv.kernels(normed)
            inner = self.self_attn(self.attention_conv.convolve(normed, kernels, 0, block), angles, *context, mask)
            x = x + self.attention_conv.convolve(inner, kernels, 1, block)
        normed = self.post_attention_layernorm(x)
        if self.mlp_conv is None:
            out: Tensor = x + self.mlp(normed)
            return out
        kernels = self.mlp_conv.kernels(normed)
        inner = self.mlp(self.mlp_conv.convolve(normed, kernels, 0, block))
        return x + self.mlp_conv.convolve(inner, kernels, 1, block)


def initialise(module: nn.Module) -> None:
    """Fresh weights of one module, for ``nn.Module.apply``: children come first, so a convolution has the last word."""
    if isinstance(module, BlockConv):
        module.pass_through()
    elif isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=INIT_STD)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=INIT_STD)


def require_computable(config: DraftConfig) -> None:
    """Refused with everything in a description that these layers cannot compute."""
    layers, heads, group = config.num_layers, config.num_heads, config.conv.group_size if config.conv else 1
    checks = (
        (config.hidden_act == "silu", "hidden_act", config.hidden_act, "only silu is computed"),
        (heads % config.num_kv_heads == 0, "num_kv_heads", config.num_kv_heads, f"does not divide {heads} heads"),
        (len(config.causal) == layers, "causal", config.causal, f"is not one flag per layer of {layers}"),
        (len(config.windows) == layers, "windows", config.windows, f"is not one window per layer of {layers}"),
        (config.head_dim % 2 == 0, "head_dim", config.head_dim, "is odd, so it has no two halves to rotate"),
        (config.hidden_size % group == 0, "conv_group_size", group, f"does not divide {config.hidden_size} channels"),
    )
    wrong = [_unusable(key, value, message) for good, key, value, message in checks if not good]
    if wrong:
        raise Refused("the drafter's description", wrong)


def _unusable(key: str, value: object, message: str) -> Finding:
    mend = f"mend {key} in the drafter's config.json"
    return Finding(code="drafter-shape", severity=Severity.ERROR, key=key, value=value, message=message, mend=mend)
