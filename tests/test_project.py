"""The project as a whole: what it depends on, what importing it loads, what its files may hold."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ENGINES = ("vllm", "sglang")
ADAPTERS = ("vllm_ext", "sglang_ext")
TOP_LEVEL = {
    *(".ci", ".gitignore", "LICENSE", "Makefile", "README.md", "compat_matrix.yaml", "pyproject.toml"),
    *("benchmarks", "ci", "dflash_plugins", "docs", "models", "sglang_ext", "tests", "vllm_ext"),
}
# In pieces, so that this file does not find itself.
HOSTS = ("pypi" + ".org", "python" + "hosted", "pytorch" + ".org", "deb.debian" + ".org", "npmjs" + ".org")
MACHINE_PATHS = re.compile(
    "(?<![A-Za-z0-9_.~$}-])/(" + "work|" + "root|" + "tmp|" + "opt/pypi|" + "opt/wheels" + r")(/|\b)"
)
WITHOUT_TORCH = (
    *("check", "serve", "hub", "rules", "pair", "served", "memory", "settings", "report", "headers", "engines.limits"),
    *("errors", "findings", "config", "stopping", "alignment", "cycle", "engines", "driver", "prove", "demo", "cli"),
    *("matrix", "matrix.run", "matrix.table", "matrix.cell", "cli_matrix", "probe", "parent", "suspects", "bench"),
    *("bench_report", "page", "pairs", "pairs.fetch", "pairs.prompts", "pairs.catalogue", "pairs.gguf_llama"),
)


def git(repository: Path, *arguments: str) -> list[str]:
    result = subprocess.run(["git", *arguments], cwd=repository, check=True, capture_output=True, text=True)
    return result.stdout.splitlines()


@pytest.fixture(scope="module")
def tracked(repository) -> list[Path]:
    return [repository / name for name in git(repository, "ls-files") if (repository / name).is_file()]


def requirements(repository: Path) -> dict[str, list[Requirement]]:
    """Of the main distribution, by extra; the unconditional ones under the empty name."""
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    return {name: [Requirement(line) for line in lines] for name, lines in groups.items()}


def test_no_requirement_names_an_engine(repository):
    for group in requirements(repository).values():
        assert not [r for r in group if r.name.lower().replace("_", "-").startswith(ENGINES)]


def test_nothing_is_capped(repository):
    """An upper bound, a pin or an exclusion would make pip change an engine's environment."""
    for group in requirements(repository).values():
        assert [s for r in group for s in r.specifier if s.operator not in (">=", ">")] == []


def test_plain_installation_asks_for_no_framework(repository):
    names = {requirement.name for requirement in requirements(repository)[""]}
    assert not names & {"torch", "transformers", "numpy", "accelerate"}


def test_the_models_are_data_and_nobody_depends_on_them(repository):
    models = tomllib.loads((repository / "models" / "pyproject.toml").read_text())["project"]
    assert not models.get("dependencies")
    assert all("models" not in r.name for group in requirements(repository).values() for r in group)
    code = [p for p in (repository / "models").rglob("*.py") if p.name != "__init__.py" and "build" not in p.parts]
    assert code == []


def test_all_shipped_drafters_stay_below_forty_megabytes(repository):
    weights = list((repository / "models").glob("dflash_plugins_models/*/model.safetensors"))
    assert sum(path.stat().st_size for path in weights) <= 40e6


def test_the_core_loads_neither_engine_nor_adapter(python):
    script = f"""
import pkgutil, sys, importlib, dflash_plugins
for module in pkgutil.walk_packages(dflash_plugins.__path__, "dflash_plugins."):
    importlib.import_module(module.name)
print(sorted(name for name in {(*ENGINES, *ADAPTERS)!r} if name in sys.modules))
"""
    result = python("-c", script)
    assert (result.stdout.strip(), result.returncode) == ("[]", 0), result.stderr


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_modules_that_need_no_torch_do_not_load_it(python, repository, module):
    result = python("-c", f"import sys, dflash_plugins.{module}; print('torch' in sys.modules)")
    assert (result.stdout.strip(), result.returncode) == ("False", 0), result.stderr


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_plugin_modules_load_no_engine(python, adapter):
    names = (*ENGINES, "torch")
    result = python("-c", f"import sys, {adapter}.plugin; print(sorted(n for n in {names!r} if n in sys.modules))")
    assert (result.stdout.strip(), result.returncode) == ("[]", 0), result.stderr


def test_entry_points_exist(repository, python):
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    groups = project["entry-points"]
    assert {"vllm.general_plugins", "sglang.srt.plugins", "dflash_plugins.drivers"} <= set(groups)
    targets = [value for group in groups.values() for value in group.values()] + list(project["scripts"].values())
    script = """
import importlib, sys
for target in sys.argv[1:]:
    module, attribute = target.split(":")
    assert callable(getattr(importlib.import_module(module), attribute)), target
"""
    result = python("-c", script, *targets)
    assert result.returncode == 0, result.stderr


def test_the_top_level_is_fixed(repository):
    assert {name.split("/")[0] for name in git(repository, "ls-files")} <= TOP_LEVEL


def test_no_file_names_a_registry_host_or_a_path_of_a_machine(tracked, repository):
    found = []
    for path in tracked:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # weights
        for number, line in enumerate(text.splitlines(), 1):
            if any(host in line for host in HOSTS) or MACHINE_PATHS.search(line):
                found.append(f"{path.relative_to(repository)}:{number}: {line.strip()[:100]}")
    assert found == []


def test_every_python_version_promise_agrees(repository):
    main = tomllib.loads((repository / "pyproject.toml").read_text())
    models = tomllib.loads((repository / "models" / "pyproject.toml").read_text())
    assert main["project"]["requires-python"] == models["project"]["requires-python"] == ">=3.11"
    assert main["project"]["license"] == models["project"]["license"] == "Apache-2.0"
    assert "Apache License" in (repository / "LICENSE").read_text()


def exported(repository: Path, folder: Path) -> Path:
    """A copy of the tracked files: building in the checkout would leave build folders in it."""
    for name in git(repository, "ls-files"):
        if (repository / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(repository / name, folder / name)
    return folder


@pytest.mark.engine
@pytest.mark.slow
def test_installing_into_an_engines_environment_changes_no_package(repository, tmp_path):
    copy = tmp_path / "environment"
    # Hard links: pip replaces files and never writes into one that is there.
    subprocess.run(["cp", "-al", sys.prefix, str(copy)], check=True)
    clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    clean |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONNOUSERSITE": "1"}

    def pip(*arguments: str) -> list[str]:
        command = [str(copy / "bin" / "python"), "-m", "pip", *arguments]
        result = subprocess.run(command, env=clean, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        return result.stdout.splitlines()

    before = set(pip("freeze", "--all"))
    assert any(line.startswith("vllm") for line in before)
    pip("install", "--no-compile", str(exported(repository, tmp_path / "source")))
    after = set(pip("freeze", "--all"))
    assert before - after == set()
    assert [line.split(" ")[0].split("==")[0] for line in after - before] == ["dflash-plugins"]
    script = "import importlib.metadata as m; print([p.value for p in m.entry_points(group='vllm.general_plugins')])"
    found = subprocess.run(
        [copy / "bin" / "python", "-c", script], env=clean, cwd=tmp_path, capture_output=True, text=True
    )
    assert "vllm_ext.plugin:register" in found.stdout
    shipped = copy.glob("lib/python*/site-packages/dflash_plugins/pairs/prompts/*")
    assert {path.name for path in shipped} >= {"demo.jsonl", "prove.jsonl", "measuring_hashes.json"}
