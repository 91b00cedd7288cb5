"""Runs engine jobs in processes of their own, with the plugin visible as an installed distribution would make it."""

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import sglang_watch

# What stands in them fails as clearly as in a test module.
pytest.register_assert_rewrite("core_drafts", "http_cases")

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def write_distribution(site: Path) -> Path:
    """Metadata with the entry points of pyproject.toml, so that the checkout need not be installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = site / "dflash_plugins-0.0.0.dist-info"
    info.mkdir(parents=True)
    info.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: dflash-plugins\nVersion: 0.0.0\n")
    groups = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
        for group, entries in project["entry-points"].items()
    ]
    info.joinpath("entry_points.txt").write_text("\n".join(groups))
    return site


@contextmanager
def visible_plugin(base: Path) -> Iterator[None]:
    """The checkout as an installed distribution, for processes started within; one thread each."""
    with pytest.MonkeyPatch.context() as patch:
        paths = [str(write_distribution(base / "site")), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture
def plain(servers):
    """Of the ``servers`` of a module that asks over HTTP, the one that serves the target alone."""
    return servers[0]


@pytest.fixture
def loop(servers):
    """The one that serves D-Loop."""
    return servers[1]


@pytest.fixture(scope="session")
def run_job(tmp_path_factory):
    """``run_job(name, **arguments)`` runs a job of engine_jobs.py, or of another ``script`` beside it.

    Returns what the job wrote, its log beside it.
    """
    pytest.importorskip("vllm")
    base = tmp_path_factory.mktemp("jobs")
    site = write_distribution(base / "site")
    paths = [str(site), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = {
        "PYTHONPATH": os.pathsep.join(paths),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }

    return jobs(base, settings, "engine_jobs.py")


@pytest.fixture(scope="session")
def run_sglang(tmp_path_factory):
    """``run_sglang(name, **arguments)`` runs a job of sglang_jobs.py, or of another ``script``; as ``run_job``.

    With ``watch=True`` the result holds ``rounds``, what ``sglang_watch`` wrote down.
    """
    pytest.importorskip("sglang")
    base = tmp_path_factory.mktemp("jobs")
    site = write_distribution(base / "site")
    sglang_watch.write_distribution(site)
    paths = [str(site), str(HERE), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = {
        "PYTHONPATH": os.pathsep.join(paths),
        "SGLANG_USE_CPU_ENGINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    run = jobs(base, settings, "sglang_jobs.py")

    def watched(name, *, watch=False, environment=None, **arguments):
        if not watch:
            return run(name, environment=environment, **arguments)
        file = base / f"watch-{len(list(base.iterdir()))}.jsonl"
        result = run(name, environment=(environment or {}) | {"SGLANG_WATCH": str(file)}, **arguments)
        lines = file.read_text().splitlines() if file.exists() else []
        return result | {"rounds": [json.loads(line) for line in lines]}

    return watched


def jobs(base, settings, usual):
    """A function that runs a job of a script beside this file in a process of its own."""

    def run(name, *, script=usual, environment=None, check=True, **arguments):
        out = base / f"{name}-{len(list(base.iterdir()))}.json"
        argv = [
            sys.executable,
            str(HERE / script),
            name,
            json.dumps(arguments | {"out": str(out)}, default=str),
        ]
        done = subprocess.run(
            argv, env=os.environ | settings | (environment or {}), capture_output=True, text=True, timeout=900
        )
        log = done.stdout + done.stderr
        if check and done.returncode:
            pytest.fail(f"job {name} ended with {done.returncode}:\n{log[-6000:]}", pytrace=False)
        return (json.loads(out.read_text()) if out.exists() else {}) | {"log": log, "returncode": done.returncode}

    return run
