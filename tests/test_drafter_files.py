"""Loading the released layout with every tensor accounted for, and writing it whole or not at all."""

import json

import pytest
import tiny
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from dflash_plugins.drafter import Drafter, load_drafter, save_drafter
from dflash_plugins.errors import BadInput, Refused


@pytest.mark.parametrize("method", ["dflash", "dflash2", "dloop"])
def test_a_released_checkpoint_loads_whole(tmp_path, method):
    raw = tiny.smallest(method)
    loaded = load_drafter(tiny.write_drafter(tmp_path / "d", raw))
    state = loaded.state_dict()
    expected = tiny.tensors(raw)
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    assert not loaded.training
    loaded.bind(*tiny.shared(raw))
    features, ids = tiny.features(raw, 1, 3), torch.tensor([[5, 39, 39, 39, 39]])
    where = torch.arange(3, 8)[None]
    ours, memory = (
        d.hidden(ids, where, d.context_kv(features, tiny.columns(features))) for d in (loaded, tiny.drafter(raw))
    )
    assert torch.equal(ours, memory)


def test_aliases_and_prefixes_are_one_parameter(tmp_path):
    raw = tiny.smallest("dflash2")
    weights = tiny.tensors(raw)
    renamed = {f"model.{n}.weight" if n.endswith("codebook") else f"model.{n}": t for n, t in weights.items()}
    state = load_drafter(tiny.write_drafter(tmp_path / "d", raw, renamed)).state_dict()
    assert all(torch.equal(state[name], weights[name]) for name in weights)


def test_own_head_map_and_embedding_are_loaded(tmp_path):
    raw = tiny.smallest(vocab_size=16, draft_vocab_size=4, draft={"mask_token_id": 15})
    weights = tiny.tensors(raw) | {"d2t": torch.tensor([0, 2, 5, 9]), "embed_tokens.weight": torch.ones(16, 16)}
    loaded = load_drafter(tiny.write_drafter(tmp_path / "d", raw, weights))
    assert loaded.target_ids(torch.tensor(3)).item() == 12
    loaded.bind(torch.zeros(16, 16), torch.zeros(16, 16))
    torch.testing.assert_close(loaded.logits(torch.ones(16)).detach(), weights["lm_head.weight"].sum(dim=1))
    assert loaded.embed(torch.tensor(3)).sum().item() == 16


def test_dtype_is_that_of_the_tensors_unless_asked(tmp_path):
    raw = tiny.smallest(dtype="bfloat16")
    path = tiny.write_drafter(tmp_path / "d", raw, {n: t.bfloat16() for n, t in tiny.tensors(raw).items()})
    assert load_drafter(path).dtype == torch.bfloat16
    assert load_drafter(path, dtype=torch.float32).dtype == torch.float32


def test_a_dtype_that_the_config_misstates_is_said(tmp_path):
    path = tiny.write_drafter(tmp_path / "d", tiny.smallest(dtype="float16"))
    with pytest.warns(UserWarning, match="dtype"):
        assert load_drafter(path).dtype == torch.float32


def test_all_that_is_wrong_comes_at_once(tmp_path):
    raw = tiny.smallest()
    weights = tiny.tensors(raw)
    del weights["layers.1.mlp.down_proj.weight"]
    weights["layers.0.attn_gate.weight"] = torch.zeros(3)
    weights["fc.weight"] = torch.zeros(16, 31)
    with pytest.raises(Refused) as caught:
        load_drafter(tiny.write_drafter(tmp_path / "d", raw, weights))
    for name in ("layers.1.mlp.down_proj.weight", "layers.0.attn_gate.weight", "fc.weight"):
        assert name in str(caught.value)


def test_a_truncated_file_and_a_missing_path_are_one_clear_error(tmp_path):
    path = tiny.write_drafter(tmp_path / "d", tiny.smallest())
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(BadInput, match=r"model\.safetensors"):
        load_drafter(path)
    with pytest.raises(BadInput, match="nowhere"):
        load_drafter(tmp_path / "nowhere")


@pytest.mark.parametrize("raw", [tiny.smallest(), tiny.smallest("dflash2"), tiny.smallest("dloop"),
                                 tiny.smallest(draft_vocab_size=11)])  # fmt: skip
def test_saved_drafters_have_the_released_names_and_load_again(tmp_path, raw):
    path = save_drafter(tiny.drafter(raw), tmp_path / "out", dtype=torch.float32)
    written, expected = load_file(path / "model.safetensors"), tiny.tensors(raw)
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in expected)
    assert load_drafter(path).config == tiny.drafter(raw).config


def test_saved_config_has_the_keys_that_engines_read(tmp_path):
    raw = tiny.smallest()
    config = json.loads((save_drafter(tiny.drafter(raw), tmp_path / "out") / "config.json").read_text())
    assert (config["architectures"], config["model_type"]) == (["DFlashDraftModel"], "qwen3")
    nested = config["dflash_config"]
    assert (nested["mask_token_id"], nested["target_layer_ids"]) == (39, [0, 2])
    assert config.get("block_size", nested.get("block_size")) == 5
    assert config["dtype"] == "bfloat16"
    with safe_open(tmp_path / "out/model.safetensors", "pt") as stored:
        assert stored.get_tensor("fc.weight").dtype == torch.bfloat16
        assert stored.metadata() == {"format": "pt"}


def test_nothing_half_written_stays(tmp_path, monkeypatch):
    drafter = tiny.drafter(tiny.smallest())
    old = save_drafter(drafter, tmp_path / "out", dtype=torch.float32)
    before = (old / "model.safetensors").read_bytes()

    def full_disk(*_args, **_more):
        raise OSError("no space left")

    monkeypatch.setattr("safetensors.torch.save_file", full_disk)
    for name in ("out", "new"):
        with pytest.raises(BadInput, match="no space"):
            save_drafter(drafter, tmp_path / name, overwrite=True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]
    assert (old / "model.safetensors").read_bytes() == before


def test_replacing_is_asked_for(tmp_path):
    drafter = tiny.drafter(tiny.smallest())
    path = save_drafter(drafter, tmp_path / "out", dtype=torch.float32)
    with pytest.raises(BadInput, match="exists already"):
        save_drafter(drafter, path)
    drafter.fc.weight.data.zero_()
    assert load_drafter(save_drafter(drafter, path, overwrite=True)).fc.weight.sum() == 0
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_a_fresh_drafter_takes_part_in_training_after_loading(tmp_path):
    loaded = load_drafter(tiny.write_drafter(tmp_path / "d", tiny.smallest()))
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    assert isinstance(loaded, Drafter)
