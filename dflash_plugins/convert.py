"""A drafter from one published layout into the other, with every key, tensor and file accounted for."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict

from dflash_plugins.check import inspect_pair
from dflash_plugins.checkpoint import account, directory_of, load_tensors, new_checkpoint, read_header, write_checkpoint
from dflash_plugins.config import DraftConfig, read_draft_config, to_flat, to_nested
from dflash_plugins.config_places import IGNORED_KEYS, PLACES, collect, config_file, leaves, read_json
from dflash_plugins.engines import ENGINES
from dflash_plugins.errors import BadInput, DFlashPluginsError
from dflash_plugins.findings import Finding, Severity

if TYPE_CHECKING:
    from rich.console import Console

LAYOUTS = {"released": to_nested, "speculators": to_flat}
_CARRIED = (".json", ".jinja", ".md", ".txt", ".model")
_CANONICAL = {path: key for key, places in PLACES.items() for path, _ in places}


class Key(BaseModel):
    """One key of the old config.json.

    ``fate``: ``written`` (``places`` say where), ``implied`` (read; the new file says it by other keys, or it is
    neutral), ``idle`` (changes nothing that is computed, not carried), ``unknown`` (read by nobody here, not carried).
    """

    model_config = ConfigDict(frozen=True)

    key: str
    value: Any
    fate: Literal["written", "implied", "idle", "unknown"]
    places: tuple[str, ...] = ()


class ConvertReport(BaseModel):
    """Where the drafter is, and what became of everything in the old folder. ``tensors`` maps old names to new ones."""

    model_config = ConfigDict(frozen=True)

    path: str
    layout: str
    method: str
    keys: tuple[Key, ...]
    tensors: dict[str, str]
    files: tuple[str, ...]
    files_left: tuple[str, ...]
    findings: tuple[Finding, ...]

    @property
    def exit_code(self) -> int:
        """0: what cannot be converted is refused."""
        return 0

    def render(self, console: Console) -> None:
        """What is new, what was not carried, and what to know of the new layout."""
        lines = [f"{self.path}: {self.method} in the {self.layout} layout, {len(self.tensors)} tensors"]
        lines += [f"  {key.key} -> {', '.join(key.places)}" for key in self.keys if key.fate == "written"]
        for fate, what in (
            ("implied", "said by other keys"),
            ("idle", "left, no effect"),
            ("unknown", "left, unknown"),
        ):
            if names := [key.key for key in self.keys if key.fate == fate]:
                lines.append(f"  {what}: {', '.join(names)}")
        if self.files_left:
            lines.append(f"  files left: {', '.join(self.files_left)}")
        lines += [f"{one.severity}: {one}" for one in self.findings]
        for line in lines:
            console.print(line, markup=False, highlight=False, soft_wrap=True)


def convert(source: Path, out: Path, layout: str) -> ConvertReport:
    """Write the drafter in ``source`` to the new folder ``out`` in ``layout``, ``released`` or ``speculators``.

    Tensors keep their dtype and every bit. The new config.json is read back and must describe the same drafter.
    Raises ``Refused`` with every reason for a drafter that is not usable, ``BadInput`` for what a layout cannot say.
    """
    if layout not in LAYOUTS:
        raise BadInput(f"--to {layout}: known are {', '.join(LAYOUTS)}")
    report = inspect_pair(source)
    config = report.require()
    if layout == "speculators" and config.loop is not None:
        raise BadInput("the speculators layout has no D-Loop: convert to released, or train a drafter without a loop")
    folder = directory_of(source)
    accounting = account(config, read_header(folder), subject=report.subject)
    new = LAYOUTS[layout](config)
    with new_checkpoint(out, overwrite=False) as workshop:
        carried, left = _carry(folder, workshop)
        write_checkpoint(workshop, new, load_tensors(folder, accounting))
        _require_same(workshop, config, layout)
    return ConvertReport(
        path=str(out),
        layout=layout,
        method=config.method,
        keys=tuple(_fates(read_json(config_file(source, "drafter")), new)),
        tensors={stored: name for name, stored in accounting.claimed.items()},
        files=tuple(carried),
        files_left=tuple(left),
        findings=tuple(_warnings(out)),
    )


def _carry(folder: Path, workshop: Path) -> tuple[list[str], list[str]]:
    """Copies what belongs to a tokenizer or a reader; names of those, and of what is neither this nor a tensor file."""
    carried, left = [], []
    for path in sorted(folder.iterdir()):
        if path.name == "config.json" or ".safetensors" in path.name:
            continue
        if path.is_file() and path.suffix in _CARRIED:
            shutil.copy2(path, workshop / path.name)
            carried.append(path.name)
        else:
            left.append(path.name)
    return carried, left


def _require_same(workshop: Path, config: DraftConfig, layout: str) -> None:
    found = read_draft_config(workshop).require().model_dump()
    differing = [key for key, value in config.model_dump().items() if found[key] != value]
    if differing:
        raise DFlashPluginsError(
            f"the {layout} layout does not say the same {', '.join(differing)}: nothing is written"
        )


def _fates(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Key]:
    written = collect(new)
    for path, value in leaves(old):
        canonical = _CANONICAL.get(path)
        if canonical is None:
            idle = path.rpartition(".")[2] in IGNORED_KEYS
            yield Key(key=path, value=value, fate="idle" if idle else "unknown")
            continue
        places = tuple(entry.path for entry in written.get(canonical, ()))
        yield Key(key=path, value=value, fate="written" if places else "implied", places=places)


def _warnings(out: Path) -> Iterator[Finding]:
    """What either engine as shipped makes of the new layout, said once."""
    seen = set()
    for engine in ENGINES:
        for one in inspect_pair(out, engine=engine).findings:
            if one.severity is not Severity.INFO and one not in seen:
                seen.add(one)
                yield one
