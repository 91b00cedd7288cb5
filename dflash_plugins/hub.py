"""Where a model named by a user lies: a folder, an embedded model, or the headers of one on the Hugging Face hub.

Of the hub only metadata are fetched: configuration, tokenizer, and the headers of the tensor files, at one commit. They
are laid out as a folder whose tensor files end with their headers, so that whatever reads a folder reads them. No code
of a repository is ever run.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dflash_plugins.errors import BadInput
from dflash_plugins.headers import INDEX, headers_only
from dflash_plugins.pairs import DRAFTERS, TARGETS, resolve
from dflash_plugins.pairs.difference import sha256
from dflash_plugins.pairs.fetch import cache_root

FILES = ("config.json", "generation_config.json", "tokenizer.json", "vocab.json", "added_tokens.json", INDEX)
HASHED = "weights-"
"""Begins what stands for the weights of a folder, where those of the hub have a commit."""
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
Report = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Model:
    """A model as an engine is told of it (``name``, and the commit it is pinned to), and the folder to read it from.

    ``label`` is what people and the compatibility matrix call it.
    """

    name: str
    folder: Path
    revision: str | None = None
    embedded: str | None = None

    @property
    def label(self) -> str:
        """Its embedded name where it has one, else the name an engine is told."""
        return self.embedded or self.name

    @classmethod
    def told(cls, name: str, revision: str | None, folder: Path | None = None) -> Model:
        """A model as an engine was told of it, and where it lies; a branch or a tag does not say which commit it is."""
        commit = revision if re.fullmatch(r"[0-9a-f]{40}", revision or "") else None
        return cls(name, Path(name) if folder is None else folder, commit)

    def files(self) -> list[Path]:
        """Its tensor files."""
        return sorted(self.folder.glob("*.safetensors"))

    @cached_property
    def weights(self) -> str | None:
        """What says which weights these are: the commit, or ``weights-`` and a hash of the tensor files' contents.

        None where there is neither. Files are read whole: one to two seconds per GB.
        """
        if self.revision is not None:
            return self.revision
        files = self.files()
        if not files or headers_only(self.folder):
            return None
        digest = hashlib.sha256()
        for path in files:
            digest.update(f"{path.name} {sha256(path)}\n".encode())
        return f"{HASHED}{digest.hexdigest()[:16]}"


def locate(name: str, *, report: Report | None = None) -> Model:
    """The model behind a folder, an embedded name, or an id of the hub (``ORG/NAME`` or ``ORG/NAME@REVISION``).

    A folder wins over a name. Raises ``BadInput`` where it is none of them, or where the hub cannot be asked.
    """
    path = Path(name).expanduser()
    identity, _, revision = name.partition("@")
    embedded = name if name in (*TARGETS, *DRAFTERS) and not path.exists() else None
    if path.exists() or embedded or not _ID.fullmatch(identity):
        folder = resolve(name, report=report)
        return Model(str(folder), folder, embedded=embedded)
    if report is not None:
        report(f"reading the headers of {identity}", 0, 0)
    return _from_hub(identity, revision or None)


def _from_hub(identity: str, revision: str | None) -> Model:
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        said = "and asking the hub needs huggingface_hub, which is missing here: install dflash-plugins[hub]"
        raise BadInput(f"{identity!r} is no folder here, {said}") from error
    try:
        api = HfApi()
        about = api.model_info(identity, revision=revision)
        commit = str(about.sha)
        folder = cache_root() / "headers" / identity.replace("/", "--") / commit
        if not (folder / "config.json").is_file():
            names = [str(entry.rfilename) for entry in about.siblings or ()]
            _lay_out(api, identity, commit, names, folder)
    except BadInput:
        raise
    except Exception as error:  # of the network, of the hub, of its library: all say that nothing can be read
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        where = f"{identity}@{revision}" if revision else identity
        message = f"{where!r} is no folder here, and the hub does not give its metadata: {reason}"
        raise BadInput(f"{message}; give a folder, or unset HF_HUB_OFFLINE where it is set") from error
    return Model(identity, folder, commit)


def _lay_out(api: Any, identity: str, commit: str, names: Iterable[str], folder: Path) -> None:
    """Fill ``folder``, which appears whole or not at all."""
    names = list(names)
    if "config.json" not in names:
        raise BadInput(f"{identity!r} on the hub holds no config.json")
    tensors = [name for name in names if name.endswith(".safetensors") and "/" not in name]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as workshop:
        new = Path(workshop) / "new"
        new.mkdir()
        for name in (name for name in FILES if name in names):
            shutil.copyfile(api.hf_hub_download(identity, name, revision=commit), new / name)
        if "mask_embedding.pt" in names:
            (new / "mask_embedding.pt").touch()  # that it is there is all that is ever read
        for name in tensors:
            header = _header(api.parse_safetensors_file_metadata(identity, name, revision=commit))
            (new / name).write_bytes(len(header).to_bytes(8, "little") + header)
        if not folder.exists():
            new.rename(folder)


def _header(metadata: Any) -> bytes:
    """The header of a file as its own library would write it."""
    entries = {
        name: {"dtype": str(t.dtype), "shape": list(t.shape), "data_offsets": list(t.data_offsets)}
        for name, t in metadata.tensors.items()
    }
    return json.dumps(entries, separators=(",", ":")).encode()
