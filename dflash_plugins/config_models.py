"""The frozen descriptions of a drafter and of a target."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from dflash_plugins.errors import Refused
from dflash_plugins.findings import Finding, Severity, errors

MethodName = Literal["dflash", "dflash2", "dloop"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


def fingerprint(described: BaseModel) -> str:
    """``sha256:`` and the hex digest of the canonical JSON of every field."""
    canonical = json.dumps(described.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(canonical.encode()).hexdigest()


class SelectorConfig(_Frozen):
    """The candidate selector of DFlash 2: ``top_k`` candidates per slot, codebooks of width ``rank``."""

    top_k: int = Field(gt=0)
    rank: int = Field(gt=0)


class ConvConfig(_Frozen):
    """The dynamic convolutions of DFlash 2: taps per kernel, channels that share a predicted coefficient."""

    kernel_size: int = Field(gt=0)
    group_size: int = Field(gt=0)


class LoopConfig(_Frozen):
    """How D-Loop runs the drafter again.

    ``refine`` uses ``prefix_lengths`` (0 < m1 < m2 < ... < K, in proposals); ``extend`` uses ``max_loops`` blocks and
    ``gate``, the least sum of ln q of a block that lets another block be drafted.
    """

    mode: Literal["refine", "extend"]
    prefix_lengths: tuple[int, ...] = ()
    max_loops: int = Field(default=1, gt=0)
    gate: float = 0.0


class DraftConfig(_Frozen):
    """A drafter as it was trained. Sizes count elements, ids count from 0, ``windows`` count tokens."""

    method: MethodName
    architecture: str
    block_size: int = Field(gt=1)
    mask_token_id: int = Field(ge=0)
    target_layer_ids: tuple[int, ...] = Field(min_length=1)
    num_layers: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    num_heads: int = Field(gt=0)
    num_kv_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    rms_norm_eps: float = Field(gt=0)
    rope_theta: float = Field(gt=0)
    rope_scaling: Mapping[str, Any] | None = None
    attention_bias: bool = False
    hidden_act: str = "silu"
    vocab_size: int = Field(gt=0)
    draft_vocab_size: int | None = None
    target_hidden_size: int = Field(gt=0)
    num_target_layers: int | None = None
    causal: tuple[bool, ...]
    windows: tuple[int | None, ...]
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    selector: SelectorConfig | None = None
    conv: ConvConfig | None = None
    loop: LoopConfig | None = None
    dtype: str | None = None
    max_position_embeddings: int = Field(gt=0)

    @property
    def k(self) -> int:
        """Proposals of a whole block: B - 1."""
        return self.block_size - 1

    @property
    def fingerprint(self) -> str:
        """``sha256:`` and the hex digest of the canonical JSON of every field."""
        return fingerprint(self)


class TargetConfig(_Frozen):
    """What a drafter has to know of its target; ``vocab_size`` counts embedding rows, often more than tokens.

    ``num_kv_layers`` layers have a KV cache, of ``kv_width`` elements (K and V together) per token; ``stateful`` says
    whether other layers keep a state of their own (recurrent, linear attention), which cannot be cropped by length.
    """

    architecture: str
    num_layers: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    vocab_size: int = Field(gt=0)
    rope_theta: float | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    dtype: str | None = None
    max_position_embeddings: int | None = None
    num_kv_layers: int | None = None
    kv_width: int | None = None
    num_kv_heads: int | None = None
    stateful: bool = False
    multimodal: bool = False


@dataclass(frozen=True)
class DraftReading:
    """A description, or everything that stands in the way of one.

    ``facts`` holds the fields that could be read even when ``config`` is None, so that later checks can add their
    findings to the same report, and what the drafter says of its target (``eos_token_ids``, ``target_architectures``).
    ``origins`` maps a field to the path its value was read from. ``said`` holds what no field can say, as traits
    (``engines.Trait``).
    """

    subject: str
    config: DraftConfig | None
    findings: tuple[Finding, ...]
    facts: Mapping[str, Any]
    origins: Mapping[str, str]
    said: frozenset[str] = frozenset()

    def require(self) -> DraftConfig:
        """The description; ``Refused`` with all findings when any of them is an error."""
        if self.config is None or errors(self.findings):
            raise Refused(self.subject, sorted(self.findings, key=lambda f: f.severity is not Severity.ERROR))
        return self.config
