"""What a rule is: a record that looks at all that is known of a pair and its launch, and says what is wrong.

The tables stand in ``pair`` (drafter and target), ``served`` (K, lengths, budgets, backends) and ``memory``; what an
engine as shipped does not do is data (``engines/*.yaml``), read by ``engines.limits``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from dflash_plugins.config_models import DraftConfig, TargetConfig
from dflash_plugins.engines import EngineFacts, Launch, Trait
from dflash_plugins.findings import Finding, Severity
from dflash_plugins.headers import Header

SCALES = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
# How quantised layers store what stands in the place of a plain weight.
QUANTISED_PARTS = (
    "weight_packed", "weight_scale", "weight_scale_2", "weight_scale_inv", "weight_shape", "weight_zero_point",
    "weight_global_scale", "weight_g_idx", "input_scale", "input_global_scale", "qweight", "qzeros", "scales", "g_idx",
)  # fmt: skip
_HEADS = ("lm_head", "model.lm_head", "language_model.lm_head", "model.language_model.lm_head")


class Setting(NamedTuple):
    """A flag of the planned launch: as the user spelled it, and its value in the kind the engine takes."""

    key: str
    value: Any


@dataclass(frozen=True)
class Facts:
    """All that rules look at. What is not known is empty or None, and rules that need it say nothing.

    ``draft`` holds the fields of a ``DraftConfig`` that could be read, ``config`` the whole when there is one,
    ``origins`` the path each was read from. ``dtype`` and ``served_dtype`` are those of the stored and of the served
    weights. Vocabularies map tokens to ids. ``k`` is the served number of proposals, None where nobody said one.
    ``settings`` go by canonical name (``EngineFacts.flags``). Bytes count all ranks together.
    """

    draft: Mapping[str, Any] = field(default_factory=dict)
    config: DraftConfig | None = None
    origins: Mapping[str, str] = field(default_factory=dict)
    said: frozenset[Trait] = frozenset()
    own_embedding: bool | None = None
    dtype: str | None = None
    draft_bytes: int | None = None
    draft_vocabulary: Mapping[str, int] | None = None
    target: TargetConfig | None = None
    target_header: Header | None = None
    target_bytes: int | None = None
    target_vocabulary: Mapping[str, int] | None = None
    generation: Mapping[str, Any] = field(default_factory=dict)
    engine: EngineFacts | None = None
    launch: Launch = field(default_factory=Launch)
    settings: Mapping[str, Setting] = field(default_factory=dict)
    served_dtype: str | None = None
    k: int | None = None

    @cached_property
    def traits(self) -> frozenset[Trait]:
        """What rules in YAML may ask for by name."""
        return frozenset(traits_of(self))

    @property
    def runner(self) -> str | None:
        """The runner of the engine: as launched, else what it chooses on the platform; None where unknown."""
        chosen = self.engine.default_runner.get(self.launch.platform or "") if self.engine else None
        return self.launch.runner or chosen

    @property
    def trained_k(self) -> int | None:
        """Proposals of the trained block, B - 1."""
        block = self.draft.get("block_size")
        return None if block is None or block < 2 else int(block) - 1

    @property
    def served_k(self) -> int | None:
        """Proposals per round: those asked for, else those of the trained block."""
        return self.trained_k if self.k is None else self.k

    def setting(self, name: str) -> Any:
        """The value of a flag by its canonical name; None where it is not set."""
        found = self.settings.get(name)
        return None if found is None else found.value

    def spelled(self, name: str) -> str:
        """How the user spelled a flag, or how the engine does."""
        found = self.settings.get(name)
        if found is not None or self.engine is None or name not in self.engine.flags:
            return name if found is None else found.key
        return self.engine.flags[name].names[0]


def traits_of(facts: Facts) -> Iterator[Trait]:
    """The traits of a drafter and of its target."""
    yield from facts.said
    draft, origins = facts.draft, facts.origins
    windows, causal = draft.get("windows") or (), draft.get("causal") or ()
    if len({window is None for window in windows}) > 1:
        yield "mixed-layers"
    if any(window is not None for window in windows):
        yield "sliding"
    if not all(causal):
        yield "non-causal"
    if scaled := [name for name in SCALES if draft.get(name) not in (None, 1.0)]:
        yield "scaled"
        if any(not origins.get(name, "").startswith("dflash_config.") for name in scaled):
            yield "scaled-outside"
    if draft.get("input_embedding_scale") not in (None, 1.0):
        yield "embedding-scaled"
    if draft.get("draft_vocab_size") not in (None, draft.get("vocab_size")):
        yield "own-head"
    if facts.own_embedding:
        yield "own-embedding"
    if origins.get("causal") == "dflash_config.causal":
        yield "nested-causal"
    if facts.target is not None and facts.target.stateful:
        yield "stateful"
    if facts.target is not None and facts.target.multimodal:
        yield "multimodal"
    if head_is_quantised(facts.target_header or {}):
        yield "quantised-head"


def head_is_quantised(header: Header) -> bool:
    """Whether a target stores its head in quantised parts, or as numbers that are no plain floats."""
    parts = {f"{head}.{part}" for head in _HEADS for part in QUANTISED_PARTS}
    plain = [header[f"{head}.weight"][0] for head in _HEADS if f"{head}.weight" in header]
    return not parts.isdisjoint(header) or any(dtype not in ("F64", "F32", "F16", "BF16") for dtype in plain)


class Hit(NamedTuple):
    """Where a rule holds: the key, its value, and words for the message and the mend."""

    key: str
    value: Any
    words: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Rule:
    """``when`` yields a hit for each place where something is wrong; its words fill ``message`` and ``mend``."""

    code: str
    severity: Severity
    when: Callable[[Facts], Iterable[Hit]]
    message: str
    mend: str

    def findings(self, facts: Facts) -> Iterator[Finding]:
        """One finding per hit."""
        for key, value, words in self.when(facts):
            message, mend = self.message.format_map(words), self.mend.format_map(words)
            yield Finding.of(self.severity, self.code, key, value, message, mend)


def run(rules: Iterable[Rule], facts: Facts) -> list[Finding]:
    """The findings of every rule, in the order of the rules."""
    return [finding for rule in rules for finding in rule.findings(facts)]
