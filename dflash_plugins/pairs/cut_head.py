"""A drafter with a reduced head, shipped without it: the rows are the target's own and need no second copy.

The shipped folder holds a drafter that uses the target's whole head, and ``draft_vocab.json``, the target ids it was
trained to propose. ``attach_head`` makes the drafter with its own head and id map of it, which drafts faster.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_plugins.errors import BadInput

if TYPE_CHECKING:
    import torch

VOCABULARY_FILE = "draft_vocab.json"
HEAD_TENSORS = ("lm_head.weight", "d2t")


def detach_head(drafter: Path, out: Path) -> None:
    """Writes ``drafter`` to the new folder ``out`` without its reduced head; BadInput when it has none."""
    config, tensors = read_checkpoint(drafter)
    if "draft_vocab_size" not in config or any(name not in tensors for name in HEAD_TENSORS):
        raise BadInput(f"{drafter}: has no reduced head of its own to leave out")
    id_map = tensors["d2t"]
    kept = {name: tensor for name, tensor in tensors.items() if name not in HEAD_TENSORS}
    ids = [row + shift for row, shift in enumerate(id_map.tolist())]
    write_checkpoint(out, {key: value for key, value in config.items() if key != "draft_vocab_size"}, kept)
    (out / VOCABULARY_FILE).write_text(json.dumps({"target_ids": ids}), encoding="utf-8")
    copy_card(drafter, out)


def attach_head(drafter: Path, target: Path, out: Path) -> None:
    """Writes ``drafter`` to the new folder ``out`` with the rows of ``target``'s head that it may propose.

    Raises BadInput when the vocabulary file is not a rising list of ids of the target.
    """
    import torch

    from dflash_plugins.train.initialise import TargetTensors

    ids = torch.tensor(_vocabulary(drafter / VOCABULARY_FILE))
    head = TargetTensors(target).head()
    if int(ids.max()) >= head.shape[0]:
        raise BadInput(f"{drafter / VOCABULARY_FILE}: id {int(ids.max())} is beyond the target's {head.shape[0]} rows")
    config, tensors = read_checkpoint(drafter)
    tensors["lm_head.weight"] = head[ids].to(tensors["fc.weight"].dtype)
    tensors["d2t"] = ids - torch.arange(len(ids))
    write_checkpoint(out, {**config, "draft_vocab_size": len(ids)}, tensors)
    copy_card(drafter, out)


def _vocabulary(path: Path) -> Sequence[int]:
    try:
        ids = json.loads(path.read_text(encoding="utf-8"))["target_ids"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{path}: not a list of target ids ({error})") from error
    rising = isinstance(ids, list) and ids and all(isinstance(i, int) for i in ids) and ids == sorted(set(ids))
    if not rising or ids[0] < 0:
        raise BadInput(f"{path}: target_ids must be different ids in rising order")
    return list(ids)


def read_checkpoint(folder: Path) -> tuple[dict[str, object], dict[str, torch.Tensor]]:
    """The configuration and the tensors of a folder in the released layout."""
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config, load_file(folder / "model.safetensors")


def write_checkpoint(folder: Path, config: dict[str, object], tensors: dict[str, torch.Tensor]) -> None:
    """Writes both to the new folder ``folder``, readable by everybody."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)


def copy_card(source: Path, out: Path) -> None:
    """The model card goes along where there is one."""
    if (source / "README.md").is_file():
        shutil.copyfile(source / "README.md", out / "README.md")
