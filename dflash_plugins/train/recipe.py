"""What decides a trained drafter besides the data: the settings of a run, and the description that follows."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from dflash_plugins.config import (
    ARCHITECTURE_OF,
    ConvConfig,
    DraftConfig,
    LoopConfig,
    SelectorConfig,
    read_target_config,
)
from dflash_plugins.errors import BadInput
from dflash_plugins.train.losses import GAMMA_BY_BLOCK

WARMUP_STEPS = 100
FINAL_LR_SHARE = 0.02

Count = Annotated[int, Field(gt=0)]
Index = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, config={"extra": "forbid"})
class Recipe:
    """Everything that decides the weights besides the data.

    A run resumes only under the same recipe, but for ``steps``: a longer or shorter end may be chosen on the way.

    short_k, short_share    this share of the steps runs blocks of ``short_k`` masks, the others of B - 1
    gamma                   decay of the slot weights exp(-(k - 1) / gamma); None: 7, 5, 4 for blocks of 16, 10, 8
    expected_weight         weight of a loss that falls with the number of proposals expected to be accepted
    soft_share              share of the loss that is the cross-entropy to the target's distribution
    accumulate              turns in which a process runs its share of a step; each weighs the same
    soft_top_k              of the target's distribution only that many best tokens, as one of their own; None: all
    precision               of the forward passes under autocast, and of the exported weights
    conv_*, selector_*      sizes of a DFlash 2 drafter, and of a D-Loop drafter with ``dloop_selector``
    prefix_lengths          of a D-Loop drafter: tokens selected before each later pass, rising, in the exported config
    prefix_sampling         length of the given prefix in a step: one of ``prefix_lengths``, or any of 1..K-1
    start_from              folder of a drafter whose tensors are the first weights where name and shape are the same
    train_only              name patterns (``*`` and ``?``) of the parameters to train; empty: all
    """

    method: Literal["dflash", "dflash2", "dloop"] = "dflash"
    num_layers: Count = 2
    block_size: Annotated[int, Field(gt=1)] = 8
    mask_token_id: Index = 16
    draft_vocab_size: Count | None = 8192
    steps: Count = 3000
    sequences_per_step: Count = 8
    anchors_per_sequence: Count = 24
    accumulate: Count = 1
    short_k: Count | None = 3
    short_share: Share = 0.5
    learning_rate: Positive = 1e-3
    weight_decay: NonNegative = 0.05
    gamma: Positive | None = None
    expected_weight: NonNegative = 0.0
    soft_share: Share = 0.5
    soft_top_k: Count | None = None
    seed: int = 1
    held_out_sequences: Count = 128
    precision: Literal["bf16", "fp32"] = "bf16"
    conv_kernel_size: Count = 2
    conv_group_size: Count = 64
    selector_top_k: Count = 16
    selector_rank: Count = 16
    dloop_selector: bool = False
    prefix_lengths: tuple[int, ...] = ()
    prefix_sampling: Literal["scheduled", "any"] = "scheduled"
    start_from: str | None = None
    train_only: tuple[str, ...] = ()

    @classmethod
    def of(cls, settings: dict[str, Any]) -> Recipe:
        """The recipe with ``settings`` over the defaults; BadInput with every unknown, wrong or idle one at once."""
        try:
            recipe = TypeAdapter(cls).validate_python(settings)
        except ValidationError as error:
            raise BadInput("; ".join(_sentence(one) for one in error.errors())) from error
        recipe.require()
        return recipe

    def require(self) -> None:
        """BadInput with everything that does not go together, at once."""
        loop = self.method == "dloop"
        lengths = self.prefix_lengths
        rising = all(low < high for low, high in pairwise((0, *lengths, self.block_size - 1)))
        faults = (
            (loop and not lengths, "prefix_lengths: --method dloop needs at least one; none is guessed"),
            (not rising, f"prefix_lengths {list(lengths)}: must rise strictly between 0 and K = {self.block_size - 1}"),
            (bool(lengths) and not loop, f"prefix_lengths: --method {self.method} has no loop"),
            (self.dloop_selector and not loop, f"dloop_selector: is for --method dloop, not {self.method}"),
        )
        if wrong := [sentence for fault, sentence in faults if fault]:
            raise BadInput("; ".join(wrong))

    def decay(self) -> float:
        """Gamma of the slot weights: the one that was set, or that of the block size."""
        return self.gamma or GAMMA_BY_BLOCK.get(self.block_size, self.block_size / 2)

    def blocks_per_step(self) -> int:
        """Blocks of all processes in one step."""
        return self.sequences_per_step * self.anchors_per_sequence

    def masks(self) -> tuple[tuple[int, float], ...]:
        """The numbers of masks that steps run, and the share of the steps that run each."""
        share = self.short_share if self.short_k else 0.0
        return ((self.short_k or 0, share), (self.block_size - 1, 1.0 - share))

    def watched_k(self) -> int:
        """Proposals of the held-out rounds that are walked while training."""
        return self.short_k if self.short_k and self.short_share else self.block_size - 1

    def has_selector(self) -> bool:
        """Whether the drafter has a selector and convolutions."""
        return self.method == "dflash2" or self.dloop_selector

    def prefix_choices(self, k: int) -> tuple[int, ...]:
        """Lengths of the given prefix that a step of ``k`` masks may draw; none where blocks take one pass."""
        if self.method != "dloop":
            return ()
        return tuple(range(1, k)) if self.prefix_sampling == "any" else tuple(m for m in self.prefix_lengths if m < k)


def _sentence(error: Any) -> str:
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "unexpected_keyword_argument":
        return f"--set {key}: known are {', '.join(sorted(Recipe.__dataclass_fields__))}"
    return f"--set {key}={error['input']!r}: {error['msg'][0].lower()}{error['msg'][1:]}"


def learning_rate(recipe: Recipe, step: int) -> float:
    """Linear warm-up, then a cosine down to ``FINAL_LR_SHARE`` of the peak."""
    warm = min(1.0, (step + 1) / min(WARMUP_STEPS, max(1, recipe.steps // 10)))
    share = min(1.0, step / max(1, recipe.steps))
    cosine = 0.5 * (1.0 + math.cos(math.pi * share))
    return recipe.learning_rate * warm * (FINAL_LR_SHARE + (1.0 - FINAL_LR_SHARE) * cosine)


def draft_config(
    recipe: Recipe, target: Path, target_layer_ids: tuple[int, ...], draft_vocab_size: int | None
) -> DraftConfig:
    """The description of a drafter for the target in the folder ``target``, in the target's own geometry."""
    about = read_target_config(target)
    raw = json.loads((target / "config.json").read_text(encoding="utf-8"))
    heads = raw["num_attention_heads"]
    return DraftConfig(
        method=recipe.method,
        architecture=ARCHITECTURE_OF[recipe.method],
        block_size=recipe.block_size,
        mask_token_id=recipe.mask_token_id,
        target_layer_ids=target_layer_ids,
        num_layers=recipe.num_layers,
        hidden_size=about.hidden_size,
        intermediate_size=raw["intermediate_size"],
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads", heads),
        head_dim=raw.get("head_dim") or about.hidden_size // heads,
        rms_norm_eps=raw["rms_norm_eps"],
        rope_theta=float(about.rope_theta or 10_000.0),
        vocab_size=about.vocab_size,
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=about.hidden_size,
        num_target_layers=about.num_layers,
        causal=(False,) * recipe.num_layers,
        windows=(None,) * recipe.num_layers,
        dtype="bfloat16",
        max_position_embeddings=raw["max_position_embeddings"],
        **_method_parts(recipe),
    )


def _method_parts(recipe: Recipe) -> dict[str, Any]:
    parts: dict[str, Any] = {}
    if recipe.has_selector():
        parts["conv"] = ConvConfig(kernel_size=recipe.conv_kernel_size, group_size=recipe.conv_group_size)
        parts["selector"] = SelectorConfig(top_k=recipe.selector_top_k, rank=recipe.selector_rank)
    if recipe.method == "dloop":
        parts["loop"] = LoopConfig(mode="refine", prefix_lengths=recipe.prefix_lengths)
    return parts
