"""Headers of safetensors files: names, dtypes and shapes of tensors, without a byte of their data.

A file that ends with its header, holding none of the data it announces, is a header that was fetched or written alone:
everything but the numbers can be checked with it. A file that holds a part of its data is a broken one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_plugins.config_places import read_json
from dflash_plugins.errors import BadInput

Header = dict[str, tuple[str, tuple[int, ...]]]
"""Stored name to (dtype as safetensors spells it, shape)."""

INDEX = "model.safetensors.index.json"
LONGEST_HEADER = 100_000_000
_LONGEST_POINTER = 1024
BITS: Mapping[str, int] = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64,
    "C64": 64,
}  # fmt: skip


@dataclass(frozen=True)
class HeaderFile:
    """One file: its ``tensors``, the bytes of ``data`` it announces, and whether they are ``whole`` (or all absent)."""

    tensors: Header
    data: int
    whole: bool


def directory_of(path: Path | str) -> Path:
    """The folder of a checkpoint that is named by it or by a file in it."""
    path = Path(path)
    return path.parent if path.is_file() else path


def tensor_files(path: Path | str) -> dict[str, Path]:
    """Stored name to file, for a directory (single file or sharded index) or one safetensors file."""
    return {name: file for file, content in _read(path).items() for name in content.tensors}


def read_header(path: Path | str) -> Header:
    """Every tensor of a checkpoint; ``BadInput`` naming the file when it is truncated or none."""
    return {name: entry for content in _read(path).values() for name, entry in content.tensors.items()}


def headers_only(path: Path | str) -> bool:
    """Whether a checkpoint consists of headers alone. Raises as ``read_header``."""
    return not all(content.whole for content in _read(path).values())


def stored_bytes(header: Header) -> int:
    """Bytes of all tensors of a header."""
    return sum(math.prod(shape) * BITS[dtype] // 8 for dtype, shape in header.values())


def _read(path: Path | str) -> dict[Path, HeaderFile]:
    path = Path(path)
    if not path.exists():
        raise BadInput(f"checkpoint: {path} does not exist")
    if path.is_file():
        return {path: read_file(path)}
    if (path / INDEX).is_file():
        return _sharded(path)
    found = sorted(path.glob("*.safetensors"))
    if len(found) != 1:
        other = [p.name for p in sorted(path.glob("*.bin"))]
        said = f"; {other[0]} is a pickle and is not read" if other else ""
        raise BadInput(f"checkpoint: {path} holds {len(found)} safetensors files and no {INDEX}{said}")
    return {found[0]: read_file(found[0])}


def _sharded(directory: Path) -> dict[Path, HeaderFile]:
    index = directory / INDEX
    weights = read_json(index).get("weight_map")
    if not isinstance(weights, dict) or not all(isinstance(v, str) for v in weights.values()):
        raise BadInput(f"{index} has no weight_map from tensor to file")
    files = {name: directory / Path(name).name for name in set(weights.values())}
    stray = sorted(name for name, file in files.items() if name != file.name or not file.is_file())
    if stray:
        raise BadInput(f"{index} names files that are not beside it: {', '.join(stray)}")
    contents = {file: read_file(file) for file in sorted(files.values())}
    stored = {tensor: file for file, content in contents.items() for tensor in content.tensors}
    differing = sorted(stored.keys() ^ weights.keys()) or [t for t in stored if stored[t] != files[weights[t]]]
    if differing:
        raise BadInput(f"{index} and the files disagree about {', '.join(differing[:8])}")
    return contents


def read_file(file: Path) -> HeaderFile:
    """The header of one file; ``BadInput`` naming it when header and size do not fit together."""
    try:
        with file.open("rb") as stream:
            size = file.stat().st_size
            start = stream.read(8)
            length = int.from_bytes(start, "little")
            if start == b"version " and size < _LONGEST_POINTER:
                raise ValueError("it is a Git LFS pointer, fetch the file itself (git lfs pull)")
            if size < 8 or length > min(size - 8, LONGEST_HEADER):
                raise ValueError(f"it announces a header of {length} bytes and has {size}")
            content = parse_header(json.loads(stream.read(length)))
        return HeaderFile(*content, whole=_whole(content[1], size - 8 - length))
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"{file} is no complete safetensors file: {error}") from error


def _whole(announced: int, there: int) -> bool:
    if there not in (0, announced):
        raise ValueError(f"it announces {announced} bytes of data and holds {there}")
    return there == announced


def parse_header(document: Any) -> tuple[Header, int]:
    """Tensors and bytes of data of a header's JSON; ``ValueError`` where one overlaps, is left out or is not known."""
    if not isinstance(document, dict):
        raise ValueError("its header is no JSON object")
    places = {}
    header: Header = {}
    for name, entry in document.items():
        if name != "__metadata__":
            header[name], places[name] = _entry(name, entry)
    end = 0
    for name in sorted(places, key=lambda one: places[one]):
        begin, stop = places[name]
        if begin != end:
            raise ValueError(f"{name} begins at byte {begin} of the data, expected {end}")
        end = stop
    return header, end


def _entry(name: str, entry: Any) -> tuple[tuple[str, tuple[int, ...]], tuple[int, int]]:
    entry = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    known = isinstance(dtype, str) and dtype in BITS
    if not known or not _sizes(shape) or not _sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"{name} has no known dtype, shape and place: {str(entry)[:120]}")
    begin, stop = offsets
    if (stop - begin) * 8 != math.prod(shape) * BITS[dtype]:
        raise ValueError(f"{name} takes {stop - begin} bytes, which is not {dtype} of shape {shape}")
    return (dtype, tuple(shape)), (begin, stop)


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 2**63 for size in value)
