"""A drafter trained from a shipped one, shipped as what differs: most tensors are the base's and need no second copy.

The shipped folder holds a whole ``config.json``, the tensors that are new or not bit for bit the base's, and
``difference.json``: the name of the base, the checksums of the base's files that it was made from, those of its own
files, which tensors are stored without their all-zero rows, and which as rounded changes of the base's
(see :mod:`dflash_plugins.pairs.rounded`). ``apply_difference`` makes the whole drafter of the two
folders; both come without their reduced head (see :mod:`dflash_plugins.pairs.cut_head`).
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, ValidationError

from dflash_plugins.errors import BadInput, Refused
from dflash_plugins.findings import Finding
from dflash_plugins.pairs.cut_head import VOCABULARY_FILE, copy_card, read_checkpoint, write_checkpoint

if TYPE_CHECKING:
    import torch

DIFFERENCE_FILE = "difference.json"
ROWS_SUFFIX = ".rows"
_OWN = ("config.json", "model.safetensors")
_BASES = ("model.safetensors", VOCABULARY_FILE)


class Difference(BaseModel):
    """``difference.json``. Checksums are SHA-256 in hex by file name; ``zero_rows`` gives a tensor's number of rows.

    Of a tensor in ``rounded`` codes and scales of its change are stored.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    base: str
    base_sha256: Mapping[str, str]
    sha256: Mapping[str, str]
    zero_rows: Mapping[str, int] = {}
    rounded: tuple[str, ...] = ()


def read_difference(folder: Path) -> Difference | None:
    """What ``folder`` says of its base; None when it holds a drafter of its own. BadInput when it cannot be read."""
    path = folder / DIFFERENCE_FILE
    if not path.is_file():
        return None
    try:
        return Difference.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        raise BadInput(f"{path}: not the description of a difference ({error})") from error


def make_difference(drafter: Path, base: Path, name: str, out: Path, *, rounded: bool = False) -> None:
    """Writes to the new folder ``out`` what ``drafter`` has that ``base``, shipped as ``name``, has not.

    Both are whole and without their reduced head. With ``rounded`` changes of the base's matrices take four bits per
    weight, and what ``apply_difference`` makes is not ``drafter`` but near it. BadInput when the base is a difference
    itself, holds a tensor that the drafter lacks, or may propose other tokens.
    """
    from dflash_plugins.pairs.rounded import CODES_SUFFIX, SCALES_SUFFIX, can_round, round_change

    config, tensors = read_checkpoint(drafter)
    _, before = read_checkpoint(base)
    if read_difference(base) is not None:
        raise BadInput(f"{base}: is a difference itself, and a base must be whole")
    if lacking := sorted(before.keys() - tensors.keys()):
        raise BadInput(f"{drafter}: lacks {', '.join(lacking)} of its base, which a difference cannot take away")
    if _vocabulary_bytes(drafter) != _vocabulary_bytes(base):
        raise BadInput(f"{drafter}: may propose other tokens than its base")
    changed = {key: value for key, value in tensors.items() if key not in before or not _same(value, before[key])}
    changes = {key for key in changed if rounded and key in before and can_round(changed[key], before[key])}
    kept, zero_rows = _without_zero_rows({key: value for key, value in changed.items() if key not in changes})
    for key in changes:
        kept[key + CODES_SUFFIX], kept[key + SCALES_SUFFIX] = round_change(changed[key], before[key])
    write_checkpoint(out, config, kept)
    difference = Difference(
        base=name,
        base_sha256=_checksums(base, _BASES),
        sha256=_checksums(out, _OWN),
        zero_rows=zero_rows,
        rounded=tuple(sorted(changes)),
    )
    (out / DIFFERENCE_FILE).write_text(difference.model_dump_json(indent=1) + "\n", encoding="utf-8")
    copy_card(drafter, out)


def require_fitting(folder: Path, base: Path, name: str) -> None:
    """Refused with every file that is not the one ``folder`` was shipped with, its base's files too.

    BadInput when ``folder`` is no difference to the drafter ``name``.
    """
    difference = read_difference(folder)
    if difference is None or difference.base != name:
        raise BadInput(f"{folder}: is not shipped as a difference to {name}")
    found = _wrong_files(folder, difference.sha256, "install the drafter's files again")
    found += _wrong_files(base, difference.base_sha256, f"install the {name} that this difference was made from")
    if found:
        raise Refused(f"drafter {folder.name}, a difference to {name},", found)


def apply_difference(folder: Path, base: Path, out: Path) -> None:
    """Writes to the new folder ``out`` the drafter that ``folder`` is, whole but still without its reduced head.

    Call ``require_fitting`` before: nothing is checked here.
    """
    from dflash_plugins.pairs.rounded import CODES_SUFFIX, SCALES_SUFFIX, with_change

    difference = read_difference(folder)
    if difference is None:
        raise BadInput(f"{folder}: holds no {DIFFERENCE_FILE}")
    config, tensors = read_checkpoint(folder)
    _, whole = read_checkpoint(base)
    own = _with_zero_rows(tensors, difference.zero_rows)
    for key in difference.rounded:
        own[key] = with_change(whole[key], own.pop(key + CODES_SUFFIX), own.pop(key + SCALES_SUFFIX))
    write_checkpoint(out, config, whole | own)
    if (base / VOCABULARY_FILE).is_file():
        shutil.copyfile(base / VOCABULARY_FILE, out / VOCABULARY_FILE)
    copy_card(folder, out)


def sha256(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _checksums(folder: Path, names: tuple[str, ...]) -> dict[str, str]:
    return {name: sha256(folder / name) for name in names if (folder / name).is_file()}


def _wrong_files(folder: Path, expected: Mapping[str, str], mend: str) -> list[Finding]:
    found = []
    for name, checksum in expected.items():
        value = sha256(folder / name) if (folder / name).is_file() else None
        if value != checksum:
            key = f"{folder.name}/{name}"
            message = "is missing" if value is None else f"has another SHA-256 than {checksum}: another file"
            found.append(Finding.error("difference-file", key, value, message, mend))
    return found


def _vocabulary_bytes(folder: Path) -> object:
    path = folder / VOCABULARY_FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and _bits(a).equal(_bits(b))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """uint8 [rows, bytes per row]: 0 and -0 differ, and equal NaNs do not."""
    import torch

    rows = tensor.reshape(tensor.shape[0] if tensor.dim() else 1, -1)
    return rows.contiguous().view(torch.uint8)


def _without_zero_rows(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """A tensor of two dimensions whose rows are mostly zero is stored as the other rows and their numbers."""
    import torch

    kept, counts = {}, {}
    for name, tensor in tensors.items():
        rows = _bits(tensor).any(dim=1).nonzero().flatten()
        if tensor.dim() == 2 and 2 * len(rows) < len(tensor):
            counts[name] = len(tensor)
            kept[name + ROWS_SUFFIX] = rows.to(torch.int32)
            tensor = tensor[rows]
        kept[name] = tensor
    return kept, counts


def _with_zero_rows(tensors: Mapping[str, torch.Tensor], counts: Mapping[str, int]) -> dict[str, torch.Tensor]:
    restored = {name: tensor for name, tensor in tensors.items() if name.removesuffix(ROWS_SUFFIX) not in counts}
    for name, count in counts.items():
        rows = tensors[name]
        whole = rows.new_zeros((count, rows.shape[1]))
        whole[tensors[name + ROWS_SUFFIX].long()] = rows
        restored[name] = whole
    return restored
