"""Safetensors checkpoints with every tensor accounted for, before anything is built.

Only headers are read until ``load_tensors``; torch is imported there and nowhere else.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from dflash_plugins.config import DraftConfig
from dflash_plugins.errors import BadInput, Refused
from dflash_plugins.findings import Finding, Severity, errors
from dflash_plugins.headers import Header, directory_of, headers_only, read_header, tensor_files
from dflash_plugins.pair import dtype_name
from dflash_plugins.rules import QUANTISED_PARTS

if TYPE_CHECKING:
    import torch

__all__ = [
    "Accounting", "Header", "Slot", "account", "canonical_name", "directory_of", "effective_dtype", "expected_tensors",
    "extra_file_findings", "id_map_findings", "load_tensors", "new_checkpoint", "read_header", "tensor_files",
    "write_checkpoint",
]  # fmt: skip

Shape = tuple[int | None, ...]

_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_INTEGERS = frozenset({"I64", "I32"})


@dataclass(frozen=True)
class Slot:
    """A tensor a drafter may have. None in ``shape`` is a size that is not known."""

    shape: Shape
    required: bool = True
    dtypes: frozenset[str] = _FLOATS


@dataclass(frozen=True)
class Accounting:
    """Which stored tensor fills which parameter, and all that is wrong with the rest.

    ``claimed`` maps canonical names to stored names. ``dtype`` is the effective dtype: that of most stored elements.
    """

    claimed: Mapping[str, str]
    findings: tuple[Finding, ...]
    dtype: str | None = None
    own_embedding: bool = False
    own_head: bool = False
    subject: str = field(default="checkpoint", compare=False)

    def require(self) -> Accounting:
        """Itself; ``Refused`` with all findings when any of them is an error."""
        if errors(self.findings):
            raise Refused(self.subject, sorted(self.findings, key=lambda f: f.severity is not Severity.ERROR))
        return self


@contextmanager
def _opened(file: Path, framework: str = "numpy") -> Iterator[Any]:
    try:
        with safe_open(file, framework=framework) as handle:
            yield handle
    except (SafetensorError, OSError) as error:
        raise BadInput(f"{file} is no complete safetensors file: {error}") from error


def _times(*sizes: int | None) -> int | None:
    product = 1
    for size in sizes:
        if size is None:
            return None
        product *= size
    return product


def _layer_slots(f: Mapping[str, Any], method: str | None) -> dict[str, Slot]:
    hidden, inner, head = f.get("hidden_size"), f.get("intermediate_size"), f.get("head_dim")
    queries, keys = _times(f.get("num_heads"), head), _times(f.get("num_kv_heads"), head)
    slots = {
        "self_attn.q_proj.weight": Slot((queries, hidden)),
        "self_attn.k_proj.weight": Slot((keys, hidden)),
        "self_attn.v_proj.weight": Slot((keys, hidden)),
        "self_attn.o_proj.weight": Slot((hidden, queries)),
        "self_attn.q_norm.weight": Slot((head,)),
        "self_attn.k_norm.weight": Slot((head,)),
        "mlp.gate_proj.weight": Slot((inner, hidden)),
        "mlp.up_proj.weight": Slot((inner, hidden)),
        "mlp.down_proj.weight": Slot((hidden, inner)),
        "input_layernorm.weight": Slot((hidden,)),
        "post_attention_layernorm.weight": Slot((hidden,)),
    }
    if f.get("attention_bias"):
        for name, size in (("q", queries), ("k", keys), ("v", keys), ("o", hidden)):
            slots[f"self_attn.{name}_proj.bias"] = Slot((size,))
    if f.get("attention_sinks"):
        slots["self_attn.attention_sink_bias"] = Slot((f.get("num_heads"),))
    return slots | _conv_slots(f)


def _conv_slots(f: Mapping[str, Any]) -> dict[str, Slot]:
    conv, hidden = f.get("conv"), f.get("hidden_size")
    if not conv:
        return {}
    taps, group = conv["kernel_size"], conv["group_size"]
    groups = None if hidden is None or group <= 0 else hidden // group
    slots = {}
    for name in ("attention_conv", "mlp_conv"):
        slots[f"{name}.base_kernel"] = Slot((2, taps, hidden))
        slots[f"{name}.kernel_projection.weight"] = Slot((_times(2, taps, groups), hidden))
    return slots


def _head_slots(f: Mapping[str, Any]) -> dict[str, Slot]:
    """Embedding, head and id map: a reduced head needs its map, everything else may be the target's."""
    hidden, vocab, draft = f.get("hidden_size"), f.get("vocab_size"), f.get("draft_vocab_size")
    slots = {"embed_tokens.weight": Slot((vocab, hidden), required=False)}
    reduced = draft is not None and draft != vocab
    slots["lm_head.weight"] = Slot((vocab if draft is None else draft, hidden), required=reduced)
    if draft is not None:
        slots["d2t"] = Slot((draft,), required=reduced, dtypes=_INTEGERS)
        slots["t2d"] = Slot((vocab,), required=False, dtypes=frozenset({"BOOL", "U8"}) | _INTEGERS)
    return slots


def _selector_slots(f: Mapping[str, Any]) -> dict[str, Slot]:
    selector = f.get("selector")
    if not selector:
        return {}
    rank = selector["rank"]
    return {
        "candidate_selector.predecessor_codebook": Slot((f.get("vocab_size"), rank)),
        "candidate_selector.successor_codebook": Slot((f.get("vocab_size"), rank)),
        "candidate_selector.hidden_projection.weight": Slot((rank, f.get("hidden_size"))),
    }


def expected_tensors(config: DraftConfig | Mapping[str, Any]) -> dict[str, Slot]:
    """Canonical name to slot. Facts of an incomplete description give slots with unknown sizes."""
    f = config.model_dump() if isinstance(config, DraftConfig) else config
    hidden, ids = f.get("hidden_size"), f.get("target_layer_ids")
    taps = None if ids is None else len(ids)
    slots = {
        "fc.weight": Slot((hidden, _times(taps, f.get("target_hidden_size")))),
        "hidden_norm.weight": Slot((hidden,)),
        "norm.weight": Slot((hidden,)),
    }
    for i in range(f.get("num_layers") or 0):
        slots |= {f"layers.{i}.{name}": slot for name, slot in _layer_slots(f, f.get("method")).items()}
    return slots | _selector_slots(f) | _head_slots(f)


def canonical_name(stored: str) -> str:
    """The one name of a parameter that is published under several."""
    name = stored.removeprefix("model.")
    if name.startswith("candidate_selector.") and name.endswith("_codebook.weight"):
        return name.removesuffix(".weight")
    return name


def account(config: DraftConfig | Mapping[str, Any], header: Header, *, subject: str = "checkpoint") -> Accounting:
    """Every stored tensor claimed by one parameter, or named in a finding; and every missing parameter."""
    facts = dict(config.model_dump() if isinstance(config, DraftConfig) else config)
    facts.setdefault("num_layers", _layers_stored(header))
    slots = expected_tensors(facts)
    spellings: dict[str, list[str]] = {}
    for stored in header:
        spellings.setdefault(canonical_name(stored), []).append(stored)
    claimed = {name: stored[0] for name, stored in spellings.items() if name in slots}
    packed = _packed_modules(spellings.keys() - slots.keys())
    found = [
        *_spelling_findings(spellings),
        *_packed_findings(packed),
        *_unclaimed_findings(sorted(spellings.keys() - slots.keys()), packed, header, spellings),
        *_missing_findings(slots, claimed, packed),
        *_shape_findings(slots, claimed, header),
    ]
    dtype, dtypes = effective_dtype(facts.get("dtype"), {s: header[s] for s in claimed.values()})
    own = {name: name in claimed for name in ("embed_tokens.weight", "lm_head.weight")}
    return Accounting(claimed, (*found, *dtypes), dtype, own["embed_tokens.weight"], own["lm_head.weight"], subject)


def _layers_stored(header: Header) -> int:
    """Layers that the tensors speak of, for a configuration that does not say how many there are."""
    numbers = (canonical_name(name).split(".")[1] for name in header if canonical_name(name).startswith("layers."))
    return 1 + max((int(number) for number in numbers if number.isdecimal() and len(number) < 4), default=-1)


def _spelling_findings(spellings: Mapping[str, list[str]]) -> Iterator[Finding]:
    for name, stored in sorted(spellings.items()):
        if len(stored) > 1:
            message = f"the same parameter is stored as {' and '.join(stored)}"
            yield Finding.error("tensor-twice", name, stored, message, "keep one of them")


def _packed_modules(unclaimed: set[str]) -> dict[str, list[str]]:
    """Module to the quantised parts that stand where its plain weight is expected."""
    modules: dict[str, list[str]] = {}
    for name in sorted(unclaimed):
        module, _, part = name.rpartition(".")
        if part in QUANTISED_PARTS:
            modules.setdefault(module, []).append(name)
    return modules


def _packed_findings(packed: Mapping[str, list[str]]) -> Iterator[Finding]:
    for module, parts in packed.items():
        message = f"is quantised ({', '.join(parts)}), so the plain weight would stay unwritten"
        yield Finding.error(
            "tensor-quantised", f"{module}.weight", parts, message, "use the drafter's unquantised weights"
        )


def _unclaimed_findings(
    names: list[str], packed: Mapping[str, list[str]], header: Header, spellings: Mapping[str, list[str]]
) -> Iterator[Finding]:
    quantised = {part for parts in packed.values() for part in parts}
    for name in names:
        if name not in quantised:
            stored = spellings[name][0]
            message = "belongs to no parameter of this drafter, so its effect would be lost"
            mend = "check the architecture in config.json, or remove the tensor"
            yield Finding.error("tensor-unclaimed", stored, list(header[stored][1]), message, mend)


def _missing_findings(
    slots: Mapping[str, Slot], claimed: Mapping[str, str], packed: Mapping[str, list[str]]
) -> Iterator[Finding]:
    for name, slot in slots.items():
        if slot.required and name not in claimed and name.removesuffix(".weight") not in packed:
            why = " although draft_vocab_size is smaller than vocab_size" if name in ("d2t", "lm_head.weight") else ""
            yield Finding.error("tensor-missing", name, None, f"is missing{why}", "export the drafter again, complete")


def _shape_findings(slots: Mapping[str, Slot], claimed: Mapping[str, str], header: Header) -> Iterator[Finding]:
    for name, stored in claimed.items():
        dtype, shape = header[stored]
        slot = slots[name]
        fits = len(shape) == len(slot.shape) and all(w in (None, s) for w, s in zip(slot.shape, shape, strict=True))
        wanted = "[" + ", ".join("?" if size is None else str(size) for size in slot.shape) + "]"
        if not fits:
            code = "fc-width" if name == "fc.weight" else "tensor-shape"
            message = f"has shape {list(shape)}, the configuration asks for {wanted}"
            yield Finding.error(code, stored, list(shape), message + _SHAPE_HINTS.get(name, ""), "use matching files")
        if dtype not in slot.dtypes:
            message = f"is stored as {dtype}, expected one of {', '.join(sorted(slot.dtypes))}"
            yield Finding.error("tensor-dtype", stored, dtype, message, "use the drafter's unquantised weights")


_SHAPE_HINTS = {
    "fc.weight": " (hidden size, number of target_layer_ids times the target's hidden size)",
    "lm_head.weight": " (a reduced head needs draft_vocab_size and d2t)",
}


def effective_dtype(config_dtype: str | None, tensors: Header) -> tuple[str | None, list[Finding]]:
    """The dtype the weights really have, and warnings where the configuration or single tensors say otherwise."""
    elements: Counter[str] = Counter()
    for dtype, shape in tensors.values():
        if dtype in _FLOATS:
            elements[dtype] += _times(*shape) or 0
    if not elements:
        return dtype_name(config_dtype), []
    effective = dtype_name(elements.most_common(1)[0][0])
    found = []
    if len(elements) > 1:
        shares = ", ".join(f"{dtype_name(d)} ({n} elements)" for d, n in elements.most_common())
        found.append(_warning("dtype-mixed", "dtype", shares, "tensors of several dtypes", f"taken as {effective}"))
    if config_dtype is not None and dtype_name(config_dtype) != effective:
        message = f"the tensors are stored as {effective}"
        found.append(_warning("dtype-config", "dtype", config_dtype, message, f"write {effective} into config.json"))
    return effective, found


def _warning(code: str, key: str, value: Any, message: str, mend: str) -> Finding:
    return Finding(code=code, severity=Severity.WARNING, key=key, value=value, message=message, mend=mend)


def extra_file_findings(path: Path | str) -> list[Finding]:
    """Files beside the tensors that change the drafter in some engines only."""
    file = Path(path) / "mask_embedding.pt"
    if not file.is_file():
        return []
    message = (
        "a separate embedding of the mask token, a pickle: vLLM lays it beside the target's embedding, SGLang writes "
        "it over the target's own row, which a prompt with that token then reads; we do not read it"
    )
    mend = "expect other proposals from the core's drafter than from the engines; do not send the mask token to SGLang"
    return [_warning("mask-embedding-file", "mask_embedding.pt", file.name, message, mend)]


def id_map_findings(path: Path | str, accounting: Accounting, vocab_size: int) -> list[Finding]:
    """Whether ``d2t`` (int [draft_vocab_size]; target id = draft id + d2t) leads into the target's vocabulary."""
    stored = accounting.claimed.get("d2t")
    if stored is None:
        return []
    if headers_only(path):
        return []
    with _opened(tensor_files(path)[stored]) as handle:
        targets = [i + int(offset) for i, offset in enumerate(handle.get_tensor(stored))]
    outside = [t for t in targets if not 0 <= t < vocab_size]
    twice = len(targets) - len(set(targets))
    if not outside and not twice:
        return []
    message = f"leads to {len(outside)} ids outside the {vocab_size} of the target, {twice} ids twice"
    return [Finding.error("id-map", stored, outside[:8], message, "export d2t as target id minus draft id")]


@contextmanager
def new_checkpoint(path: Path, *, overwrite: bool) -> Iterator[Path]:
    """An empty folder to fill, which becomes ``path`` when the block ends well, and is gone when it does not.

    What exists already is replaced with ``overwrite`` and is BadInput without, as is a disk that takes no more.
    """
    if path.exists() and not overwrite:
        raise BadInput(f"{path} exists already; remove it or choose another directory")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as workshop:
            new = Path(workshop) / "new"
            new.mkdir()
            yield new
            if path.exists():
                path.rename(Path(workshop) / "old")
            new.rename(path)
    except (OSError, SafetensorError) as error:
        raise BadInput(f"{path} cannot be written, and is left as it was: {error}") from error


def write_checkpoint(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Write config.json and model.safetensors."""
    from safetensors.torch import save_file

    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})


def load_tensors(path: Path | str, accounting: Accounting) -> dict[str, torch.Tensor]:
    """Canonical name to tensor on the CPU, in its stored dtype; ``Refused`` when the accounting holds errors."""
    accounting.require()
    files = tensor_files(path)
    by_file: dict[Path, list[tuple[str, str]]] = {}
    for name, stored in accounting.claimed.items():
        by_file.setdefault(files[stored], []).append((name, stored))
    tensors: dict[str, torch.Tensor] = {}
    for file, pairs in by_file.items():
        with _opened(file, "pt") as handle:
            tensors |= {name: handle.get_tensor(stored) for name, stored in pairs}
    return tensors
