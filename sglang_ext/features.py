"""Features of SGLang beside which our worker does not draft: each with its reason, found before anything loads.

``docs/sglang.md`` holds the whole table. A feature is refused where it cannot work, and where nobody has seen it work;
what the engine refuses by itself (pipelines, attention data parallelism) is left to the engine.
"""

from __future__ import annotations

from typing import Any

from dflash_plugins.findings import Finding

# What a request may ask for: how it looks when it does not, and why it is refused when it does.
REFUSED: dict[str, tuple[Any, str]] = {
    "custom_logit_processor": (
        None,
        "SGLang hands it all rows of a block at once, and it cannot know which proposals come before each",
    ),
    "return_sampling_mask": (
        False,
        "SGLang (0.5.23) puts the mask together with a kernel for sampled requests, beside which nobody has seen it",
    ),
}


def feature_findings(settings: Any, on_cpu: bool) -> list[Finding]:
    """Errors for flags in force that are not served. ``settings`` are the engine's arguments by name."""
    return [
        *_threshold_findings(settings),
        *_parallel_findings(settings),
        *_lora_findings(settings),
        *_disaggregation_findings(settings),
        *_seed_findings(settings),
        *(_cpu_findings(settings) if on_cpu else ()),
    ]


def _threshold_findings(settings: Any) -> list[Finding]:
    found = []
    for key in ("speculative_accept_threshold_single", "speculative_accept_threshold_acc"):
        value = getattr(settings, key, 1.0)
        if value is not None and float(value) != 1.0:
            message = "accepts more than the target would, so that the text is no longer the target's"
            found.append(Finding.error("accept-threshold", key, value, message, "leave it at 1.0"))
    return found


def _parallel_findings(settings: Any) -> list[Finding]:
    if settings.dp_size == 1:
        return []
    message = "several ranks behind one port have not been tried"
    return [Finding.error("data-parallel", "dp_size", settings.dp_size, message, "start one server per rank")]


def _lora_findings(settings: Any) -> list[Finding]:
    if not (settings.enable_lora or settings.lora_paths):
        return []
    message = "the drafter is lent the target's embedding and head, and has not been tried with adapters around them"
    mend = "merge the adapter into the target, or serve without a drafter"
    return [Finding.error("lora", "enable_lora", True, message, mend)]


def _disaggregation_findings(settings: Any) -> list[Finding]:
    mode = str(settings.disaggregation_mode or "null")
    if mode == "null":
        return []
    message = "handing the drafter's context from one server to another has not been tried"
    mend = "serve prefill and decoding together"
    return [Finding.error("disaggregation", "disaggregation_mode", mode, message, mend)]


def _seed_findings(settings: Any) -> list[Finding]:
    if not settings.enable_deterministic_inference:
        return []
    message = "a request's seed decides its noise token by token, which our verification does not follow"
    return [
        Finding.error("deterministic", "enable_deterministic_inference", True, message, "serve without this setting")
    ]


def _cpu_findings(settings: Any) -> list[Finding]:
    found = []
    if settings.attention_backend != "torch_native":
        message = "our attention for a CPU stands in the place of torch_native"
        mend = "start with --attention-backend torch_native"
        found.append(Finding.error("attention-backend", "attention_backend", settings.attention_backend, message, mend))
    if settings.page_size not in (None, 1):
        message = "SGLang's allocator of pages is a GPU kernel"
        found.append(Finding.error("page-size", "page_size", settings.page_size, message, "leave it at 1"))
    return found


def refused_rules(request: Any) -> str | None:
    """A sentence for a request that asks for what our verification cannot give, else None.

    What was asked for is taken away: the engine still runs a token of a request that it refuses.
    """
    asked = [name for name, (off, _) in REFUSED.items() if getattr(request, name, off) not in (off, None)]
    if not asked:
        return None
    for name in asked:
        setattr(request, name, REFUSED[name][0])
    reasons = "; ".join(f"{name}: {REFUSED[name][1]}" for name in asked)
    return f"{reasons}; send the request without it, or serve without a drafter"
