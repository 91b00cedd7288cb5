"""What a row of the compatibility matrix holds: one run of one pair, and everything that could have decided it."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

FLOOR_SHARE = 0.9
"""An acceptance floor is this part of what was measured: prompts and rounding move it by less, a fault by more."""

Fingerprint = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
Text = Annotated[str, Field(min_length=1)]
Decoding = Literal["greedy", "sampled"]
Evidence = Literal["gpu", "cpu", "interpreter"]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class RowEngine(_Part):
    """The engine as it was installed. ``overridden`` lists its own requirements that are installed otherwise.

    ``kernels`` are versions of kernel packages, ``stubs`` the packages that stand-ins took the place of.
    """

    name: Literal["vllm", "sglang"]
    version: Text
    commit: str | None = None
    runner: Literal["v1", "v2"] | None = None
    torch: Text
    transformers: Text
    kernels: Mapping[str, str] = {}
    pins: Literal["met", "overridden"]
    overridden: tuple[str, ...] = ()
    stubs: tuple[str, ...] = ()
    plugin: Text

    @model_validator(mode="after")
    def _pins_agree(self) -> Self:
        if (self.pins == "overridden") != bool(self.overridden):
            raise ValueError("pins are overridden exactly where requirements are listed as such")
        return self


class RowModel(_Part):
    """A target or a drafter. ``revision`` is a commit of the hub, or ``weights-`` and a hash of local tensor files.

    ``fingerprint`` is that of its description (``DraftConfig.fingerprint`` for a drafter), ``dtype`` that of its files.
    """

    name: Text
    revision: str | None = None
    quantisation: str | None = None
    fingerprint: Fingerprint
    dtype: str | None = None


class RowLaunch(_Part):
    """How it was run. None: the engine did not say, or did not come so far.

    ``k`` counts proposals, ``mode`` is that of a loop, ``scheduling`` holds the engine's limits of a batch.
    """

    method: Literal["dflash", "dflash2", "dloop"]
    mode: str | None = None
    decoding: Decoding
    temperature: float = Field(ge=0)
    k: int = Field(gt=0)
    draft_sampling: Literal["greedy", "probabilistic"]
    dtype: Text
    hardware: Text
    concurrency: int = Field(gt=0)
    attention_backend: str | None = None
    kv_cache_dtype: str | None = None
    scheduling: Mapping[str, int] = {}
    prefix_cache: bool | None = None
    max_model_len: int | None = None
    tensor_parallel_size: int | None = None
    graphs: bool | None = None


class RowPrompts(_Part):
    """The prompts that were continued: how many, the hash of them all, and whether the target was asked to think."""

    name: Text
    count: int = Field(gt=0)
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    thinking: bool = False


class RowProof(_Part):
    """Verdict of ``prove``: first differences by what they mean; all of them but ``fails`` are rounding."""

    lossless: bool
    tokens: int = Field(ge=0)
    ties: int = Field(default=0, ge=0)
    numerical: int = Field(default=0, ge=0)
    fails: int = Field(default=0, ge=0)


class RowSampling(_Part):
    """The two-sample test of a sampled run; see ``statistics.TwoSampleTest``."""

    p: float = Field(ge=0, le=1)
    alpha: float = Field(gt=0, lt=1)
    samples: int = Field(gt=0)
    smallest_detectable_tv: float = Field(ge=0)


class RowSpeed(_Part):
    """What ``bench`` measured beside plain decoding: medians of runs, by requests at once, in its own dtype and K."""

    dtype: Text
    k: int = Field(gt=0)
    runs: int = Field(gt=0)
    prompts: int = Field(gt=0)
    max_tokens: int = Field(gt=0)
    by_concurrency: Annotated[Mapping[int, float], Field(min_length=1)]


class RowResults(_Part):
    """What was measured. ``speedup`` is None where no ``bench`` was run."""

    prompts: RowPrompts
    proof: RowProof
    sampling: RowSampling | None = None
    emitted_per_round: float = Field(ge=1)
    accepted_by_slot: tuple[float, ...]
    acceptance_floor: float = Field(ge=1)
    speedup: RowSpeed | None = None


class MatrixRow(_Part):
    """One run. A failed one has a ``reason``, and ``results`` where it came so far; ``command`` repeats its proof."""

    id: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")]
    result: Literal["passed", "failed"]
    reason: str | None = None
    date: datetime.date
    evidence: Evidence
    command: Text
    engine: RowEngine
    target: RowModel
    draft: RowModel
    launch: RowLaunch
    results: RowResults | None = None
    known_issues: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _result_is_founded(self) -> Self:
        if self.result == "failed" and not self.reason:
            raise ValueError("a failed row says its reason")
        if self.result == "passed" and (self.reason or self.results is None or not self.results.proof.lossless):
            raise ValueError("a passed row has results that are lossless, and no reason")
        return self


class Matrix(_Part):
    """The file ``compat_matrix.yaml``."""

    rows: tuple[MatrixRow, ...]


def acceptance_floor(emitted_per_round: float) -> float:
    """What a run of the same row has to emit per round: nine tenths of the measured, rounded down; at least 1."""
    return max(1.0, math.floor(100 * FLOOR_SHARE * emitted_per_round + 1e-9) / 100)


def schema() -> dict[str, Any]:
    """The JSON schema of the file."""
    document = Matrix.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **document, "title": "compat_matrix.yaml"}


def schema_text() -> str:
    """The schema as it is published."""
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"
