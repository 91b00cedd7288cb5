"""Why little of what is drafted may be accepted: what ``check`` found on the pair, then what else it could be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from dflash_plugins.findings import Finding, Severity

if TYPE_CHECKING:
    from dflash_plugins.report import ServeReport


class Kind(NamedTuple):
    """A kind of suspect: how codes of findings about it begin, and what to say where ``check`` found none."""

    codes: tuple[str, ...]
    words: str


KINDS = (
    Kind(
        ("pair-hidden", "pair-vocab", "pair-target", "pair-arch", "pair-tok", "pair-eos", "tensor-", "fc-width"),
        "wrong drafter for the target: another size, another fine-tune or another revision of it was drafted for",
    ),
    Kind(("target-layer",), "wrong layer ids: target_layer_ids of the drafter against those it was trained with"),
    Kind(("pair-rope", "rope-"), "rope theta or scaling of the drafter is not what it was trained with"),
    Kind(("mask-",), "wrong mask token: mask_token_id is not the one of training"),
    Kind(
        (),
        "thinking templates: the chat template thinks where training did not, or the reverse (enable_thinking in "
        "chat_template_kwargs)",
    ),
    Kind(
        ("sampling", "generation"),
        "sampling temperature: the probe is greedy; a floor that was measured when sampling is another number",
    ),
    Kind(("k-", "units-"), "K against B: vLLM counts proposals (K), SGLang the block with its anchor (B = K + 1)"),
    Kind(
        ("quant", "dtype-", "attention-kv", "draft-kv"),
        "quantisation: a quantised target, drafter or KV cache, which the drafter was not trained beside",
    ),
    Kind(
        ("matrix", "engine-", "vllm-", "sglang-", "plugin-", "attention-", "draft-window"),
        "untested versions: the compatibility matrix says {status} of this pair on {engine}; compare with "
        "dflash-plugins prove",
    ),
)


def suspects(report: ServeReport) -> Iterator[str]:
    """One line each: the findings that may explain it, worst first, then every kind of which nothing was found."""
    found = sorted(filter(_counts, report.findings), key=lambda f: (list(Severity).index(f.severity), _rank(f)))
    yield from map(str, found)
    named = {_rank(finding) for finding in found}
    engine = f"{report.engine.name} {report.engine.version or '(unknown version)'}"
    for rank, kind in enumerate(KINDS):
        if rank not in named and not (rank == len(KINDS) - 1 and report.matrix.status == "tested"):
            yield kind.words.format(status=report.matrix.status, engine=engine)


def _rank(finding: Finding) -> int:
    """Place among the kinds, the end for what is of none."""
    codes = (rank for rank, kind in enumerate(KINDS) if kind.codes and finding.code.startswith(kind.codes))
    return next(codes, len(KINDS))


def _counts(finding: Finding) -> bool:
    return finding.severity is not Severity.INFO or _rank(finding) < len(KINDS) - 1
