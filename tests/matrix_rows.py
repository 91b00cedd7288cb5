"""Rows of the compatibility matrix for tests: ``row("r1", result="failed", ...)``, and strategies for any row."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from dflash_plugins.matrix.rows import MatrixRow, acceptance_floor

PRINT_A, PRINT_B = "sha256:" + "a" * 64, "sha256:" + "b" * 64


def document(identity: str = "r1", **changes: Any) -> dict[str, Any]:
    """A valid row as YAML gives it; ``changes`` go to its parts by ``part__key``, or to the row."""
    made: dict[str, Any] = {
        "id": identity,
        "result": "passed",
        "date": "2026-11-30",
        "evidence": "cpu",
        "command": "ci/in-env vllm -- dflash-plugins prove",
        "engine": {
            **{"name": "vllm", "version": "0.31.0+cpu", "runner": "v1", "torch": "2.13.0+cpu"},
            **{"transformers": "5.17.0", "pins": "met", "plugin": "0.1.0"},
        },
        "target": {"name": "org/target", "fingerprint": PRINT_B},
        "draft": {"name": "org/drafter", "fingerprint": PRINT_A},
        "launch": {
            **{"method": "dflash", "decoding": "greedy", "temperature": 0.0, "k": 7, "draft_sampling": "greedy"},
            **{"dtype": "float32", "hardware": "Linux x86_64, 2 cores", "concurrency": 8},
        },
        "results": results(),
    }
    for name, value in changes.items():
        part, _, key = name.partition("__")
        if key:
            made[part] = made[part] | {key: value}
        else:
            made[name] = value
    if made["result"] == "failed":
        made = {"reason": "it broke"} | made
    return made


def results(emitted: float = 1.6, lossless: bool = True) -> dict[str, Any]:
    return {
        "prompts": {"name": "prove", "count": 60, "sha256": "c" * 64},
        "proof": {"lossless": lossless, "tokens": 7199, "numerical": 1},
        "emitted_per_round": emitted,
        "accepted_by_slot": [0.4, 0.2],
        "acceptance_floor": acceptance_floor(emitted),
    }


def row(identity: str = "r1", **changes: Any) -> MatrixRow:
    return MatrixRow.model_validate(document(identity, **changes))


texts = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=60) | st.sampled_from(
    [
        "- id: x",
        "rows:",
        "null",
        "1e3",
        "2026-11-30",
        "a: b # c",
        " x ",
        "'",
        '"',
        "line\n- id: y\nline",
        "\u2028",
        "é" * 200,
    ]
)
parts = st.fixed_dictionaries(
    {},
    optional={
        "engine__commit": texts,
        "engine__kernels": st.dictionaries(texts, texts, max_size=3),
        "engine__stubs": st.lists(texts, max_size=2),
        "target__quantisation": texts,
        "draft__name": texts,
        "launch__scheduling": st.dictionaries(texts, st.integers(0, 2**40), max_size=2),
        "launch__prefix_cache": st.booleans(),
        "known_issues": st.lists(texts, max_size=3),
        "command": texts,
        "date": st.dates().map(str),
        "results": st.floats(1, 16).map(results),
    },
)
ids = st.from_regex(r"[a-z0-9][a-z0-9.-]{0,20}", fullmatch=True)
rows = st.builds(lambda identity, changes: row(identity, **changes), ids, parts) | st.builds(
    lambda identity, reason: row(identity, result="failed", reason=reason, results=None), ids, texts
)
