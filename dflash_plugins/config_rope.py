"""Rotary positions of a drafter: theta and position scaling, in the old spelling and in the new one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dflash_plugins.config_reader import MAP, NUMBER, Kind, Reader

POSITIVE = Kind("a positive number", lambda v: NUMBER.accepts(v) and 1e-30 < v < 1e30 and math.isfinite(v))
# What each kind of scaling cannot do without.
_NEEDS: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "yarn": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "longrope": frozenset({"short_factor", "long_factor", "original_max_position_embeddings"}),
}
_FACTORS = frozenset(
    (
        "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "beta_fast", "beta_slow",
        "attention_factor", "mscale", "mscale_all_dim",
    )
)  # fmt: skip
_LISTS = frozenset({"short_factor", "long_factor"})
_OTHER = frozenset({"rope_type", "truncate", "mrope_section", "mrope_interleaved", "partial_rotary_factor"})


def read_rope(r: Reader) -> None:
    """Facts ``rope_theta``, and ``rope_scaling``, from old and new spellings."""
    parameters = r.take("rope_parameters", MAP) or {}
    if any(isinstance(v, dict) for v in parameters.values()):
        r.error(
            "config-unsupported",
            r.path("rope_parameters"),
            parameters,
            "gives rotary parameters per layer type, which we do not compute",
            "give one set for all layers",
        )
        return
    flat = r.take("rope_theta", NUMBER, field="rope_theta")
    nested = parameters.get("rope_theta")
    nested_path = f"{r.path('rope_parameters')}.rope_theta"
    if nested is not None and not NUMBER.accepts(nested):
        r.error("config-type", nested_path, nested, "is not a finite number", "give a finite number")
        nested = None
    if flat is not None and nested is not None and flat != nested:
        r.error(
            "config-conflict",
            f"{r.path('rope_theta')} and {nested_path}",
            {r.path("rope_theta"): flat, nested_path: nested},
            "the two differ and engines disagree about which one wins",
            "keep the one the drafter was trained with",
        )
    if flat is None and nested is None:
        r.error(
            "config-missing",
            "rope_theta",
            None,
            "is missing here and in rope_parameters; engines' own defaults differ (10000, 1000000)",
            "add rope_theta as the drafter was trained",
        )
    elif nested is not None:
        r.origins["rope_theta"] = nested_path
    theta = nested if nested is not None else flat
    r.put("rope_theta", None if theta is None else float(theta))
    _read_rope_scaling(r, {k: v for k, v in parameters.items() if k != "rope_theta"})


def _canonical_scaling(scaling: Mapping[str, Any]) -> dict[str, Any] | None:
    """``type`` is the old name of ``rope_type``; the default type means no scaling."""
    canonical = {("rope_type" if k == "type" else k): v for k, v in scaling.items() if k != "rope_theta"}
    if canonical.get("partial_rotary_factor") == 1.0:
        del canonical["partial_rotary_factor"]
    return None if canonical.get("rope_type", "default") == "default" and len(canonical) <= 1 else canonical


def _read_rope_scaling(r: Reader, parameters: Mapping[str, Any]) -> None:
    legacy = r.take("rope_scaling", MAP)
    new, old = _canonical_scaling(parameters), _canonical_scaling(legacy or {})
    if legacy is not None and parameters and new != old:
        places = f"{r.path('rope_parameters')} and {r.path('rope_scaling')}"
        r.error(
            "config-conflict",
            places,
            {"rope_parameters": new, "rope_scaling": old},
            "the two ask for different position scaling",
            "keep the one the drafter was trained with",
        )
    scaling = new or old
    path = r.path("rope_parameters" if parameters else "rope_scaling")
    if scaling is not None:
        _check_scaling(r, path, scaling)
    if scaling and "partial_rotary_factor" in scaling:
        r.unsupported("rope_parameters", scaling, "rotary embedding of a part of each head")
    r.put("rope_scaling", scaling)


def _check_scaling(r: Reader, path: str, scaling: Mapping[str, Any]) -> None:
    """Whether a kind of scaling is known and says all it needs to."""
    kind = scaling.get("rope_type", "default")
    needs = _NEEDS.get(kind) if isinstance(kind, str) else None
    if needs is None:
        mend = f"known: {', '.join(sorted(_NEEDS))}"
        r.error("rope-scaling", f"{path}.rope_type", kind, "is no position scaling that we compute", mend)
        return
    mend = "take it from the drafter's training configuration"
    for key in sorted(needs - scaling.keys()):
        r.error("rope-scaling", f"{path}.{key}", None, f"is missing; position scaling {kind} needs it", mend)
    for key in sorted(scaling.keys() & _FACTORS):
        if not (POSITIVE.accepts(scaling[key]) or (scaling[key] is None and key not in needs)):
            r.error("rope-scaling", f"{path}.{key}", scaling[key], f"is not {POSITIVE.name}", mend)
    for key in sorted(scaling.keys() & _LISTS):
        half, value = (r.facts.get("head_dim") or 0) // 2, scaling[key]
        if not (isinstance(value, list) and all(map(POSITIVE.accepts, value)) and len(value) == half):
            r.error("rope-scaling", f"{path}.{key}", value, f"is not a list of {half} positive numbers", mend)
    if kind == "yarn" and (r.facts.get("rope_theta") or 0) <= 1:
        message = "is not above 1, so yarn finds no wavelengths"
        r.error("rope-scaling", r.origins.get("rope_theta", "rope_theta"), r.facts.get("rope_theta"), message, mend)
    for key in sorted(scaling.keys() - _FACTORS - _LISTS - _OTHER):
        r.warn("config-unknown-key", f"{path}.{key}", scaling[key], "is read by nothing of ours", "check the spelling")
    if scaling.get("mrope_section"):
        r.said.add("mrope")
