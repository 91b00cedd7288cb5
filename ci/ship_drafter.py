"""Puts a trained drafter into the data distribution: ``python ci/ship_drafter.py RUN/drafter NAME``.

The reduced head is left out (its rows are the target's own), the list of its ids goes in. What was shipped under the
same name before is replaced, and only once the new folder is whole.
"""

import shutil
import sys
import tempfile
from pathlib import Path

from dflash_plugins.errors import BadInput
from dflash_plugins.pairs.catalogue import DRAFTERS
from dflash_plugins.pairs.cut_head import detach_head

PACKAGE = Path(__file__).resolve().parent.parent / "models" / "dflash_plugins_models"
LIMIT_BYTES = 40_000_000


def main(arguments):
    if len(arguments) != 2 or arguments[1] not in DRAFTERS:
        print(f"usage: {__doc__.splitlines()[0]}; names: {', '.join(DRAFTERS)}", file=sys.stderr)
        return 2
    source, name = Path(arguments[0]), arguments[1]
    with tempfile.TemporaryDirectory(dir=PACKAGE) as scratch:
        try:
            detach_head(source, Path(scratch) / name)
        except BadInput as error:
            print(error, file=sys.stderr)
            return 2
        shutil.rmtree(PACKAGE / name, ignore_errors=True)
        (Path(scratch) / name).rename(PACKAGE / name)
    size = sum(path.stat().st_size for path in PACKAGE.rglob("*.safetensors"))
    print(f"{PACKAGE / name}: all drafters together {size / 1e6:.1f} MB of {LIMIT_BYTES / 1e6:.0f} MB")
    return 0 if size <= LIMIT_BYTES else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
