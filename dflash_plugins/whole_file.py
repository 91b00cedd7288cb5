"""Writing a file whole or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from dflash_plugins.errors import BadInput


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A name beside ``path`` to write to, which takes its place once it is written; BadInput where that fails.

    What was at ``path`` before stays until then, and stays where it fails. The new file gets the old one's mode. One
    writer at a time: callers that may meet lock a file of their own.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        if path.exists():
            partial.chmod(path.stat().st_mode)
        partial.replace(path)
    except (OSError, SafetensorError) as error:
        raise BadInput(f"{path} cannot be written, and is left as it was: {error}") from error
    finally:
        partial.unlink(missing_ok=True)
