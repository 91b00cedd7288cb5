"""Checkpoints that SGLang by itself would draft other blocks with: the same drafts as everywhere, or refused."""

import random

import pytest
import tiny
import torch
from core_drafts import Reference, by_transformers, check_against_the_core, compared, own_rounds, ties

from dflash_plugins.check import check_pair
from dflash_plugins.convert import convert
from dflash_plugins.findings import errors

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.heavy]

K = tiny.BLOCK - 1
# How a drafter is written, how it would be if SGLang's own reading of the same tensors were right, and what we say.
SPECIAL = {
    "scale": (
        tiny.raw_config("dloop", draft={"input_embedding_scale": 3.0}),
        tiny.raw_config("dloop"),
        "input_embedding_scale, which SGLang does not read",
    ),
    "causal": (
        tiny.raw_config("dflash", draft={"causal": True}),
        tiny.raw_config("dflash"),
        "dflash_config.causal, which SGLang does not read",
    ),
    "reduced head": (
        tiny.raw_config("dflash", draft_vocab_size=128),
        None,
        "a head of its own with an id map, which SGLang does not read",
    ),
    "reduced head, in a loop": (
        tiny.raw_config("dloop", draft_vocab_size=128),
        None,
        "a head of its own with an id map, which SGLang does not read",
    ),
}


def requests():
    draw = random.Random(5)
    lengths = (K, K + 1, K + 2, 1, 12, 33, 70, 5, 2, 3, 9, 64)
    prompts = [[draw.randrange(3, tiny.VOCAB - 1) for _ in range(length)] for length in lengths]
    return [{"prompt": prompt, "max_new_tokens": 24, "ignore_eos": True} for prompt in prompts]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny.write_target(tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize("name", SPECIAL)
def test_drafts_are_the_reference_drafters(run_sglang, target, tmp_path, name):
    raw, misread, because = SPECIAL[name]
    drafter, asked = tiny.write_drafter(tmp_path / "drafter", raw), requests()
    got = run_sglang(
        "waves", target=target, drafter=drafter, waves={"all": {"requests": asked}}, watch=True, chunked_prefill_size=64
    )
    assert ties(by_transformers(target, asked), got["waves"]["all"]) <= 1
    (line,) = [line for line in got["log"].splitlines() if "ours because of" in line]
    assert because in line
    found = own_rounds(asked, got["waves"]["all"], got["rounds"])
    assert check_against_the_core(Reference(target, drafter), found, K) >= 100
    if misread is not None:
        other = Reference(target, tiny.write_drafter(tmp_path / "misread", misread, tiny.tensors(raw)))
        whole = compared(other, found, K)
        assert sum(draft != wrong for draft, wrong in whole) > 0.5 * len(whole)


def test_an_embedding_of_its_own_is_refused(run_sglang, target, tmp_path):
    raw = tiny.raw_config("dflash")
    weights = tiny.tensors(raw) | {"embed_tokens.weight": torch.randn(tiny.VOCAB, tiny.HIDDEN)}
    drafter = tiny.write_drafter(tmp_path / "drafter", raw, weights)
    got = run_sglang("waves", target=target, drafter=drafter, waves={}, check=False)
    assert got["returncode"] != 0
    assert "has no place for another" in got["log"]
    assert "export the drafter without embed_tokens" in got["log"]


def test_the_other_layout_is_not_read_by_sglang_which_the_check_says_before(run_sglang, target, tmp_path):
    drafter = tiny.write_drafter(tmp_path / "drafter", tiny.raw_config("dflash"))
    convert(drafter, tmp_path / "flat", "speculators")
    (found,) = errors(check_pair(tmp_path / "flat", target, engine="sglang"))
    assert (found.code, "convert" in found.mend) == ("sglang-flat-layout", True)
    with pytest.raises(pytest.fail.Exception, match="Should have a `model_type` key"):
        run_sglang("waves", target=target, drafter=tmp_path / "flat", waves={"all": {"requests": requests()}})
    convert(tmp_path / "flat", tmp_path / "back", "released")
    assert errors(check_pair(tmp_path / "back", target, engine="sglang")) == ()
