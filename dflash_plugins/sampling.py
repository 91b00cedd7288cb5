"""The target distribution p of every row of a round, after all sampling rules (methods.md section 6).

Order, as in vLLM 0.31.0 (`vllm/v1/sample/sampler.py`, class `Sampler`, and `apply_top_k_top_p_pytorch` in
`ops/topk_topp_sampler.py`; V2 runner: `vllm/v1/worker/gpu/sample/sampler.py`): logit bias, penalties and mask, then the
greedy choice; else temperature, min-p, top-k, top-p of what top-k left, softmax. One difference, on purpose: of tokens
tied at the k-th logit only the lowest ids stay, so that k are kept; vLLM keeps all of them.

Shapes: R requests, K slots, V target vocabulary. No host synchronisation and no shapes that depend on values, except in
`SamplingRule.of`, which turns per-request records into tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dflash_plugins.errors import BadInput
from dflash_plugins.proposals import Proposals

GREEDY_BELOW = 1e-5
"""Temperatures below this mean argmax (vLLM 0.31.0: `_SAMPLING_EPS` in `vllm/sampling_params.py`)."""

LOWEST = float("-inf")

STRETCH = 4096
"""Columns that `draw` sums at a time."""


@dataclass(frozen=True)
class Sampling:
    """What one request asks for. top_k 0 means off; top_p 0 keeps the best token; raises BadInput with all reasons."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rules = {
            "temperature must be at least 0": 0 <= self.temperature < math.inf,
            "top_k must be at least 0": self.top_k >= 0,
            "top_p must lie in 0..1": 0 <= self.top_p <= 1,
            "min_p must lie in 0..1": 0 <= self.min_p <= 1,
            "repetition_penalty must be above 0": 0 < self.repetition_penalty < math.inf,
            "presence_penalty must be finite": math.isfinite(self.presence_penalty),
            "frequency_penalty must be finite": math.isfinite(self.frequency_penalty),
            "logit_bias must name ids from 0 and be finite": all(
                token >= 0 and math.isfinite(bias) for token, bias in self.logit_bias.items()
            ),
        }
        broken = [f"{rule} (got {getattr(self, rule.split()[0])})" for rule, holds in rules.items() if not holds]
        if broken:
            raise BadInput("; ".join(broken))

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def penalised(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


@dataclass(frozen=True)
class Penalties:
    """Repetition (over prompt and output), presence and frequency (over output): [R] fp32 each.

    `prompt_seen` [R, V] bool; `output_counts` [R, V] int32, tokens committed after the prompt, the anchor included.
    """

    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    prompt_seen: Tensor
    output_counts: Tensor

    def on(self, logits: Tensor, seen: Tensor, counts: Tensor) -> Tensor:
        """Penalised logits, elementwise: `logits`, `seen` (in the prompt) and `counts` (in the output) broadcast."""
        per_request = (-1, *[1] * (logits.dim() - 1))
        repetition = self.repetition.view(per_request)
        scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
        repeated = torch.where(seen | (counts > 0), scaled, logits)
        frequency, presence = self.frequency.view(per_request), self.presence.view(per_request)
        return repeated - frequency * counts - presence * (counts > 0)


@dataclass(frozen=True)
class SamplingRule:
    """The sampling rules of a batch. A field that no request uses is None and costs nothing.

    temperature [R] fp32 (0: argmax; None: 1)      top_k [R] int64 (V: off)      top_p, min_p [R] fp32
    penalties   see `Penalties`           bias (ids [R, M] int64, values [R, M] fp32, padded with value 0)
    allowed     [R, K + 1, V] bool, a mask per row (grammar, min_tokens); each row must allow a token
    all_greedy, any_greedy: known on the host, so that asking does not synchronise
    """

    temperature: Tensor | None
    all_greedy: bool
    any_greedy: bool
    top_k: Tensor | None = None
    top_p: Tensor | None = None
    min_p: Tensor | None = None
    penalties: Penalties | None = None
    bias: tuple[Tensor, Tensor] | None = None
    allowed: Tensor | None = None

    @classmethod
    def at(cls, temperature: float, requests: int, device: torch.device | str = "cpu") -> SamplingRule:
        """Plain sampling at one temperature for all requests; 0 is greedy."""
        greedy = temperature < GREEDY_BELOW
        column = None if temperature == 1 else torch.full((requests,), temperature, device=device)
        return cls(column, all_greedy=greedy, any_greedy=greedy)

    @classmethod
    def of(
        cls,
        samplings: Sequence[Sampling],
        *,
        vocab_size: int,
        prompts: Sequence[Sequence[int]] | None = None,
        outputs: Sequence[Sequence[int]] | None = None,
        allowed: Tensor | None = None,
        device: torch.device | str = "cpu",
    ) -> SamplingRule:
        """Tensors from one record per request; prompts and outputs (token ids) are needed where a penalty is set."""

        def column(name: str, off: float, dtype: torch.dtype = torch.float32) -> Tensor | None:
            values = [getattr(sampling, name) for sampling in samplings]
            return None if all(value == off for value in values) else torch.tensor(values, dtype=dtype, device=device)

        top_k = column("top_k", 0, torch.int64)
        return cls(
            temperature=column("temperature", 1.0),
            all_greedy=all(sampling.greedy for sampling in samplings),
            any_greedy=any(sampling.greedy for sampling in samplings),
            top_k=None if top_k is None else top_k.masked_fill(top_k == 0, vocab_size),
            top_p=column("top_p", 1.0),
            min_p=column("min_p", 0.0),
            penalties=_penalties(samplings, vocab_size, prompts, outputs, device),
            bias=_bias(samplings, vocab_size, device),
            allowed=allowed,
        )


def target_choices(logits: Tensor, rule: SamplingRule, proposals: Proposals | None = None) -> Tensor:
    """The greedy choice of each row: [R, K + 1, V] -> [R, K + 1] int64; of equal logits the lowest id."""
    return processed_logits(logits, rule, proposals).argmax(dim=-1)


def target_probs(logits: Tensor, rule: SamplingRule, proposals: Proposals | None = None) -> Tensor:
    """p of each row: [R, K + 1, V] any float dtype -> fp32. Requests at temperature 0 get a one-hot row.

    `proposals` are needed for penalties only; row i then counts the proposals of slots 0..i-1 as if they were output.
    """
    scaled = processed_logits(logits, rule, proposals)
    if rule.temperature is not None:
        divisor = torch.where(rule.temperature < GREEDY_BELOW, 1.0, rule.temperature)[:, None, None]
        # The caller's logits stay as they are; a copy made on the way is ours to overwrite.
        scaled = scaled / divisor if scaled is logits else scaled.div_(divisor)
    if rule.min_p is not None:
        floor = scaled.amax(dim=-1, keepdim=True) + rule.min_p.log()[:, None, None]
        scaled = scaled.masked_fill(scaled < floor, LOWEST)
    if rule.top_k is not None or rule.top_p is not None:
        scaled = restrict(scaled, rule.top_k, rule.top_p)
    if rule.temperature is not None and rule.any_greedy:
        greedy = (rule.temperature < GREEDY_BELOW)[:, None, None]
        others = torch.arange(logits.shape[-1], device=logits.device) != scaled.argmax(dim=-1, keepdim=True)
        scaled = scaled.masked_fill(greedy & others, LOWEST)
    return scaled.softmax(dim=-1)


def processed_logits(logits: Tensor, rule: SamplingRule, proposals: Proposals | None = None) -> Tensor:
    """fp32 logits after everything that can change an argmax: bias, penalties, mask. [R, K + 1, V]"""
    logits = logits.float()
    if rule.bias is not None:
        ids, values = (part[:, None].expand(-1, logits.shape[1], -1) for part in rule.bias)
        logits = logits.scatter_add(2, ids, values)
    if rule.penalties is not None:
        logits = _penalised(logits, rule.penalties, proposals)
    if rule.allowed is not None:
        logits = logits.masked_fill(~rule.allowed, LOWEST)
    return logits


def restrict(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """Top-k, then top-p of what it left: everything else becomes -inf. [R, N, V], top_k and top_p [R] -> [R, N, V].

    The best token always stays, also at top_p 0 (F62). Of equal logits the lower id ranks first. Sorts every row, which
    needs twice the memory of the logits for the order.
    """
    ranked, order = logits.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        beyond = torch.arange(logits.shape[-1], device=logits.device) >= top_k[:, None, None]
        ranked = ranked.masked_fill(beyond, LOWEST)
    if top_p is not None:
        limit = top_p[:, None, None]
        probs = ranked.softmax(dim=-1)
        outside = ((probs.cumsum(dim=-1) - probs) >= limit) & (limit < 1)
        outside[..., 0] = False
        ranked = ranked.masked_fill(outside, LOWEST)
    return torch.empty_like(ranked).scatter_(-1, order, ranked)


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """One index per row by inverse CDF in fp64: weights [..., V] >= 0 (any sum above 0), uniforms [...] -> [...] int64.

    An index without weight is never drawn. A row without any weight gives some index. Works in two steps, a stretch of
    the row and then an index in it, because a running sum over the whole vocabulary costs as much as a softmax.
    """
    stretches = weights.split(STRETCH, dim=-1)
    sums = torch.stack([stretch.sum(dim=-1, dtype=torch.float64) for stretch in stretches], dim=-1)
    mark = uniforms * sums.sum(dim=-1)
    chosen = _first_beyond(sums, mark)[..., None]
    earlier = torch.arange(len(stretches), device=weights.device) < chosen
    columns = chosen * STRETCH + torch.arange(min(STRETCH, weights.shape[-1]), device=weights.device)
    beyond = columns >= weights.shape[-1]
    inside = weights.gather(-1, columns.masked_fill(beyond, 0)).masked_fill(beyond, 0.0)
    return chosen[..., 0] * STRETCH + _first_beyond(inside, mark - torch.where(earlier, sums, 0.0).sum(dim=-1))


def _first_beyond(weights: Tensor, mark: Tensor) -> Tensor:
    """First index with weight whose running sum exceeds `mark`, the last one with weight if rounding leaves none."""
    # A parallel running sum may step back by a rounding, and so grow again at an index that adds nothing.
    reach = weights.cumsum(dim=-1, dtype=torch.float64).masked_fill(weights <= 0, 0.0)
    total = reach.amax(dim=-1)
    below = torch.minimum(mark, total.nextafter(torch.zeros_like(total))).clamp(min=0)
    return (reach > below[..., None]).to(torch.uint8).argmax(dim=-1)


def _penalised(logits: Tensor, penalties: Penalties, proposals: Proposals | None) -> Tensor:
    """Penalties by the committed tokens everywhere, then again at the K proposed tokens, now counting the block.

    A block changes the counts of at most K tokens, so no count of [R, K + 1, V] is ever built.
    """
    base = penalties.on(logits, penalties.prompt_seen[:, None], penalties.output_counts[:, None])
    if proposals is None or proposals.num_slots == 0:
        return base
    rows, slots = logits.shape[1], proposals.num_slots
    tokens = proposals.ids.clamp(min=0)
    # A token proposed twice is written twice, with the same value: the count is of the token, not of the slot. So is
    # padding, which stands for token 0 here and adds nothing to its count.
    position = torch.arange(max(rows, slots), device=logits.device)
    before = (position[:rows, None] > position[:slots]) & (proposals.ids >= 0)[:, None]
    same = tokens[:, :, None] == tokens[:, None]
    counts = before.float() @ same.float() + penalties.output_counts.gather(1, tokens)[:, None]
    index = tokens[:, None].expand(-1, rows, -1)
    seen = penalties.prompt_seen.gather(1, tokens)[:, None]
    return base.scatter(2, index, penalties.on(logits.gather(2, index), seen, counts))


def _penalties(
    samplings: Sequence[Sampling],
    vocab_size: int,
    prompts: Sequence[Sequence[int]] | None,
    outputs: Sequence[Sequence[int]] | None,
    device: torch.device | str,
) -> Penalties | None:
    if not any(sampling.penalised for sampling in samplings):
        return None
    if prompts is None or outputs is None:
        raise BadInput("penalties need the prompt and the output of every request")

    def column(name: str) -> Tensor:
        return torch.tensor([float(getattr(sampling, name)) for sampling in samplings], device=device)

    return Penalties(
        repetition=column("repetition_penalty"),
        presence=column("presence_penalty"),
        frequency=column("frequency_penalty"),
        prompt_seen=_counts(prompts, vocab_size, device) > 0,
        output_counts=_counts(outputs, vocab_size, device),
    )


def _counts(texts: Sequence[Sequence[int]], vocab_size: int, device: torch.device | str) -> Tensor:
    counted = [torch.bincount(torch.tensor(list(text), dtype=torch.int64), minlength=vocab_size) for text in texts]
    return torch.stack(counted).to(device=device, dtype=torch.int32)


def _bias(samplings: Sequence[Sampling], vocab_size: int, device: torch.device | str) -> tuple[Tensor, Tensor] | None:
    width = max((len(sampling.logit_bias) for sampling in samplings), default=0)
    if width == 0:
        return None
    outside = sorted({token for sampling in samplings for token in sampling.logit_bias if token >= vocab_size})
    if outside:
        raise BadInput(f"logit_bias names ids {outside} beyond the vocabulary of {vocab_size}")
    padded = [
        [*sampling.logit_bias.items(), *[(0, 0.0)] * (width - len(sampling.logit_bias))] for sampling in samplings
    ]
    ids = torch.tensor([[token for token, _ in row] for row in padded], device=device)
    return ids, torch.tensor([[bias for _, bias in row] for row in padded], device=device)
