"""2,000 mutated configurations: ``check`` never stumbles, and never says ok where the reference loader refuses."""

from __future__ import annotations

import copy
import io
import json
import math
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import tiny
from hypothesis import HealthCheck, given, settings
from rich.console import Console

from dflash_plugins.config_places import DRAFT_KEYS, IGNORED_KEYS, LAYER_KEYS
from dflash_plugins.drafter import load_drafter
from dflash_plugins.errors import BadInput, Refused
from dflash_plugins.hub import Model
from dflash_plugins.serve import check

pytestmark = pytest.mark.filterwarnings(r"ignore:\[config-:UserWarning")  # the loader warns of what check has said

KEYS = (
    *LAYER_KEYS,
    *DRAFT_KEYS,
    *sorted(IGNORED_KEYS),
    "causal",
    "aux_hidden_state_layer_ids",
    "speculators_model_type",
)
ROPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional", "su")
INTERESTING = st.sampled_from(
    (
        *(None, True, False, -1, 0, 1, 2, 7, 8, 15, 64, 511, 512, 2**31, 2**63, 10**400),
        *(0.0, -0.5, 1e-320, 1e308, math.inf, -math.inf, math.nan),
        *("", "silu", "float16", "torch.bfloat16", "\ud800", "full_attention"),
        *([], [0, 2], [2, 0], [0, 0], [1.5], ["x"], ["sliding_attention"] * 2),
        *(["DFlash2DraftModel"], ["DLoopDraftModel"], {}, {"rope_theta": 10000.0}),
        *({"mode": "refine", "prefix_lengths": [1]}, {"mode": "extend", "max_loops": 2, "gate": -1.0}),
    )
)
JSON = st.recursive(
    INTERESTING | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)
ROPE = st.fixed_dictionaries(
    {"rope_theta": st.sampled_from([1e4, 1.0, 0.5, 1e6]), "rope_type": st.sampled_from(ROPES)},
    optional={
        key: st.sampled_from([1.0, 2, 4.0, 0, -1, "x", None, 1e30, [1.0] * 16])
        for key in (
            *("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "beta_fast"),
            *("attention_factor", "short_factor", "long_factor", "mrope_section", "mscale", "truncate"),
        )
    },
)


def mutate(data: st.DataObject, raw: dict[str, Any]) -> None:
    holders = [raw, *(value for value in raw.values() if isinstance(value, dict))]
    holder = data.draw(st.sampled_from(holders))
    kind = data.draw(st.sampled_from(["change", "change", "delete", "add", "rope"]))
    if kind == "rope":
        raw.pop("rope_theta", None)
        raw[data.draw(st.sampled_from(["rope_parameters", "rope_scaling"]))] = data.draw(ROPE)
    elif kind == "add":
        holder[data.draw(st.sampled_from(KEYS) | st.text(max_size=5))] = drawn(data)
    elif holder:
        key = data.draw(st.sampled_from(sorted(holder)))
        if kind == "delete":
            del holder[key]
        else:
            holder[key] = drawn(data)


def drawn(data: st.DataObject) -> Any:
    """A value of its own: what is sampled is one object for all examples, and may become a holder itself."""
    return copy.deepcopy(data.draw(JSON))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> dict[str, tuple[Path, Path, dict[str, Any], dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("pairs")
    target = tiny.write_target(folder / "target")
    about = json.loads((target / "config.json").read_text())
    found = {}
    for method in ("dflash", "dflash2", "dloop"):
        raw = tiny.raw_config(method)
        found[method] = (target, tiny.write_drafter(folder / method, raw), about, raw)
    return found


def examine(pairs, data: st.DataObject) -> None:
    target, draft, about, raw = pairs[data.draw(st.sampled_from(sorted(pairs)))]
    raw, about = copy.deepcopy(raw), copy.deepcopy(about)
    for _ in range(data.draw(st.integers(1, 3))):
        mutate(data, raw)
    if data.draw(st.integers(0, 4)) == 0:
        mutate(data, about)
    (draft / "config.json").write_text(json.dumps(raw))
    (target / "config.json").write_text(json.dumps(about))
    engine, version = data.draw(st.sampled_from([("vllm", "0.31.0"), ("sglang", "0.5.21"), ("vllm", None)]))
    given_settings = data.draw(
        st.dictionaries(st.sampled_from(["dtype", "max_model_len", "tp", "kv_cache_dtype"]), JSON)
    )
    try:
        report = check(
            engine,
            Model(str(target), target),
            Model(str(draft), draft),
            version=version,
            settings=given_settings,
        )
    except BadInput:
        return  # it could not run, and says why in one sentence
    document = json.loads(report.model_dump_json().encode("utf-8"))
    assert all(one["message"] and one["mend"] for one in document["findings"])
    report.render(Console(file=io.StringIO(), width=80))
    if report.verdict == "ok":
        load_drafter(draft)


def examples(count: int):
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    return settings(max_examples=count, deadline=None, derandomize=True, suppress_health_check=checks)


@examples(150)
@given(st.data())
def test_mutated_configurations(pairs, data: st.DataObject) -> None:
    examine(pairs, data)


@pytest.mark.slow
@examples(2000)
@given(st.data())
def test_two_thousand_mutated_configurations(pairs, data: st.DataObject) -> None:
    examine(pairs, data)


def test_the_mutations_would_find_a_checker_that_says_ok(pairs) -> None:
    """The reference loader refuses this one; so does the checker, at the same place."""
    target, draft, about, raw = pairs["dflash"]
    (target / "config.json").write_text(json.dumps(about))
    (draft / "config.json").write_text(json.dumps(raw | {"rope_parameters": {"rope_theta": 1e4, "rope_type": "su"}}))
    report = check("vllm", Model("t", target), Model("d", draft), version="0.31.0")
    assert report.verdict == "refused"
    with pytest.raises(Refused):
        load_drafter(draft)
