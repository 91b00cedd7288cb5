"""What a row says of the environment it ran in, read from the metadata of what is installed; nothing is imported."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution, version
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from dflash_plugins import __version__
from dflash_plugins.engines import engine_facts, parse_version
from dflash_plugins.errors import BadInput, EngineMissing
from dflash_plugins.hardware import gpu_memory
from dflash_plugins.matrix.plan import Place
from dflash_plugins.matrix.rows import RowEngine
from dflash_plugins.pairs.fetch import cache_root

KERNELS = (
    "triton",
    "sgl-kernel",
    "flashinfer-python",
    "flash-attn",
    "xgrammar",
    "compressed-tensors",
    "apache-tvm-ffi",
)
STAND_INS = "dflash-plugins-sglang-cpu-stubs"
_COMMIT = re.compile(r"commit_id\s*=\s*['\"]g?([0-9a-f]{7,40})['\"]")
_CHECKOUT = Path(__file__).resolve().parents[2]


def installed_engine(place: Place) -> RowEngine:
    """The engine of this environment; ``EngineMissing``, or ``BadInput`` where it is not the one that is planned."""
    names = [name for name in engine_facts(place.engine).distributions if version_of(name)]
    if not names:
        raise EngineMissing(f"{place.engine} is not installed in this environment, which {place.environment} should be")
    found = str(version_of(names[0]))
    parsed = parse_version(found)
    if parsed is None or parsed.public != place.version:
        raise BadInput(f"{place.engine} {found} is installed here, the plan asks for {place.version}")
    # ci/in-env gives vLLM's CPU build a second name, whose metadata ask for nothing.
    overridden = tuple(sorted({said for name in names for said in unmet(name)}))
    return RowEngine(
        name=place.engine,
        version=found,
        commit=_commit(place.engine, parsed.local),
        runner=place.runner,
        torch=version_of("torch") or "none",
        transformers=version_of("transformers") or "none",
        kernels={name: found for name in KERNELS if (found := version_of(name) or "")},
        pins="overridden" if overridden else "met",
        overridden=overridden,
        stubs=stand_ins(),
        plugin=__version__,
    )


def version_of(name: str) -> str | None:
    """Of an installed distribution."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def unmet(name: str) -> Iterator[str]:
    """Requirements of a distribution that are installed in another version than it asks for."""
    for line in distribution(name).requires or ():
        try:
            wanted = Requirement(line)
        except InvalidRequirement:
            continue
        here = None if wanted.marker and not wanted.marker.evaluate({"extra": ""}) else version_of(wanted.name)
        if here is not None and not wanted.specifier.contains(here, prereleases=True):
            yield f"{wanted.name} {here} for {wanted.specifier}"


def stand_ins() -> tuple[str, ...]:
    """Packages in whose place something of ours was imported."""
    try:
        packages = (distribution(STAND_INS).read_text("top_level.txt") or "").split()
    except PackageNotFoundError:
        return ()
    return tuple(sorted(name for name in packages if name != "sglang_cpu_stubs"))


def _commit(engine: str, local: str | None) -> str | None:
    """As the version says it (``+g6f7df92a8``), or the file that the build wrote beside it."""
    if local and (said := re.search(r"(?:^|\.)g([0-9a-f]{7,40})", local)):
        return said[1]
    spec = find_spec(engine)
    places = [Path(one) for one in (spec.submodule_search_locations or ())] if spec else []
    texts = [(place / "_version.py").read_text("utf-8") for place in places if (place / "_version.py").is_file()]
    return next((found[1] for text in texts if (found := _COMMIT.search(text))), None)


def hardware() -> str:
    """System, processor and cores that this process may use; the largest GPU by its memory."""
    memory = gpu_memory()
    gpu = "" if memory is None else f", GPU of {memory[0]:.0f} GiB"
    return f"{platform.system()} {platform.machine()}, {len(os.sched_getaffinity(0))} cores{gpu}"


def without_paths(text: str) -> str:
    """``text`` with paths of this machine named as anybody would: the cache, the checkout, the home."""
    known = {str(cache_root().resolve()): "~/.cache/dflash-plugins", str(_CHECKOUT): ".", str(Path.home()): "~"}
    for path, name in known.items():
        text = text.replace(path, name)
    return text
