"""Rules on a planned launch: how K is counted, lengths, the budget of a step, parallelism, attention backends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from dflash_plugins.config_models import DraftConfig
from dflash_plugins.engines import Backend, EngineFacts, at_least, engine_facts, parse_version
from dflash_plugins.findings import Finding, Severity
from dflash_plugins.pair import loop_mode_finding, served_prefix_lengths
from dflash_plugins.rules import Facts, Hit, Rule

ERROR, WARNING, INFO = Severity.ERROR, Severity.WARNING, Severity.INFO


def units_findings(engine: str, config: DraftConfig, k: int | None, settings: Mapping[str, Any]) -> list[Finding]:
    """A token flag that disagrees with K, or looks like the other engine's (vLLM counts K, SGLang K + 1)."""
    return list(_units(engine_facts(engine), config.k, k, settings))


def _units(engine: EngineFacts, trained_k: int, k: int | None, settings: Mapping[str, Any]) -> Iterator[Finding]:
    flag = engine.tokens_flag
    if not str(settings.get(flag)).isdecimal():
        return
    value = int(settings[flag])
    if k is not None and value != engine.tokens(k):
        message = f"disagrees with K = {k}, which {engine.title} spells {engine.tokens(k)}"
        yield Finding.error("units-conflict", flag, value, message, "give one of the two")
    elif value == trained_k + 1 - engine.tokens_beyond_k:
        message = f"is what another engine calls a block of {trained_k + 1}; {engine.title} counts differently"
        mend = f"did you mean {engine.tokens(trained_k)}?"
        yield Finding.of(WARNING, "units-other-engine", flag, value, message, mend)


def count_findings(f: Facts) -> list[Finding]:
    """The same for a planned launch."""
    said = f.setting("tokens")
    if f.engine is None or f.trained_k is None or said is None:
        return []
    return list(_units(f.engine, f.trained_k, f.k, {f.engine.tokens_flag: said}))


def loop_findings(f: Facts) -> list[Finding]:
    """What of a D-Loop drafter's schedule is not served, with K proposals per round."""
    if f.config is None or f.served_k is None:
        return []
    mode = f.config.loop.mode if f.config.loop and f.engine else "refine"
    unserved = [] if mode == "refine" else [loop_mode_finding(mode)]
    return [*unserved, *served_prefix_lengths(f.config, f.served_k)[1]]


def _plugin(f: Facts) -> Iterator[Hit]:
    known = f.engine.architecture(f.draft.get("architecture")) if f.engine else None
    if f.engine and known and known.plugin and f.launch.root is None:
        yield Hit("architectures", known.name, {"title": f.engine.title})


def _positions(f: Facts) -> Iterator[Hit]:
    """An explicit length counts, else the target's own; vLLM can be told a limit of the drafter's, too."""
    served = f.setting("max_model_len") or (f.target.max_position_embeddings if f.target else None)
    if f.engine is None or served is None:
        return
    limits = (
        (f.origins.get("max_position_embeddings", "max_position_embeddings"), f.draft.get("max_position_embeddings")),
        (f.spelled("draft_max_model_len"), f.setting("draft_max_model_len")),
    )
    for key, most in limits:
        if most is not None and served > most:
            yield Hit(key, most, {"served": served, "flag": f.spelled("max_model_len")})


def _rows(f: Facts) -> tuple[int, int, int] | None:
    """Budget of a step, requests at once and K, where all three are known."""
    budget, requests, k = f.setting("max_num_batched_tokens"), f.setting("max_num_seqs"), f.served_k
    return None if None in (budget, requests, k) else (int(budget), int(requests), int(k or 0))


def _no_budget(f: Facts) -> Iterator[Hit]:
    budget, k = f.setting("max_num_batched_tokens"), f.served_k
    if f.engine and budget is not None and k is not None and budget <= k:
        yield Hit(f.spelled("max_num_batched_tokens"), budget, {"k": k, "rows": k + 1})


def _budget(f: Facts, *, refused: bool) -> Iterator[Hit]:
    """Up to 0.30 vLLM took K slots of every possible request off the budget, and refused to start with none left."""
    if f.engine is None or (known := _rows(f)) is None:
        return
    budget, requests, k = known
    version = parse_version(f.launch.version or "")
    early = f.engine.engine == "vllm" and version is not None and at_least(version, "0.31.0") is False
    none_left = early and k < budget <= k * requests
    if budget > k and budget < requests * (k + 1) and none_left is refused:
        words = {"rows": requests * (k + 1), "requests": requests, "block": k + 1, "fit": max(budget // (k + 1), 1)}
        yield Hit(f.spelled("max_num_batched_tokens"), budget, {**words, "seqs": f.spelled("max_num_seqs")})


def _heads(f: Facts) -> Iterator[Hit]:
    ranks = f.setting("tensor_parallel_size") or 1
    heads, kv_heads = f.draft.get("num_heads"), f.draft.get("num_kv_heads")
    if f.engine is None or heads is None or kv_heads is None or ranks < 1:
        return
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        yield Hit(f.spelled("tensor_parallel_size"), ranks, {"heads": heads, "kv_heads": kv_heads})


def _draft_ranks(f: Facts) -> Iterator[Hit]:
    ranks, own = f.setting("tensor_parallel_size") or 1, f.setting("draft_tensor_parallel_size")
    if own not in (None, 1, ranks):
        yield Hit(f.spelled("draft_tensor_parallel_size"), own, {"ranks": ranks})


def _draft_window(f: Facts) -> Iterator[Hit]:
    window, k = f.setting("draft_window_size"), f.served_k
    if window is not None and k is not None and window < k + 1:
        yield Hit(f.spelled("draft_window_size"), window, {"block": k + 1})


def _chosen(f: Facts) -> tuple[str, str, Backend | None] | None:
    """Flag, name and what is known of the backend that the drafter's attention is to use, where one is named."""
    for flag in ("draft_attention_backend", "attention_backend"):
        name = f.setting(flag)
        if f.engine and isinstance(name, str) and name.lower() not in ("auto", "none"):
            known = {one.lower(): backend for one, backend in f.engine.backends.items()}
            return f.spelled(flag), name, known.get(name.lower())
    return None


def _kv_dtype(f: Facts) -> str | None:
    found = f.setting("draft_kv_cache_dtype") or f.setting("kv_cache_dtype")
    return None if found in (None, "auto") else str(found).lower()


def _holds(backend: Backend, dtype: str | None) -> bool:
    return dtype is None or any(fnmatchcase(dtype, pattern) for pattern in backend.kv_cache_dtypes)


def _backend_unknown(f: Facts) -> Iterator[Hit]:
    if (chosen := _chosen(f)) and chosen[2] is None and f.engine:
        yield Hit(chosen[0], chosen[1], {"known": ", ".join(f.engine.backends)})


def _backend_causal(f: Facts) -> Iterator[Hit]:
    chosen = _chosen(f)
    if chosen and chosen[2] and not chosen[2].non_causal and "non-causal" in f.traits and f.engine:
        fit = [name for name, backend in f.engine.backends.items() if backend.non_causal]
        yield Hit(
            chosen[0], chosen[1], {"fit": ", ".join(fit), "flag": f.engine.flags["draft_attention_backend"].names[0]}
        )


def _backend_kv(f: Facts) -> Iterator[Hit]:
    chosen, dtype = _chosen(f), _kv_dtype(f)
    if chosen and chosen[2] and not _holds(chosen[2], dtype):
        flag = "draft_kv_cache_dtype" if f.setting("draft_kv_cache_dtype") else "kv_cache_dtype"
        words = {"backend": chosen[1], "holds": ", ".join(chosen[2].kv_cache_dtypes)}
        yield Hit(f.spelled(flag), dtype, words)


def _no_backend_kv(f: Facts) -> Iterator[Hit]:
    dtype = _kv_dtype(f)
    if f.engine is None or dtype is None or _chosen(f) is not None or not f.engine.backends:
        return
    usable = [b for b in f.engine.backends.values() if b.non_causal or "non-causal" not in f.traits]
    if not any(_holds(backend, dtype) for backend in usable):
        flag = "draft_kv_cache_dtype" if f.setting("draft_kv_cache_dtype") else "kv_cache_dtype"
        yield Hit(f.spelled(flag), dtype, {"title": f.engine.title})


def _backend_note(f: Facts) -> Iterator[Hit]:
    chosen, dtype = _chosen(f), _kv_dtype(f)
    if chosen and chosen[2] and chosen[2].note and dtype is not None and _holds(chosen[2], dtype):
        yield Hit(chosen[0], chosen[1], {"note": chosen[2].note})


SERVED = (
    Rule(
        "plugin-needed", INFO, _plugin, "is no architecture of {title}: our plugin registers it",
        "install dflash-plugins where {title} runs",
    ),
    Rule(
        "positions-served", WARNING, _positions,
        "is less than the {served} positions served: longer requests are not drafted, or drafted past what was trained",
        "serve at most as many ({flag}), or expect no gain beyond",
    ),
    Rule(
        "token-budget", ERROR, _no_budget,
        "leaves no room in a step for one request with its {k} proposals", "give at least {rows}",
    ),
    Rule(
        "token-budget", ERROR, lambda f: _budget(f, refused=True),
        "is used up by the slots that {requests} requests may draft, {rows} rows in all: the engine does not start",
        "raise it to {rows} or more, or lower {seqs} or K",
    ),
    Rule(
        "token-budget", WARNING, lambda f: _budget(f, refused=False),
        "is less than {requests} requests with blocks of {block} take in one step, {rows}: about {fit} of them fit",
        "raise it to {rows} or more, or lower {seqs} or K",
    ),
    Rule(
        "tensor-parallel", ERROR, _heads, "cannot split the drafter's {heads} heads and {kv_heads} KV heads",
        "choose a number of ranks that divides both",
    ),
    Rule(
        "draft-tensor-parallel", ERROR, _draft_ranks, "is neither 1 nor the target's {ranks} ranks",
        "give 1 or {ranks}",
    ),
    Rule("draft-window", ERROR, _draft_window, "is less than a block of {block}", "give at least {block}"),
    Rule(
        "attention-backend", WARNING, _backend_unknown, "is no attention backend that we have seen with a drafter",
        "known: {known}",
    ),
    Rule(
        "attention-backend", ERROR, _backend_causal, "does not serve this drafter, whose block is not causal",
        "set {flag} to one of {fit}",
    ),
    Rule(
        "attention-kv-dtype", ERROR, _backend_kv, "is no KV dtype that {backend} holds with a drafter",
        "use one of {holds}, or another backend",
    ),
    Rule(
        "attention-kv-dtype", ERROR, _no_backend_kv,
        "is held by no attention backend of {title} that serves this drafter", "use another KV dtype",
    ),
    Rule("attention-backend", WARNING, _backend_note, "{note}", "measure what is accepted before relying on it"),
)  # fmt: skip
