"""Puts a trained drafter into the data distribution: ``python ci/ship_drafter.py RUN/drafter NAME [--rounded STORE]``.

The reduced head is left out (its rows are the target's own), and where the catalogue names a base, so is every tensor
that is bit for bit the base's. What was shipped under the same name before is replaced, and only once the files that
`models fetch` would make of the new folder are, tensor by tensor, those of the trained drafter.

``--rounded STORE``: changes of the base's matrices take four bits per weight (``pairs/rounded.py``), and the drafter is
what comes of them. It is held against the held-out answers of the feature store STORE once more, and its card has those
figures.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file

from dflash_plugins.errors import BadInput
from dflash_plugins.pairs import resolve
from dflash_plugins.pairs.catalogue import DRAFTERS
from dflash_plugins.pairs.cut_head import attach_head, detach_head
from dflash_plugins.pairs.difference import ROWS_SUFFIX, apply_difference, make_difference, read_difference, sha256
from dflash_plugins.pairs.rounded import CODES_SUFFIX, SCALES_SUFFIX
from dflash_plugins.train.evaluate import held_out_of
from dflash_plugins.train.export import held_out_row

PACKAGE = Path(__file__).resolve().parent.parent / "models" / "dflash_plugins_models"
LIMIT_BYTES = 40_000_000


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("name", choices=DRAFTERS)
    parser.add_argument("--rounded", type=Path, metavar="STORE")
    options = parser.parse_args(arguments)
    drafter = DRAFTERS[options.name]
    try:
        if options.rounded is not None and drafter.base is None:
            raise BadInput(f"--rounded: {drafter.name} is shipped whole, there is no base for its changes")
        folder = ship(options.source, drafter, options.rounded)
    except BadInput as error:
        print(error, file=sys.stderr)
        return 2
    size = size_ever_shipped(PACKAGE)
    print(f"{folder}: all weights ever shipped together {size / 1e6:.1f} MB of {LIMIT_BYTES / 1e6:.0f} MB")
    return 0 if size <= LIMIT_BYTES else 1


def ship(source, drafter, store):
    with tempfile.TemporaryDirectory(dir=PACKAGE) as scratch:
        whole, difference, again, made = (Path(scratch) / name for name in ("whole", "difference", "again", "made"))
        target = resolve(drafter.target)
        detach_head(source, whole)
        new = headless = whole
        if drafter.base is not None:
            make_difference(whole, PACKAGE / drafter.base, drafter.base, difference, rounded=store is not None)
            apply_difference(difference, PACKAGE / drafter.base, again)
            new, headless = difference, again
        attach_head(headless, target, made)
        require_same_tensors(source, made, but=() if new is whole else read_difference(new).rounded)
        if drafter.base is not None:
            if store is not None:
                measure_again(difference, made, target, store)
            add_to_card(difference, PACKAGE / drafter.base, drafter)
        require_no_difference_to_another(new, drafter.name)
        shutil.rmtree(PACKAGE / drafter.name, ignore_errors=True)
        new.rename(PACKAGE / drafter.name)
    return PACKAGE / drafter.name


def measure_again(folder, made, target, store):
    """The held-out figures in the card of ``folder`` become those of the drafter ``made`` of it."""
    card = folder / "README.md"
    if not card.is_file():
        return
    text, rows = card.read_text(encoding="utf-8"), {int(row.split("|")[1]): row for row in held_out_rows(folder)}
    for k, found in held_out_of(made, target, store, list(rows)).items():
        new = held_out_row(k, found.emitted_per_round, found.accepted_by_slot, found.rounds)
        text = text.replace(rows[k], new)
    text = (
        text.rstrip("\n")
        + "\nThe figures of held-out answers are those of the drafter as it is shipped, after rounding.\n"
    )
    card.write_text(text, encoding="utf-8")


def add_to_card(folder, base, drafter):
    """What is shipped, and the held-out figures beside the base's; a drafter without a card gets none."""
    card = folder / "README.md"
    if not card.is_file():
        return
    own, others = held_out_rows(folder), held_out_rows(base)
    tensors = load_file(folder / "model.safetensors")
    megabytes = (folder / "model.safetensors").stat().st_size / 1e6
    parts = (ROWS_SUFFIX, SCALES_SUFFIX)
    names = sorted(name.removesuffix(CODES_SUFFIX) for name in tensors if not name.endswith(parts))
    rounded = read_difference(folder).rounded
    how = f", {len(rounded)} of them as changes of 4 bits per weight" if rounded else " in bfloat16"
    lines = [
        "",
        f"## Beside its base, `{drafter.base}`",
        "",
        "| drafter | K | emitted per round | accepted by slot | rounds |",
        "|---|---|---|---|---|",
        *(f"| {name} {row}" for name, rows in ((drafter.name, own), (drafter.base, others)) for row in rows),
        "",
        f"Shipped as a difference to it: {len(names)} tensors{how}, {megabytes:.2f} MB. The others are its own.",
        "",
        *(f"- `{name}`" for name in names),
    ]
    with card.open("a", encoding="utf-8") as handle:
        handle.write("\n".join(lines) + "\n")


def held_out_rows(folder):
    """The lines of a card's table that begin with K."""
    card = folder / "README.md"
    lines = card.read_text(encoding="utf-8").splitlines() if card.is_file() else []
    return [line for line in lines if re.match(r"\| \d+ \| \d+\.\d+ \|", line)]


def require_same_tensors(source, made, but):
    before, after = load_file(source / "model.safetensors"), load_file(made / "model.safetensors")
    differing = [
        name
        for name in sorted(before.keys() | after.keys())
        if name not in before or name not in after or not (name in but or torch.equal(before[name], after[name]))
    ]
    if differing:
        raise BadInput(f"{source}: fetched again it would differ in {', '.join(differing)}; is its head the target's?")


def require_no_difference_to_another(new, name):
    """A base that changes leaves its differences without the file that they were made from."""
    for folder in sorted(path for path in PACKAGE.iterdir() if path.name in DRAFTERS):
        difference = read_difference(folder)
        if difference is not None and difference.base == name:
            for file, checksum in difference.base_sha256.items():
                if sha256(new / file) != checksum:
                    raise BadInput(f"{folder.name} is a difference to the {name} shipped so far: remove it first")


def size_ever_shipped(package):
    """Bytes of all weights below ``package``: those in the history of this branch, and those that lie there now."""
    pattern = f":(glob){package.name}/*/model.safetensors"
    log = git(package.parent, "log", "--format=", "--raw", "--no-abbrev", "--no-renames", "--", pattern)
    shipped = {line.split()[3] for line in log.splitlines()} - {"0" * 40}
    sizes = {blob: int(git(package.parent, "cat-file", "-s", blob)) for blob in shipped}
    for path in package.glob("*/model.safetensors"):
        sizes[git(package.parent, "hash-object", str(path)).strip()] = path.stat().st_size
    return sum(sizes.values())


def git(folder, *arguments):
    return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True).stdout  # noqa: S603, S607


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
