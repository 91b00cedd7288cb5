"""Files are written whole or not at all."""

from pathlib import Path

import pytest

from dflash_plugins.errors import BadInput
from dflash_plugins.whole_file import whole_file


def test_a_new_text_takes_the_old_ones_place_and_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "book.yaml"
    path.write_text("old")
    path.chmod(0o664)
    with whole_file(path) as partial:
        partial.write_text("new")
        assert path.read_text() == "old"
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("new", 0o664)
    assert list(tmp_path.iterdir()) == [path]


def write_a_part(path: Path, error: BaseException) -> None:
    with whole_file(path) as partial:
        partial.write_text("ne")
        raise error


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_what_fails_half_way_leaves_what_was_there_and_nothing_else(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "book.yaml"
    path.write_text("old")
    expected = BadInput if isinstance(error, OSError) else type(error)
    with pytest.raises(expected):
        write_a_part(path, error)
    assert (path.read_text(), list(tmp_path.iterdir())) == ("old", [path])
