"""Registration with SGLang: quick, quiet, never raising, checked for its effect; and what of it is still needed."""

import inspect
import json
import logging
import os
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest

from dflash_plugins import hooks
from dflash_plugins.errors import DFlashPluginsError
from dflash_plugins.switches import AUDIT, DISABLE
from sglang_ext import features, plugin
from sglang_ext import hooks as tables


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(plugin, "_state", {"registered": False, "in_force": False})
    monkeypatch.delenv(DISABLE, raising=False)
    monkeypatch.delenv(AUDIT, raising=False)


def said(caplog):
    return [(record.levelno, record.getMessage()) for record in caplog.records]


@pytest.mark.parametrize("value", ["1", "true", "ON"])
def test_switched_off_it_says_so_and_registers_nothing(monkeypatch, caplog, value):
    caplog.set_level(logging.INFO)
    monkeypatch.setenv(DISABLE, value)
    plugin.register()
    assert said(caplog) == [(logging.INFO, f"dflash-plugins: {DISABLE} is set, nothing is registered")]
    assert not plugin._state["in_force"]


def test_an_audit_that_cannot_be_is_an_error_in_the_log(monkeypatch, caplog):
    monkeypatch.setenv(DISABLE, "1")
    monkeypatch.setenv(AUDIT, "somewhere")
    plugin.register()
    ((level, text),) = said(caplog)
    assert level == logging.ERROR
    assert f"nothing is audited although {AUDIT} is set" in text


def test_a_switch_that_is_neither_true_nor_false_is_named(monkeypatch, caplog):
    monkeypatch.setenv(DISABLE, "perhaps")
    plugin.register()
    ((level, text),) = said(caplog)
    assert level == logging.ERROR
    assert f"{DISABLE}='perhaps': neither true nor false" in text


def test_it_never_raises(monkeypatch, caplog):
    def broken(rows):
        raise RuntimeError("anything")

    monkeypatch.setattr(plugin, "drift", broken)
    plugin.register()
    assert "registration failed, nothing is registered" in caplog.text
    assert not plugin._state["in_force"]


def test_an_engine_that_has_changed_is_met_with_a_sentence_for_every_row(monkeypatch, caplog):
    gone = [hooks.Hook("json", name, hooks.Use.REPLACED, "to test") for name in ("JSONDecoder.one", "JSONDecoder.two")]
    monkeypatch.setattr(tables, "AT_REGISTRATION", gone)
    plugin.register()
    assert "json.JSONDecoder.one is gone" in caplog.text
    assert "json.JSONDecoder.two is gone" in caplog.text
    assert not plugin._state["in_force"]


def test_out_of_force_the_hooks_do_what_the_engine_does():
    dflash = SimpleNamespace(is_dflash=lambda: True)
    assert plugin.around_arguments(lambda args: ("shipped", args), "args") == ("shipped", "args")
    assert plugin.around_create_worker(lambda algorithm, args: "worker", dflash, None) == "worker"


def test_another_algorithm_keeps_its_own_worker(monkeypatch):
    monkeypatch.setitem(plugin._state, "in_force", True)
    other = SimpleNamespace(is_dflash=lambda: False)
    assert plugin.around_create_worker(lambda algorithm, args: "worker", other, None) == "worker"


SETTINGS = {
    "speculative_accept_threshold_single": 1.0, "speculative_accept_threshold_acc": 1.0, "tp_size": 1, "dp_size": 1,
    "enable_lora": False, "lora_paths": None, "disaggregation_mode": "null", "enable_deterministic_inference": False,
    "attention_backend": "torch_native", "page_size": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "codes"),
    [
        ({}, []),
        ({"speculative_accept_threshold_single": 0.9}, ["accept-threshold"]),
        ({"dp_size": 2, "enable_lora": True}, ["data-parallel", "lora"]),
        ({"disaggregation_mode": "decode"}, ["disaggregation"]),
        ({"enable_deterministic_inference": True}, ["deterministic"]),
        ({"attention_backend": "flashinfer", "page_size": 16}, ["attention-backend", "page-size"]),
    ],
)
def test_flags_beside_which_it_is_not_served_are_refused_all_at_once(changes, codes):
    found = features.feature_findings(SimpleNamespace(**SETTINGS | changes), on_cpu=True)
    assert [finding.code for finding in found] == codes
    assert all(finding.mend for finding in found)


def test_off_a_cpu_its_own_flags_do_not_matter():
    settings = SimpleNamespace(**SETTINGS | {"attention_backend": "flashinfer", "page_size": 16})
    assert features.feature_findings(settings, on_cpu=False) == []


# With the engine


def in_sglang(tmp_path, code, **environment):
    """The JSON that ``code`` prints last, run where SGLang and the plugin are installed."""
    from conftest import ROOT, write_distribution

    paths = [str(write_distribution(tmp_path / "site")), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = {"PYTHONPATH": os.pathsep.join(paths), "SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=os.environ | settings | environment, capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.engine
def test_the_engines_registry_applies_both_hooks_and_undo_puts_them_out_of_force(tmp_path):
    pytest.importorskip("sglang")
    code = """
    import json, sys, time
    from sglang.srt.arg_groups import speculative_hook
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    before = set(sys.modules)
    from sglang_ext import plugin
    began = time.perf_counter(); plugin.register(); plugin.register(); took = time.perf_counter() - began
    heavy = [n for n in set(sys.modules) - before if "models" in n or "dflash_worker" in n]
    try:
        plugin.refuse_without_effect(); early = "nothing"
    except Exception as error:
        early = str(error)
    from sglang.srt.plugins import load_plugins
    load_plugins()
    plugin.refuse_without_effect()
    wrapped = [hasattr(SpeculativeAlgorithm.create_worker, "__wrapped__"),
               hasattr(speculative_hook._handle_dflash, "__wrapped__")]
    left = plugin.undo()
    worker = SpeculativeAlgorithm.DFLASH.create_worker(None).__name__
    found = {"took": took, "heavy": heavy, "early": early, "wrapped": wrapped, "left": left, "worker": worker}
    print(json.dumps(found))
    """
    got = in_sglang(tmp_path, code)
    assert got["took"] < 1
    assert got["heavy"] == []
    assert "could not apply our hook" in got["early"]
    assert got["wrapped"] == [True, True]
    assert got["left"] == []
    assert got["worker"] == "DFlashWorkerV2"


@pytest.mark.engine
def test_the_installed_sglang_is_as_every_row_says(tmp_path):
    pytest.importorskip("sglang")
    code = """
    import json
    from dflash_plugins.hooks import drift
    from sglang_ext import hooks
    rows = (*hooks.AT_REGISTRATION, *hooks.AT_WORKER, *hooks.ON_CPU, *hooks.AT_AUDIT)
    print(json.dumps([len(rows), drift(rows)]))
    """
    rows, sentences = in_sglang(tmp_path, code)
    assert sentences == []
    assert rows >= 20


@pytest.mark.engine
def test_the_installed_sglang_still_lacks_what_is_added(tmp_path):
    """Fails when a release provides it: then ours can go."""
    pytest.importorskip("sglang")
    code = """
    import inspect, json, torch
    from sglang.srt.arg_groups import speculative_hook
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.models.registry import ModelRegistry
    from sglang.srt.server_args import DRAFT_ATTENTION_BACKEND_CHOICES
    from sglang.srt.speculative import dflash_utils
    from sglang.srt.speculative.dflash_utils import DFlashDraftConfig
    lacks = {
        "D-Loop": "DLoopDraftModel" not in ModelRegistry.models,
        "a CPU among the platforms": '"cpu"' not in inspect.getsource(speculative_hook._handle_dflash),
        "torch_native for a drafter": "torch_native" not in DRAFT_ATTENTION_BACKEND_CHOICES,
        "a block in torch_native": "target_verify" not in inspect.getsource(TorchNativeAttnBackend),
        "the dtype of embeddings": "bfloat16()" in inspect.getsource(ModelRunner._extend_forward_kwargs),
        "acceptance on a CPU": not dflash_utils.is_dflash_sampling_verify_available(),
        "input_embedding_scale": "input_embedding_scale" not in DFlashDraftConfig.__dataclass_fields__,
        "nested causal": "causal" not in DFlashDraftConfig.__dataclass_fields__,
    }
    try:
        torch.zeros(1).record_stream(torch.get_device_module("cpu").current_stream())
    except Exception:
        lacks["streams on a CPU"] = True
    print(json.dumps(lacks))
    """
    lacks = in_sglang(tmp_path, code)
    assert len(lacks) == 9
    assert all(lacks.values()), lacks


def test_a_hook_without_effect_is_an_error_and_not_a_log_line(monkeypatch):
    module = SimpleNamespace(SpeculativeAlgorithm=SimpleNamespace(create_worker=lambda self, server_args: None))
    for name in ("sglang", "sglang.srt", "sglang.srt.speculative"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__path__=[]))
    monkeypatch.setitem(sys.modules, "sglang.srt.speculative.spec_info", module)
    with pytest.raises(DFlashPluginsError, match="could not apply our hook"):
        plugin.refuse_without_effect()
    assert inspect.isfunction(module.SpeculativeAlgorithm.create_worker)
