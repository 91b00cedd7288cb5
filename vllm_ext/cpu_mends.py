"""The three silent bugs of vLLM's CPU backend, each with a probe of its behaviour and a mend.

A. ``DFlashQwen3Model._normalize_context_k`` hands the weights of all layers to a kernel that reads the first layer's
   only. Context keys of layers >= 1 are wrong: the text stays right, far fewer proposals are accepted.
B. ``_expand_kernel_impl`` writes into an int64 copy of a float32 or int32 output. Temperature, top-k and top-p of the
   verify rows stay uninitialised memory: sampling with any speculative method is not lossless.
C. ``_rejection_random_sample_kernel_impl`` takes -1, with which the scheduler fills a step up, for a proposal: its
   chance is read from the memory before the row, and -1 is emitted where that happens to be large.

A later release may have mended any of them, so nothing is decided by version. Probes need the compiled kernels, which
are not loaded when plugins register; they run when a drafter is built or a kernel is first launched.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, cast

import torch

logger = logging.getLogger("vllm.dflash_plugins")

Kernel = Callable[..., None]

# No sampling parameter is ever negative, so what still holds this has not been written.
_SENTINEL = -7.0


def expand_kernel_is_right(kernel: Kernel) -> bool:
    """Whether ``kernel`` spreads [2.5, 0] over 2 and 1 rows, 0 replaced by 1, in a float32 output of 3 rows."""
    # Dtypes are named: while a model is built, the default is the model's.
    output = torch.full((3,), _SENTINEL, dtype=torch.float32)
    kernel(output, torch.tensor([2.5, 0.0], dtype=torch.float32), torch.tensor([2, 3], dtype=torch.int32), 0, 1, 128)
    return output.tolist() == [2.5, 2.5, 1.0]


def expand_kernel(
    output: torch.Tensor,
    input_val: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int | None = None,  # noqa: N803 (the engine launches by this name)
) -> None:
    """Write ``input_val`` [R] into ``output`` [N] in place, request r repeated over its rows.

    ``cu_num_tokens`` [R] counts rows up to and including request r; N is its last entry. Values equal to
    ``replace_from`` are written as ``replace_to``. ``MAX_NUM_TOKENS`` bounds a lane of the GPU kernel: not needed.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = input_val.masked_fill(input_val == replace_from, replace_to)
    rows = torch.repeat_interleave(values, counts.long())
    output[: rows.numel()] = rows


def rejection_kernel_is_right(kernel: Kernel) -> bool:
    """Whether ``kernel`` rejects a -1 in the second row, before which the first row ends with a large chance."""
    emitted = torch.full((1, 3), -1, dtype=torch.int32)
    ends, drafts = torch.tensor([2], dtype=torch.int32), torch.tensor([0, -1], dtype=torch.int32)
    p = torch.tensor([[0.9, 0.0, 0.9], [0.1, 0.2, 0.7]], dtype=torch.float32)
    instead, uniforms = torch.tensor([1, 1], dtype=torch.int32), torch.tensor([0.5, 0.5], dtype=torch.float64)
    bonus, greedy = torch.tensor([[2]]), torch.tensor([False])
    kernel(emitted, ends, drafts, None, p, bonus, instead, uniforms, greedy, 2, 3, NO_DRAFT_PROBS=True)
    return emitted.tolist() == [[0, 1, -1]]


def rejecting_padding(shipped: Kernel) -> Kernel:
    """``shipped`` with every -1 among the proposals made a token that is never accepted."""

    signature = inspect.signature(shipped)

    def kernel(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs)
        drafts, uniforms = given.arguments["draft_token_ids"], given.arguments["uniform_probs"]
        # Accepted is what has p / q >= uniform; no quotient of finite numbers reaches infinity.
        given.arguments["uniform_probs"] = uniforms.masked_fill(drafts < 0, torch.inf)
        given.arguments["draft_token_ids"] = drafts.clamp(min=0)
        shipped(*given.args, **given.kwargs)

    return kernel


class _Mended:
    """The engine's kernel until it has been probed, then ``shipped`` or ``ours``, whichever is right."""

    def __init__(self, shipped: Kernel, ours: Kernel, is_right: Callable[[Kernel], bool], wrong: str) -> None:
        self.shipped, self.ours, self.is_right, self.wrong = shipped, ours, is_right, wrong
        self.chosen: Kernel | None = None

    def decide(self) -> Kernel:
        if self.chosen is None:
            right = self.is_right(self.shipped)
            self.chosen = self.shipped if right else self.ours
            if not right:
                logger.warning("dflash-plugins: %s; replaced for every speculative method", self.wrong)
        return self.chosen


def mended_expand_kernel(shipped: Kernel) -> Kernel:
    """A stand-in for ``shipped`` with its signature, which probes it once, at the first call."""
    wrong = "vLLM's expand kernel leaves temperature, top-k and top-p of verify rows unwritten on this CPU"
    return _stand_in(_Mended(shipped, expand_kernel, expand_kernel_is_right, wrong))


def mended_rejection_kernel(shipped: Kernel) -> Kernel:
    """A stand-in for ``shipped`` with its signature, which probes it once, at the first call."""
    wrong = "vLLM's rejection kernel may accept the -1 that fills a step up on this CPU"
    return _stand_in(_Mended(shipped, rejecting_padding(shipped), rejection_kernel_is_right, wrong))


def _stand_in(state: _Mended) -> Kernel:
    @functools.wraps(state.shipped)
    def stand_in(*args: Any, **kwargs: Any) -> None:
        state.decide()(*args, **kwargs)

    stand_in.dflash_plugins_state = state  # type: ignore[attr-defined]
    return cast(Kernel, stand_in)


MENDED_KERNELS: Mapping[str, Callable[[Kernel], Kernel]] = {
    "_expand_kernel_impl": mended_expand_kernel,
    "_rejection_random_sample_kernel_impl": mended_rejection_kernel,
}
"""What makes the stand-in of each kernel, by the kernel's name in ``vllm.utils.cpu_triton_utils``."""


def kernel_fact(current: Kernel) -> str:
    """What is known of a kernel in use: ``mended``, ``right as shipped``, or ``off`` where it is not ours."""
    state: _Mended | None = getattr(current, "dflash_plugins_state", None)
    if state is None:
        return "off"
    return "right as shipped" if state.decide() is state.shipped else "mended"


def context_k_norm_is_right(normalize: Callable[[Any, torch.Tensor], torch.Tensor]) -> bool:
    """Whether ``normalize`` gives layer 1 its own weight: same keys, weights 1 and 2, so layer 1 is twice layer 0."""
    model = SimpleNamespace(_k_norm_weights=torch.tensor([[1.0], [2.0]]).expand(2, 16).contiguous(), _rms_norm_eps=1e-6)
    keys = torch.ones(2, 1, 1, 16)
    normed = normalize(model, keys)
    return torch.allclose(normed[1], 2 * normed[0])


def normalize_context_k_by_layer(model: Any, all_k: torch.Tensor) -> torch.Tensor:
    """RMS-norm of context keys [L, C, kv_heads, head_dim], layer l by row l of the stacked weights [L, head_dim]."""
    from vllm import _custom_ops as ops

    normed = torch.empty_like(all_k)
    for layer, weight in enumerate(model._k_norm_weights):
        ops.rms_norm(normed[layer], all_k[layer], weight, model._rms_norm_eps)
    return normed
