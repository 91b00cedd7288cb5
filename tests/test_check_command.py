"""The command ``check``: one screen, one document, exit codes, versions and what an installed engine shows, the hub."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from matrix_rows import PRINT_A, row
from published import Pair, qwen3_8b, qwen38_27b_dflash2, speculators_dflash

from dflash_plugins import cli, hub, serve
from dflash_plugins.config import read_target_config
from dflash_plugins.config_models import fingerprint
from dflash_plugins.engines import ENGINES, Condition, Launch, engine_facts, known_flags
from dflash_plugins.engines.limits import holds, limit_findings
from dflash_plugins.errors import BadInput
from dflash_plugins.findings import Finding, Severity
from dflash_plugins.hardware import gpu_memory
from dflash_plugins.matrix import Matrix
from dflash_plugins.report import CheckReport
from dflash_plugins.rules import Facts
from dflash_plugins.settings import read_settings


def arguments(pair: Pair, folder: Path, *more: str) -> list[str]:
    target, draft = pair.write(folder, data=False)
    return ["check", "--engine", pair.engine, "--target", str(target), "--draft", str(draft), *more]


def document(capsys: pytest.CaptureFixture[str], given: list[str]) -> dict[str, Any]:
    cli.main([*given, "--json"])
    return json.loads(capsys.readouterr().out)


# -- what scripts rely on


def test_the_document_has_the_promised_keys(capsys, tmp_path):
    found = document(capsys, arguments(qwen38_27b_dflash2(), tmp_path / "p", "--engine-version", "0.31.0"))
    assert {"findings", "draft", "matrix", "launch"} <= found.keys()
    assert all(one.keys() == {"code", "severity", "key", "value", "message", "mend"} for one in found["findings"])
    assert found["draft"].keys() == {
        *("method", "block_size", "k", "target_layer_ids", "causal", "dtype", "fingerprint"),
    }
    assert (found["draft"]["method"], found["draft"]["block_size"], found["draft"]["k"]) == ("dflash2", 8, 7)
    assert found["matrix"] == {"status": "untested", "rows": []}


@pytest.mark.parametrize(("engine", "flag", "value"), [("vllm", "num_speculative_tokens", "7"), ("sglang", None, "8")])
def test_k_means_the_same_on_both_engines(capsys, tmp_path, engine, flag, value):
    pair = qwen38_27b_dflash2()
    pair.engine = engine
    launch = document(capsys, arguments(pair, tmp_path / "p", "--k", "7"))["launch"]
    if flag:
        assert json.loads(launch[launch.index("--speculative-config") + 1])[flag] == 7
    else:
        assert launch[launch.index("--speculative-num-draft-tokens") + 1] == value


def test_the_plan_becomes_a_command_line(capsys, tmp_path):
    more = ("--set", "runner=v2", "--set", "max_model_len=32k", "--set", "enable_prefix_caching=false")
    more += ("--set", "speculative_config.attention_backend=FLASH_ATTN", "--set", "seed=3", "--set", "memory_gib=400")
    launch = document(capsys, arguments(qwen38_27b_dflash2(), tmp_path / "p", *more))["launch"]
    assert launch[:6] == ["env", "VLLM_USE_V2_MODEL_RUNNER=1", "python", "-m", "vllm.entrypoints.cli.main", "serve"]
    assert json.loads(launch[launch.index("--speculative-config") + 1])["attention_backend"] == "FLASH_ATTN"
    assert launch[-5:] == ["--max-model-len", "32000", "--no-enable-prefix-caching", "--seed", "3"]
    assert not [word for word in launch if "memory" in word]


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ((), 0),
        (("--k", "8"), 0),
        (("--set", "dtype=float16"), 1),
        (("--k", "3", "--set", "num_speculative_tokens=7"), 2),
        (("--set", "num_speculative_tokens=0"), 2),
        (("--set", "model=other"), 2),
        (("--set", "runner=v3"), 2),
        (("--set", "speculative_config.method=mtp"), 2),
    ],
)
def test_exit_codes(capsys, tmp_path, more, code):
    given = arguments(qwen38_27b_dflash2(), tmp_path / "p", "--engine-version", "0.31.0", *more)
    assert cli.main(given) == code
    shown = capsys.readouterr()
    assert "Traceback" not in shown.err
    assert bool(shown.out) is (code != 2)
    assert bool(shown.err) is (code == 2)


def test_a_missing_folder_is_exit_2(capsys):
    assert cli.main(["check", "--engine", "vllm", "--target", "nowhere", "--draft", "nothing"]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_an_incomplete_target_is_a_finding_beside_all_others(capsys, tmp_path):
    pair = qwen3_8b()
    given = arguments(pair, tmp_path / "p", "--k", "16")
    (Path(given[4]) / "config.json").write_text('{"architectures": 3, "text_config": 5, "rope_parameters": "x"}')
    found = {one["code"] for one in document(capsys, given)["findings"]}
    assert {"target-config", "k-beyond-block"} <= found


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json"])
@pytest.mark.parametrize("text", ["{", "[]", '"x"', '{"model": [], "added_tokens": 5, "min_p": "x"}'])
def test_broken_files_of_a_target_never_end_in_a_traceback(capsys, tmp_path, name, text):
    given = arguments(qwen3_8b(), tmp_path / "p")
    (Path(given[4]) / name).write_text(text)
    (Path(given[6]) / "tokenizer.json").write_text('{"model": {"vocab": [["a", 0.5], 3]}, "added_tokens": {}}')
    assert cli.main(given) in (0, 1, 2)
    assert "Traceback" not in capsys.readouterr().err


# -- what people read


def stories() -> dict[str, tuple[Pair, tuple[str, ...]]]:
    block_for_k, other, old, quantised = qwen3_8b(), qwen3_8b(), qwen38_27b_dflash2(), qwen3_8b()
    block_for_k.settings = {"num_speculative_tokens": 16}
    other.target = qwen38_27b_dflash2().target
    old.version = "0.27.1"
    for name in [name for name in quantised.draft_header if "proj" in name]:
        _, (rows, columns) = quantised.draft_header.pop(name)
        quantised.draft_header[f"{name}_packed"] = ("I32", (rows, columns // 8))
        quantised.draft_header[f"{name}_scale"] = ("BF16", (rows, columns // 128))
    return {
        "block for K": (block_for_k, ("did you mean 15?",)),
        "another target": (other, ("use the target the drafter was trained for", "refused")),
        "an old engine": (old, ("vLLM 0.28.0 or later", "refused")),
        "a quantised drafter": (quantised, ("use the drafter's unquantised weights", "34 more", "refused")),
    }


@pytest.mark.parametrize("story", stories())
def test_one_screen_says_what_to_change(capsys, tmp_path, monkeypatch, story):
    pair, words = stories()[story]
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "30")
    more = [part for key, value in pair.settings.items() for part in ("--set", f"{key}={value}")]
    cli.main(arguments(pair, tmp_path / "p", "--engine-version", str(pair.version), *more))
    shown = capsys.readouterr().out
    assert all(word in " ".join(shown.split()) for word in words), shown
    assert len(shown.splitlines()) <= 30


def test_what_does_not_fit_a_screen_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("LINES", "24")
    pair = speculators_dflash()
    pair.target = qwen38_27b_dflash2().target
    del pair.draft["mask_token_id"], pair.draft["block_size"], pair.draft_header["fc.weight"]
    assert cli.main(arguments(pair, tmp_path / "p")) == 1
    shown = capsys.readouterr().out
    assert "and more, see --json: " in shown
    assert len(shown.splitlines()) <= 24


# -- versions, and what the source of an installed engine shows


def facts(engine: str, name: str = "DFlash2DraftModel", **launch: Any) -> Facts:
    draft = {"architecture": name, "method": "dflash2"}
    return Facts(draft=draft, engine=engine_facts(engine), launch=Launch(**launch))


def codes(found: list[Finding]) -> dict[str, Severity]:
    return {finding.code: finding.severity for finding in found}


@pytest.mark.parametrize("version", ["0.31.1.dev12+gabcdef", "0.28.0", "0.32.0+cpu", "0.28.1rc1.dev43+g6f7df92a8"])
def test_source_builds_of_later_versions_serve_it(version):
    assert "engine-too-old" not in codes(limit_findings(facts("vllm", version=version)))


@pytest.mark.parametrize("version", ["0.5.21.post1", "0.5.19"])
def test_post_releases_parse(version):
    assert "engine-too-old" not in codes(limit_findings(facts("sglang", version=version)))
    assert "engine-too-old" in codes(limit_findings(facts("sglang", version="0.5.18.post3")))


def test_sglang_had_no_dflash_before():
    old = codes(limit_findings(facts("sglang", "DFlashDraftModel", version="0.5.10.post1")))
    assert old["engine-too-old"] is Severity.ERROR
    assert "engine-too-old" not in codes(limit_findings(facts("sglang", "DFlashDraftModel", version="0.5.12")))


@pytest.mark.parametrize(("engine", "version"), [("vllm", "0.19.1"), ("vllm", "0.9.1"), ("sglang", "0.5.10.post1")])
def test_what_the_plugin_registers_needs_an_engine_that_has_the_method(engine, version):
    every = limit_findings(facts(engine, "DLoopDraftModel", version=version))
    (found,) = (f for f in every if f.key == "engine_version")
    assert (found.code, found.severity) == ("engine-too-old", Severity.ERROR)
    assert "which DLoopDraftModel needs" in found.message


@pytest.mark.parametrize(
    ("engine", "version", "untested"),
    [
        ("vllm", "0.31.0", False),
        ("vllm", "0.31.0.post2", False),
        ("vllm", "0.27.0", True),
        ("vllm", "0.33.1.dev3+gabc", True),
        ("sglang", "0.5.22", True),
        ("sglang", "0.5.23", False),
    ],
)
def test_versions_that_the_plugin_was_never_run_with_are_named(engine, version, untested):
    found = codes(limit_findings(facts(engine, "DLoopDraftModel", version=version)))
    assert found.get("plugin-untested") == (Severity.WARNING if untested else None)
    assert "plugin-untested" not in codes(limit_findings(facts(engine, "DFlashDraftModel", version=version)))


def test_a_build_just_before_the_release_only_warns():
    assert codes(limit_findings(facts("vllm", version="0.28.0rc1.dev5")))["engine-too-old"] is Severity.WARNING


@pytest.fixture
def engine_at(tmp_path: Path):
    """A folder that looks like vLLM, whose registry lists what is asked for."""

    def make(*names: str) -> Path:
        file = tmp_path / "vllm" / "model_executor" / "models" / "registry.py"
        file.parent.mkdir(parents=True)
        file.write_text("\n".join(f'    "{name}": (),' for name in names))
        return tmp_path / "vllm"

    return make


def test_the_installed_source_wins_over_a_version_that_is_too_low(engine_at):
    root = engine_at("DFlashDraftModel", "DFlash2DraftModel")
    assert "engine-too-old" not in codes(limit_findings(facts("vllm", version="0.1.dev1+fork", root=root)))


def test_the_installed_source_wins_over_a_version_that_is_high(engine_at):
    root = engine_at("DFlashDraftModel")
    assert codes(limit_findings(facts("vllm", version="9.9", root=root)))["engine-too-old"] is Severity.ERROR


def test_a_sign_decides_a_limit(tmp_path):
    limit = next(one for one in engine_facts("vllm").limits if one.id == "vllm-quantised-head")
    assert limit.sign is not None
    assert limit.sign.seen(None) is None
    assert limit.sign.seen(tmp_path) is None
    file = tmp_path / limit.sign.file
    file.parent.mkdir(parents=True)
    header = {"lm_head.weight_packed": ("U8", (4, 4))}
    for text, there in ((f"... {limit.sign.text} ...", True), ("", False)):
        file.write_text(text)
        pair = facts("vllm", version="0.40.0", root=tmp_path)
        pair = Facts(draft=pair.draft, engine=pair.engine, launch=pair.launch, target_header=header)
        assert (limit.id in codes(limit_findings(pair))) is there


def test_a_given_version_is_not_that_of_the_engine_installed_here(monkeypatch, tmp_path):
    monkeypatch.setattr(serve, "find_spec", lambda name: types.SimpleNamespace(submodule_search_locations=[tmp_path]))
    monkeypatch.setattr(serve, "version", lambda name: "0.31.0+cpu")
    here = serve.launch_of(engine_facts("vllm"), None, {})
    assert (here.version, here.platform, here.root) == ("0.31.0+cpu", "cpu", tmp_path)
    given = serve.launch_of(engine_facts("vllm"), "0.28.0", {})
    assert (given.version, given.platform, given.root) == ("0.28.0", None, None)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_limit_can_hold_and_every_flag_is_known(engine):
    about = engine_facts(engine)
    for limit in about.limits:
        assert limit.source, limit.id
        assert limit.when.model_dump(exclude_defaults=True), limit.id
        assert set(limit.when.settings) <= set(about.flags), limit.id
    for one in about.architectures:
        assert one.needs is None or about.architecture(one.needs), one.name
    known = known_flags(engine)
    for name, flag in about.flags.items():
        first = flag.names[0].partition(".")[0]
        assert flag.planning or first in known or name == "tokens", name


@pytest.mark.parametrize(
    ("condition", "value", "expected"),
    [
        ({"above": 1}, 2, True),
        ({"above": 1}, 1, False),
        ({"above": 1}, "2", False),
        ({"below": 1}, 0.5, True),
        ({"equal": True}, True, True),
        ({"differs": "vllm"}, "auto", True),
        ({"differs": "vllm"}, None, False),
        ({"differs": "vllm", "unset": True}, None, True),
        ({"absent": True}, None, True),
        ({"absent": True}, "x", False),
        ({"like": ["fp8*"]}, "FP8_E4M3", True),
        ({"like": ["fp8*"]}, "bfloat16", False),
    ],
)
def test_conditions(condition, value, expected):
    assert holds(Condition(**condition), value) is expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"max_model_len": "1k"}, {"max_model_len": 1000}),
        ({"max_model_len": "1K"}, {"max_model_len": 1024}),
        ({"max_model_len": "auto"}, {}),
        ({"tp": "2"}, {"tensor_parallel_size": 2}),
        ({"no_enable_prefix_caching": None}, {"enable_prefix_caching": False}),
        ({"enable_lora": None}, {"enable_lora": True}),
        ({"speculative_config.kv_cache_dtype": "fp8"}, {"draft_kv_cache_dtype": "fp8"}),
    ],
)
def test_settings_in_the_kind_the_engine_takes(given, expected):
    found, wrong = read_settings(engine_facts("vllm"), given)
    assert ({name: setting.value for name, setting in found.items()}, wrong) == (expected, [])


# -- the matrix


@pytest.mark.parametrize(
    ("ran", "result", "status", "code", "words"),
    [
        ("this", "passed", "tested", 0, "at least 1.44 emitted per round"),
        ("this", "failed", "known-bad", 1, "known-bad: r1 (it broke)"),
        ("another drafter", "passed", "untested", 0, "r1 ran another revision of this drafter"),
        ("another target", "passed", "untested", 0, "r1 ran another target"),
    ],
)
def test_the_matrix_is_asked(monkeypatch, capsys, tmp_path, ran, result, status, code, words):
    pair = qwen38_27b_dflash2()
    given = arguments(pair, tmp_path / "p", "--engine-version", "0.31.0+cpu", "--set", "runner=v1")
    draft, target = document(capsys, given)["draft"]["fingerprint"], fingerprint(read_target_config(Path(given[4])))
    known = {"draft__name": given[6], "draft__fingerprint": draft, "target__fingerprint": target}
    known |= {"this": {}, "another drafter": {"draft__fingerprint": PRINT_A}}.get(ran, {"target__fingerprint": PRINT_A})
    monkeypatch.setattr(serve, "read_matrix", lambda: Matrix(rows=(row(result=result, **known),)))
    before = cli.main(given)
    assert words in " ".join(capsys.readouterr().out.split())
    assert (before, cli.main([*given, "--json"])) == (code, code)
    found = json.loads(capsys.readouterr().out)
    assert found["matrix"]["status"] == status
    assert [one["id"] for one in found["matrix"]["rows"]] == ["r1"]
    said = [one["mend"] for one in found["findings"] if one["code"] == "matrix"]
    assert said == {"tested": [f"to repeat it: {row().command}"], "known-bad": ["use a tested pair"]}.get(status, [])


# -- the hub


class Api:
    """What ``huggingface_hub`` answers for one repository that lies in a folder."""

    folder: Path
    fetched: list[str]

    def model_info(self, identity: str, revision: str | None = None) -> Any:
        if identity != "org/draft":
            raise RuntimeError("404: no such repository\nand more lines")
        names = [types.SimpleNamespace(rfilename=file.name) for file in self.folder.iterdir()]
        return types.SimpleNamespace(sha=revision or "c0ffee", siblings=names)

    def hf_hub_download(self, identity: str, name: str, revision: str) -> str:
        self.fetched.append(name)
        return str(self.folder / name)

    def parse_safetensors_file_metadata(self, identity: str, name: str, revision: str) -> Any:
        content = (self.folder / name).read_bytes()
        entries = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        tensors = {tensor: types.SimpleNamespace(**entry) for tensor, entry in entries.items()}
        return types.SimpleNamespace(tensors=tensors)


@pytest.fixture
def api(monkeypatch, tmp_path) -> type[Api]:
    Api.folder, Api.fetched = qwen38_27b_dflash2().write(tmp_path / "hub", data=False)[1], []
    monkeypatch.setenv("DFLASH_PLUGINS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(HfApi=Api))
    return Api


def test_an_id_is_checked_like_a_folder_and_pinned(api, capsys, tmp_path):
    given = arguments(qwen38_27b_dflash2(), tmp_path / "p", "--engine-version", "0.31.0")
    local = document(capsys, given)
    given[6] = "org/draft@main"
    remote = document(capsys, given)
    headers_only = {"headers-only"}
    assert {f["code"] for f in remote["findings"]} | headers_only == {
        f["code"] for f in local["findings"]
    } | headers_only
    assert remote["draft"] == local["draft"]
    speculation = json.loads(remote["launch"][remote["launch"].index("--speculative-config") + 1])
    assert (speculation["model"], speculation["revision"]) == ("org/draft", "main")
    assert api.fetched == ["config.json"]


def test_sglang_is_told_the_commit(api, capsys, tmp_path):
    pair = qwen38_27b_dflash2()
    pair.engine = "sglang"
    given = arguments(pair, tmp_path / "p")
    given[6] = "org/draft"
    launch = document(capsys, given)["launch"]
    assert launch[launch.index("--speculative-draft-model-revision") + 1] == "c0ffee"


def test_a_commit_is_read_once(api):
    first, second = hub.locate("org/draft"), hub.locate("org/draft")
    assert first == second
    assert api.fetched == ["config.json"]


def test_a_hub_that_does_not_answer_is_one_sentence(api):
    with pytest.raises(BadInput, match=r"'org/nothing' is no folder here.*404: no such repository;") as error:
        hub.locate("org/nothing")
    assert "more lines" not in str(error.value)


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(BadInput, match=r"dflash-plugins\[hub\]"):
        hub.locate("org/draft")


def test_a_folder_wins_over_an_id(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    (tmp_path / "org" / "draft").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub.locate("org/draft") == hub.Model("org/draft", Path("org/draft"))


# -- the machine


def test_memory_of_gpus(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_memory() is None
    tool = tmp_path / "nvidia-smi"
    for answer, expected in (("24576, 1024\n24576, 2048", (24.0, 2.0)), ("no devices", None)):
        tool.write_text(f"#!/bin/sh\necho '{answer}'\n")
        tool.chmod(0o755)
        assert gpu_memory() == expected


def test_f75_free_memory_refuses_before_loading(tmp_path):
    pair = qwen38_27b_dflash2()
    pair.settings = {"free_gib": 0.4}
    report = pair.check(tmp_path / "p")
    assert isinstance(report, CheckReport)
    assert any("the draft does not fit" in finding.message for finding in report.findings)


def test_f74_the_share_of_the_kv_cache(tmp_path):
    """5 layers, 8 KV heads on two ranks, 128 wide, two bytes: 10,240 bytes per token and rank."""
    pair = qwen38_27b_dflash2()
    pair.settings = {"tensor_parallel_size": 2}
    (size,) = [finding for finding in pair.check(tmp_path / "p").findings if finding.code == "draft-kv"]
    assert size.value == 10240
    assert "10,240 bytes per token and rank" in size.message
