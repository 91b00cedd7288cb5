"""Features of vLLM beside which a drafter is not served: each with its reason, found before the drafter's weights load.

``docs/vllm.md`` holds the whole table. A feature is refused where it cannot work, and where nobody has seen it work;
what the engine refuses by itself is left to the engine.
"""

from __future__ import annotations

from typing import Any

from dflash_plugins.findings import Finding, Severity


def feature_findings(vllm_config: Any) -> list[Finding]:
    """Errors for features in force in this ``VllmConfig`` that are not served; a warning for one with a condition."""
    return [
        *_parallel_findings(vllm_config.parallel_config),
        *_lora_findings(vllm_config.lora_config),
        *_multimodal_findings(vllm_config.model_config),
        *_connector_findings(vllm_config.kv_transfer_config),
    ]


def _parallel_findings(parallel: Any) -> list[Finding]:
    found = []
    if parallel.pipeline_parallel_size > 1:
        message = "the drafter stands on the last rank, where the embedding and the features of earlier layers are not"
        mend = "use tensor_parallel_size"
        found.append(
            Finding.error("pipeline-parallel", "pipeline_parallel_size", parallel.pipeline_parallel_size, message, mend)
        )
    for key in ("prefill_context_parallel_size", "decode_context_parallel_size"):
        if getattr(parallel, key, 1) > 1:
            message = "a block has not been tried with a context that is spread over ranks"
            found.append(
                Finding.error("context-parallel", key, getattr(parallel, key), message, "use tensor_parallel_size")
            )
    # Ranks with a dense target are engines of their own, and their workers see a size of 1 here.
    if parallel.data_parallel_size > 1:
        message = "ranks that wait for each other (a target with experts) have not been tried"
        mend = "start one server for each rank"
        found.append(Finding.error("data-parallel", "data_parallel_size", parallel.data_parallel_size, message, mend))
    return found


def _lora_findings(lora: Any) -> list[Finding]:
    if lora is None:
        return []
    message = (
        "vLLM lends the drafter the target's embedding with adapters around it, which take its rows for the target's"
    )
    return [
        Finding.error(
            "lora", "enable_lora", True, message, "merge the adapter into the target, or serve without a drafter"
        )
    ]


def _multimodal_findings(model: Any) -> list[Finding]:
    if not model.is_multimodal_model:
        return []
    message = "drafting after images, audio or video, and with their positions, has not been tried"
    return [
        Finding.error("multimodal", "architectures", model.architecture, message, "serve a target that reads text only")
    ]


def _connector_findings(transfer: Any) -> list[Finding]:
    if transfer is None or transfer.kv_connector is None:
        return []
    finding = Finding.of(
        Severity.WARNING,
        "kv-connector",
        "kv_transfer_config.kv_connector",
        transfer.kv_connector,
        "what is transferred holds the drafter's context, too, and connectors do not ask whose it is",
        "serve this very drafter on all sides, and let no other one write to the same store",
    )
    return [finding]
