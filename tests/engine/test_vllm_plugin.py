"""Registration: quick, quiet, repeatable, never raising, all or nothing, and undone without a trace."""

import inspect
import json
import logging
import os
import subprocess
import sys
import textwrap
from types import ModuleType, SimpleNamespace

import pytest

from dflash_plugins import hooks
from vllm_ext import hooks as tables
from vllm_ext import plugin, runner

OURS = runner.DRAFTER_CLASS


class Registry:
    def __init__(self):
        self.models = {runner.DFLASH: "theirs", runner.DFLASH2: "theirs too", "LlamaForCausalLM": "llama"}

    def register_model(self, model_arch, model_cls):
        self.models[model_arch] = model_cls


def _expand_kernel_impl(output, input_val, cu_num_tokens, replace_from, replace_to, MAX_NUM_TOKENS=None):  # noqa: N803
    raise AssertionError("must not be called at registration")


def _rejection_random_sample_kernel_impl(
    output_token_ids, cu_num_draft_tokens, draft_token_ids, draft_probs, target_probs, bonus_token_ids,
    recovered_token_ids, uniform_probs,
):  # fmt: skip
    raise AssertionError("must not be called at registration")


class VllmConfig:
    """A config of a run with method dflash and one drafter architecture."""

    use_v2_model_runner = False

    def __init__(self, architecture=None, method="dflash"):
        draft = SimpleNamespace(architectures=[architecture])
        self.speculative_config = architecture and SimpleNamespace(method=method, draft_model_config=draft)
        self.first_calls = 0

    def _is_dflash_candidate_draft(self):
        return True

    def _get_v1_model_runner_unsupported_features(self):
        return ["something else"] + ["DFlash candidate-head drafts"] * self._is_dflash_candidate_draft()

    def enable_trace_function_call_for_thread(self):
        self.first_calls += 1


SHIPPED = {name: value for name, value in vars(VllmConfig).items() if callable(value)}


class CpuPlatform:
    @classmethod
    def register_triton_kernel_overrides(cls):
        kernels = sys.modules["vllm.utils.cpu_triton_utils"]
        return kernels._expand_kernel_impl, kernels._rejection_random_sample_kernel_impl


@pytest.fixture
def engine(monkeypatch):
    """A vLLM of a few names, in the places where the table looks for them."""
    parts = {
        "vllm": {},
        "vllm.config": {"VllmConfig": VllmConfig},
        "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: True)},
        "vllm.platforms.cpu": {"CpuPlatform": CpuPlatform},
        "vllm.model_executor": {},
        "vllm.model_executor.models": {},
        "vllm.model_executor.models.registry": {"ModelRegistry": Registry()},
        "vllm.utils": {},
        "vllm.utils.cpu_triton_utils": {
            "_expand_kernel_impl": _expand_kernel_impl,
            "_rejection_random_sample_kernel_impl": _rejection_random_sample_kernel_impl,
        },
    }
    modules = {}
    for name, names in parts.items():
        modules[name] = ModuleType(name)
        vars(modules[name]).update(names)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, modules[name])
        monkeypatch.setitem(sys.modules, name, modules[name])
    for variable in (plugin.DISABLE, plugin.NO_CONTEXT_K_NORM, plugin.NO_EXPAND_KERNEL, plugin.NO_REJECTION_KERNEL):
        monkeypatch.delenv(variable, raising=False)
    yield SimpleNamespace(
        models=modules["vllm.model_executor.models.registry"].ModelRegistry.models,
        kernels=modules["vllm.utils.cpu_triton_utils"],
        modules=modules,
    )
    plugin.undo()


def test_registers_its_names_once_and_undo_puts_them_back(engine):
    before = dict(engine.models)
    plugin.register()
    after = (dict(engine.models), engine.kernels._expand_kernel_impl)
    names = (runner.DFLASH, runner.DFLASH2, *runner.DLOOP)
    assert engine.models == dict.fromkeys(names, OURS) | {"LlamaForCausalLM": "llama"}
    assert engine.kernels._expand_kernel_impl is not _expand_kernel_impl
    plugin.register()
    assert (dict(engine.models), engine.kernels._expand_kernel_impl) == after
    assert plugin.undo() == []
    assert engine.models == before
    assert engine.kernels._expand_kernel_impl is _expand_kernel_impl
    assert {name: value for name, value in vars(VllmConfig).items() if callable(value)} == SHIPPED


def test_only_the_loop_is_added_on_other_platforms(engine):
    engine.modules["vllm.platforms"].current_platform.is_cpu = lambda: False
    before = dict(engine.models)
    plugin.register()
    assert engine.models == before | dict.fromkeys(runner.DLOOP, OURS)
    assert engine.kernels._expand_kernel_impl is _expand_kernel_impl


@pytest.mark.parametrize("value", ["1", "true", " Yes "])
def test_everything_can_be_switched_off(engine, monkeypatch, value):
    monkeypatch.setenv(plugin.DISABLE, value)
    plugin.register()
    assert engine.models[runner.DFLASH] == "theirs"
    assert engine.kernels._expand_kernel_impl is _expand_kernel_impl


def test_the_expand_kernel_alone_can_be_left(engine, monkeypatch, caplog):
    monkeypatch.setenv(plugin.NO_EXPAND_KERNEL, "1")
    plugin.register()
    assert engine.models[runner.DFLASH] == OURS
    assert engine.kernels._expand_kernel_impl is _expand_kernel_impl
    assert plugin.NO_EXPAND_KERNEL in caplog.text


def test_the_rejection_kernel_alone_can_be_left(engine, monkeypatch, caplog):
    monkeypatch.setenv(plugin.NO_REJECTION_KERNEL, "1")
    plugin.register()
    assert engine.kernels._expand_kernel_impl is not _expand_kernel_impl
    assert engine.kernels._rejection_random_sample_kernel_impl is _rejection_random_sample_kernel_impl
    assert plugin.NO_REJECTION_KERNEL in caplog.text


def test_the_context_k_norm_switch_is_read_but_not_acted_on_here(engine, monkeypatch):
    monkeypatch.setenv(plugin.NO_CONTEXT_K_NORM, "1")
    plugin.register()
    assert plugin.read_switches(os.environ) == plugin.Switches(no_context_k_norm=True)
    assert engine.models[runner.DFLASH] == OURS


def test_a_value_that_is_neither_is_refused_by_name_and_value(engine, monkeypatch, caplog):
    monkeypatch.setenv(plugin.NO_EXPAND_KERNEL, "maybe")
    monkeypatch.setenv(plugin.DISABLE, "2")
    plugin.register()
    assert engine.models[runner.DFLASH] == "theirs"
    assert engine.kernels._expand_kernel_impl is _expand_kernel_impl
    assert "DFLASH_PLUGINS_NO_MEND_EXPAND_KERNEL='maybe'" in caplog.text
    assert "DFLASH_PLUGINS_DISABLE='2'" in caplog.text


def test_drift_is_one_sentence_each_and_nothing_is_registered(engine, caplog):
    registry = engine.modules["vllm.model_executor.models.registry"].ModelRegistry
    registry.register_model = lambda name, model_cls: None
    del engine.modules["vllm.platforms"].current_platform.is_cpu
    plugin.register()
    assert engine.models[runner.DFLASH] == "theirs"
    assert engine.kernels._expand_kernel_impl is _expand_kernel_impl
    (record,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert "current_platform.is_cpu is gone" in record.getMessage()
    assert "takes ('name', 'model_cls') instead of ('model_arch', 'model_cls')" in record.getMessage()


def test_a_kernel_that_moved_costs_only_its_own_mend(engine, caplog):
    del engine.kernels._expand_kernel_impl
    plugin.register()
    assert engine.models[runner.DFLASH] == OURS
    assert "_expand_kernel_impl is gone" in caplog.text


def test_an_engine_that_does_not_know_an_architecture_is_said(engine, caplog):
    del engine.models[runner.DFLASH]
    plugin.register()
    assert runner.DFLASH not in engine.models
    assert "does not serve DFlashDraftModel" in caplog.text


def test_an_exception_undoes_what_was_done_and_does_not_leave(engine, monkeypatch, caplog):
    monkeypatch.setattr(plugin, "_register_kernel", lambda *_: 1 / 0)
    plugin.register()
    assert engine.models[runner.DFLASH] == "theirs"
    assert "nothing is registered" in caplog.text


def test_no_engine_is_no_exception(monkeypatch, caplog):
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "vllm", None)
    plugin.register()
    assert "vllm.platforms.current_platform.is_cpu is gone" in caplog.text


def test_an_engine_that_serves_the_loop_itself_keeps_its_own(engine, caplog):
    engine.models[runner.DLOOP[0]] = "theirs"
    plugin.register()
    assert engine.models[runner.DLOOP[0]] == "theirs"
    assert f"serves {runner.DLOOP[0]} itself" in caplog.text
    plugin.undo()
    assert engine.models[runner.DLOOP[0]] == "theirs"


@pytest.mark.parametrize(
    ("config", "lacking"),
    [
        (VllmConfig(runner.DFLASH2), ["something else"]),
        (VllmConfig("LiLiCorrDraftModel"), ["something else", runner.CANDIDATE_HEAD]),
        (VllmConfig(runner.DFLASH2, method="eagle3"), ["something else", runner.CANDIDATE_HEAD]),
        (VllmConfig(), ["something else", runner.CANDIDATE_HEAD]),
    ],
)
def test_only_the_head_that_we_provide_is_no_longer_refused(engine, config, lacking):
    plugin.register()
    assert config._get_v1_model_runner_unsupported_features() == lacking


@pytest.mark.parametrize(
    ("architecture", "v2", "table"),
    [
        (runner.DFLASH, False, None),
        (runner.DFLASH2, False, "AT_RUNNER_V1"),
        (runner.DFLASH2, True, None),
        (runner.DLOOP[1], False, "AT_RUNNER_V1"),
        (runner.DLOOP[1], True, "AT_RUNNER_V2"),
        (None, False, None),
    ],
)
def test_a_worker_looks_at_the_runner_only_where_it_is_to_draft(engine, monkeypatch, architecture, v2, table):
    asked = []
    monkeypatch.setattr(runner, "drift", lambda rows: asked.append(rows) or ["it moved"])
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", v2)
    plugin.register()
    config = VllmConfig(architecture)
    config.enable_trace_function_call_for_thread()
    assert config.first_calls == 1
    assert asked == ([getattr(runner, table)] if table else [])
    assert not runner.in_force()
    assert runner.why_not() == ("it moved" if table else "")


class WorkerBase:
    def __init__(self, vllm_config, local_rank=0):
        self.built_with = vllm_config, local_rank, runner.why_not()


def test_a_worker_in_a_process_of_its_own_is_met_too(engine, monkeypatch):
    """Its first call with the config comes before it loads plugins, so only its constructor is left to be wrapped."""
    module, shipped = ModuleType(tables.WORKER_BASE.module), WorkerBase.__init__
    module.WorkerBase = WorkerBase
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(runner, "drift", lambda rows: ["it moved"])
    plugin.register()
    config = VllmConfig(runner.DLOOP[0])
    assert WorkerBase(config, local_rank=3).built_with == (config, 3, "it moved")
    plugin.undo()
    assert WorkerBase.__init__ is shipped


def test_what_was_added_is_taken_away_and_somebody_elses_is_left():
    patches, table = hooks.Patches(), {"a": 1, "b": 1}
    patches.added("table", table, "a")
    patches.added("table", table, "b")
    table["b"] = 2
    assert patches.undo() == ["table['b'] was replaced again by somebody else and is left as it is"]
    assert table == {"b": 2}


class Place:
    value = 1


def test_patching_twice_is_refused_and_names_the_place():
    patches = hooks.Patches()
    patches.attribute(Place, "value", 2)
    with pytest.raises(hooks.AlreadyPatchedError, match=r"Place\.value"):
        patches.attribute(Place, "value", 3)
    assert Place.value == 2
    assert patches.undo() == []
    assert Place.value == 1


def test_undo_leaves_what_somebody_else_replaced_since_and_says_so():
    patches = hooks.Patches()
    table = {"a": 1, "b": 1}
    patches.item("table", table, "a", 2)
    patches.item("table", table, "b", 2)
    table["b"] = 3
    assert patches.undo() == ["table['b'] was replaced again by somebody else and is left as it is"]
    assert table == {"a": 1, "b": 3}
    assert patches.places == ()


def test_drift_names_what_a_function_no_longer_uses():
    hook = hooks.Hook(
        __name__, "CpuPlatform.register_triton_kernel_overrides", hooks.Use.READ, "for a test", (), ("gone",)
    )
    assert hooks.drift([hook]) == [f"{hook.name} no longer uses gone; it is read for a test"]


@pytest.mark.engine
def test_the_installed_vllm_is_as_every_row_says():
    pytest.importorskip("vllm")
    kernels = (tables.EXPAND_KERNEL, tables.EXPAND_KERNEL_TAKEN, tables.REJECTION_KERNEL, tables.REJECTION_KERNEL_TAKEN)
    table = (*tables.AT_REGISTRATION, *kernels, *tables.AT_LOADING)
    assert hooks.drift(table) == []
    assert hooks.drift(tables.AT_RUNNER_V1) == []


@pytest.mark.engine
def test_the_installed_vllm_still_lacks_what_is_added():
    """Fails when a release provides it: then ours can go."""
    pytest.importorskip("vllm")
    from vllm.config import VllmConfig
    from vllm.model_executor.models.registry import _SPECULATIVE_DECODING_MODELS

    assert not set(runner.DLOOP) & set(_SPECULATIVE_DECODING_MODELS)
    refusal = inspect.unwrap(VllmConfig._get_v1_model_runner_unsupported_features)
    assert runner.CANDIDATE_HEAD in refusal.__code__.co_consts


REAL = """
import json, sys, time
import vllm.engine.arg_utils, vllm.model_executor.models.registry
from vllm_ext import plugin, runner
before = set(sys.modules)
start = time.process_time()  # a busy machine makes the wall clock say nothing about us
plugin.register()
seconds = time.process_time() - start
plugin.register()
new = set(sys.modules) - before
from vllm import ModelRegistry
from vllm.utils import cpu_triton_utils
import torch
facts = {
    "seconds": seconds,
    "worker": [name for name in sys.modules if name.startswith(("vllm.v1.worker", "vllm.model_executor.models.qwen3"))],
    "kernels": [name for name in new if "_C" in name],
    "cuda": torch.cuda.is_initialized(),
    "model": str(ModelRegistry.models[runner.DFLASH]),
    "places": plugin._patches.places,
    "left": plugin.undo(),
    "model_after": str(ModelRegistry.models[runner.DFLASH]),
}
print("FACTS" + json.dumps(facts))
"""


@pytest.mark.engine
@pytest.mark.slow
def test_real_registration_is_quick_and_imports_no_worker():
    pytest.importorskip("vllm")
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(REAL)], capture_output=True, text=True, check=True)
    facts = json.loads(done.stdout.partition("FACTS")[2])
    assert facts["seconds"] < 0.05
    assert facts["worker"] == []
    assert facts["kernels"] == []
    assert facts["cuda"] is False
    assert "vllm_ext.dflash" in facts["model"]
    assert len(facts["places"]) == 8
    assert facts["left"] == []
    assert "qwen3_dflash" in facts["model_after"]
