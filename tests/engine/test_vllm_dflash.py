"""A real vLLM on a CPU with a tiny random pair: same text, the reference drafter's blocks, the target's law."""

import math
from itertools import pairwise
from types import SimpleNamespace

import pytest
import tiny
import torch
from exact_law import pearson

from dflash_plugins import loading

pytestmark = pytest.mark.engine

K = tiny.BLOCK - 1


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    base = tmp_path_factory.mktemp("pair")
    # vLLM itself would ignore the scale without a word, which shows in every block.
    scale = {"input_embedding_scale": 1.5}
    sizes = {"max_position_embeddings": 4096, "num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
    raw = tiny.raw_config(draft=scale, **sizes)
    weights = tiny.tensors(raw)
    # Far apart, so that a layer normed with another layer's weight shows in the tokens.
    for layer in range(3):
        weights[f"layers.{layer}.self_attn.k_norm.weight"] *= 1 + layer
    drafter = tiny.write_drafter(base / "drafter", raw, weights)
    return tiny.write_target(base / "target", max_position_embeddings=4096), drafter, raw, weights


@pytest.fixture(scope="module")
def identity(run_job, pair):
    target, drafter, _, _ = pair
    return run_job("identity", target=target, drafter=drafter, vocab=tiny.VOCAB)


MODES = ("own", "right", "wrong", "random", "half")


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_greedy_text_is_the_plain_text_whatever_is_drafted(identity, mode):
    """F48, F49, F54: prompts of K, K + 1, K + 2, 2(K + 1) and other tokens in one batch."""
    assert [o["ids"] for o in identity["modes"][mode]] == [t["ids"] for t in identity["truth"]]


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_stops_and_budgets_cut_inside_a_block_as_plain_decoding_does(identity, mode):
    """F64, F69."""
    assert identity["cut_modes"][mode] == identity["cuts"]
    assert {o["reason"] for o in identity["cuts"]} == {"stop", "length"}
    assert [len(o["ids"]) for o in identity["cuts"][3:]] == [6, 1, 9]


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_the_drafters_context_ends_before_the_anchor_after_every_round(identity, mode):
    """F54: rounds follow each other by accepted + 1, the accepted counted by hand against the plain text."""
    truth = {tuple(t["prompt"]): t["prompt"] + t["ids"] for t in identity["truth"]}
    by_request = {}
    for one in identity["rounds"]:
        if one["mode"] == mode:
            by_request.setdefault(tuple(one["prompt"]), []).append(one)
    assert len(by_request) == len(truth)
    for prompt, rounds in by_request.items():
        whole = truth[prompt]
        own = [r for r in rounds if r["place"] >= len(prompt)]
        assert own[0]["place"] == len(prompt)
        for before, after in pairwise(own):
            rest = whole[before["place"] + 1 :]
            if len(rest) <= K:
                continue  # the plain text ends inside this block, so what was accepted after it is not known
            accepted = next((i for i, (a, b) in enumerate(zip(before["given"], rest, strict=False)) if a != b), K)
            assert after["place"] == before["place"] + accepted + 1
            assert after["anchor"] == whole[after["place"]]


@pytest.mark.slow
def test_a_prompt_alone_and_in_batches_gives_the_same_text(identity):
    assert [o["ids"] for o in identity["batches"].values()] == [identity["truth"][-1]["ids"]] * 3


@pytest.mark.slow
def test_a_prefix_hit_changes_nothing(identity):
    """F42."""
    assert [o["ids"] for o in identity["long_again"]] == [identity["long"]["ids"]] * 2
    before, first, second = identity["hits"]
    assert first == before
    assert second - first >= 1900


@pytest.mark.slow
def test_aborted_requests_leave_no_block_behind(identity):
    """F71."""
    before, after = identity["blocks"]
    assert after == before
    assert identity["finished"] >= 18


def reference_blocks(pair, rounds, texts):
    """The reference drafter's proposals for each (prompt, place), from the target in transformers; ties are None."""
    from dflash_plugins.config import read_draft_config
    from dflash_plugins.drafter import Drafter

    target_path, _, raw, weights = pair
    from transformers import AutoModelForCausalLM

    target = AutoModelForCausalLM.from_pretrained(target_path, dtype=torch.float32).eval()
    drafter = Drafter(read_draft_config(raw).require()).eval()
    drafter.load_state_dict(weights)
    drafter.bind(target.model.embed_tokens.weight, target.lm_head.weight)
    features = {}
    with torch.no_grad():
        for prompt, text in texts.items():
            states = target(torch.tensor([text]), output_hidden_states=True).hidden_states
            features[prompt] = torch.cat([states[i + 1] for i in tiny.TAPS], dim=-1)
        return [reference_block(drafter, features[tuple(r["prompt"])], r) for r in rounds]


def reference_block(drafter, features, one):
    place = one["place"]
    context = drafter.context_kv(features[:, :place], torch.arange(place)[None])
    ids = torch.tensor([[one["anchor"]] + [tiny.MASK] * K])
    logits = drafter.logits(drafter.hidden(ids, torch.arange(place, place + K + 1)[None], context))[0, 1:]
    top = logits.topk(2, dim=-1)
    # fp32 sums in another order differ by about 1e-5 here; a wrong norm weight by more than 1e-2.
    if bool((top.values[:, 0] - top.values[:, 1] < 1e-4).any()):
        return None
    return top.indices[:, 0].tolist()


def equal_share(pair, rounds, texts):
    """Of the rounds without ties: how many, and how many blocks equal the reference's."""
    own = [r for r in rounds if r["place"] >= len(r["prompt"])]
    expected = reference_blocks(pair, own, texts)
    kept = [(r["draft"], e) for r, e in zip(own, expected, strict=True) if e is not None]
    return len(kept), sum(draft == e for draft, e in kept)


@pytest.mark.slow
def test_drafted_blocks_are_the_reference_drafters(identity, pair):
    """Under every pattern of acceptance: the rounds of all modes, whatever was handed on."""
    texts = {tuple(t["prompt"]): t["prompt"] + t["ids"] for t in identity["truth"]}
    rounds, equal = equal_share(pair, identity["rounds"], texts)
    assert rounds >= 100
    assert equal == rounds


@pytest.mark.slow
def test_one_line_says_what_is_served(identity):
    lines = [line for line in identity["log"].splitlines() if "method dflash" in line]
    (line,) = lines
    for fact in ("mode one pass", "K 7 (trained for 7)", "bidirectional", "[0, 2]", "context_k_norm mended"):
        assert fact in line
    assert "expand_kernel mended" in line
    assert "rejection_kernel mended" in line
    assert identity["log"].count("replaced for every speculative method") == 2


@pytest.mark.slow
def test_blocks_differ_from_the_reference_when_the_mend_is_off(run_job, pair):
    """Fails when a release mends bug A: then the mend can go."""
    target, drafter, _, _ = pair
    off = {"DFLASH_PLUGINS_NO_MEND_CONTEXT_K_NORM": "1"}
    got = run_job("blocks", environment=off, target=target, drafter=drafter, vocab=tiny.VOCAB)
    assert "context_k_norm off" in got["log"]
    texts = {tuple(t["prompt"]): t["prompt"] + t["ids"] for t in got["truth"]}
    rounds, equal = equal_share(pair, got["rounds"], texts)
    assert rounds >= 100
    assert equal < 0.9 * rounds


@pytest.mark.slow
def test_a_bad_drafter_is_refused_with_every_reason_before_its_weights_load(run_job, pair, tmp_path):
    target, _, raw, weights = pair
    holed = {name: w for name, w in weights.items() if name != "layers.1.mlp.down_proj.weight"}
    holed |= {"fc.weight": weights["fc.weight"][:, :-1].contiguous(), "layers.0.attn_gate.weight": torch.ones(4)}
    other = tiny.raw_config(vocab_size=300, draft={"mask_token_id": 299, "target_layer_ids": [0, 9]})
    mixed = raw | {"layer_types": ["sliding_attention", "full_attention", "full_attention"], "sliding_window": 16}
    # Ids counted from 1, as other layouts count them: the last one is no layer any more. And a head without its map.
    shifted = tiny.raw_config("dloop", draft_vocab_size=96, draft={"target_layer_ids": [1, 4]})
    unmapped = {name: w for name, w in tiny.tensors(shifted).items() if name != "d2t"}
    drafters = [
        tiny.write_drafter(tmp_path / "holed", raw, holed),
        tiny.write_drafter(tmp_path / "other", other),
        tiny.write_drafter(tmp_path / "mixed", mixed, weights),
        tiny.write_drafter(tmp_path / "shifted", shifted, unmapped),
    ]
    got = run_job("start", target=target, drafters=[str(d) for d in drafters])
    holes, facts, kinds, shift = got["said"]
    for reason in ("target_layer_ids = [1, 4]", "d2t"):
        assert reason in shift
    # The target's weights have loaded four times at most, a drafter's never.
    assert "Loading drafter model" not in got["log"] or got["log"].count("Loading weights took") <= len(drafters)
    for reason in ("fc.weight", "[64, 127]", "layers.0.attn_gate.weight", "layers.1.mlp.down_proj.weight"):
        assert reason in holes
    for reason in ("vocab_size = 300", "target_layer_ids = [0, 9]"):
        assert reason in facts
    assert "mixed sliding/full" in kinds


@pytest.mark.slow
def test_every_method_starts_and_decodes_in_bfloat16(run_job, pair, tmp_path):
    """The dtype most are served in; while a model is built it is the default of every new tensor."""
    bf16 = {name: {"dtype": "bfloat16", "max_position_embeddings": 4096} for name in ("dflash", "dflash2", "dloop")}
    drafters = []
    for name, top in bf16.items():
        raw = tiny.raw_config(name, **top)
        weights = {key: w.bfloat16() for key, w in tiny.tensors(raw).items()}
        drafters.append(str(tiny.write_drafter(tmp_path / name, raw, weights)))
    sampling = {"dtype": "bfloat16", "draft_sample_method": "probabilistic"}
    assert run_job("start", target=pair[0], drafters=drafters, **sampling)["said"] == ["started"] * 3


SMALL_VOCAB = 48
SAMPLES = 3000
ALPHA = 1e-3


@pytest.fixture(scope="module")
def small_pair(tmp_path_factory):
    base = tmp_path_factory.mktemp("small")
    raw = tiny.raw_config(vocab_size=SMALL_VOCAB, draft={"mask_token_id": SMALL_VOCAB - 1})
    return tiny.write_target(base / "target", vocab_size=SMALL_VOCAB), tiny.write_drafter(base / "drafter", raw)


def exact_marginals(target_path, prompt):
    """Distributions of the second and third token at temperature 1, every path enumerated."""
    from transformers import AutoModelForCausalLM

    target = AutoModelForCausalLM.from_pretrained(target_path, dtype=torch.float32).eval()

    def after(prefixes):
        with torch.no_grad():
            return target(prefixes).logits[:, -1].double().softmax(-1)

    start, every = torch.tensor([prompt]), torch.arange(SMALL_VOCAB)
    first = after(start)[0]
    seconds = after(torch.cat([start.expand(SMALL_VOCAB, -1), every[:, None]], dim=1))
    pairs = torch.cartesian_prod(every, every)
    thirds = after(torch.cat([start.expand(len(pairs), -1), pairs], dim=1))
    joint = first[:, None] * seconds
    return first @ seconds, joint.flatten() @ thirds


@pytest.mark.slow
def test_sampled_tokens_follow_the_target_and_do_not_when_the_mend_is_off(run_job, small_pair):
    """Fails when a release mends bug B: then the mend can go."""
    target, drafter = small_pair
    prompt = [3, 11, 7, 30, 21]
    got = run_job("sampled", target=target, drafter=drafter, prompt=prompt, samples=SAMPLES)
    assert got["accepted"] > 100
    marginals = exact_marginals(target, prompt)
    for place, marginal in enumerate(marginals, start=1):
        p = {}
        for name in ("mended", "shipped"):
            drawn = torch.tensor([ids[place] for ids in got[name]])
            counts = torch.bincount(drawn, minlength=SMALL_VOCAB).double()
            p[name], _ = pearson(counts, marginal * SAMPLES)
        assert p["mended"] > ALPHA
        assert p["shipped"] < ALPHA


def test_chi_square_of_hand_made_counts():
    """Pearson's statistic of (60, 40) against (50, 50) is 4; one degree of freedom leaves 0.0455."""
    two = torch.tensor([60.0, 40.0], dtype=torch.float64), torch.tensor([50.0, 50.0], dtype=torch.float64)
    assert pearson(*two)[0] == pytest.approx(0.0455, abs=1e-4)


@pytest.fixture(scope="module")
def module():
    pytest.importorskip("vllm")
    from vllm_ext import dflash

    return dflash


def codes(module, raw, *, k=K, dtype="float32", v2=False, pp=1, stored="bfloat16"):
    """Codes of what is found about serving a drafter of this description."""
    from dflash_plugins.config import read_draft_config

    hf_config = SimpleNamespace(dflash_config=raw["dflash_config"])
    draft = SimpleNamespace(hf_config=hf_config)
    speculation = SimpleNamespace(num_speculative_tokens=k, draft_model_config=draft, use_local_argmax_reduction=v2)
    config = SimpleNamespace(
        speculative_config=speculation,
        model_config=SimpleNamespace(dtype=dtype, is_multimodal_model=False),
        use_v2_model_runner=v2,
        parallel_config=SimpleNamespace(pipeline_parallel_size=pp, data_parallel_size=1),
        lora_config=None,
        kv_transfer_config=None,
    )
    found = module.served_findings(read_draft_config(raw).require(), config, stored)
    return [finding.code for finding in found if finding.severity != "info"]


def test_what_is_said_of_serving_a_drafter(module, monkeypatch):
    """F07, F17, F22; and a loop or a walk is refused where the runner knows nothing of it."""
    monkeypatch.setattr(module.runner, "in_force", lambda: False)
    plain, loop = tiny.raw_config(), tiny.raw_config("dloop")
    assert codes(module, plain) == []
    assert codes(module, plain, dtype="float16") == ["dtype-range"]
    assert codes(module, plain, k=9) == ["k-beyond-block"]
    assert codes(module, plain, pp=2, dtype="float16") == ["dtype-range", "pipeline-parallel"]
    mixed = tiny.raw_config(layer_types=["sliding_attention", "full_attention"], sliding_window=16)
    assert codes(module, mixed) == ["mixed-layers"]
    assert codes(module, mixed, v2=True) == []
    assert codes(module, loop, v2=True) == ["runner-hooks", "loop-option"]
    moved = tiny.raw_config("dflash2", draft={"selector_top_k": None}, selector_top_k=4)
    del moved["dflash_config"]["selector_top_k"]
    assert codes(module, moved, v2=True) == ["place"]
    assert codes(module, tiny.raw_config("dflash2")) == ["runner-hooks"]
    assert codes(module, tiny.raw_config("dflash2"), v2=True) == []
    monkeypatch.setattr(module.runner, "in_force", lambda: True)
    assert codes(module, loop) == []
    assert codes(module, loop, k=2) == ["loop-prefix-dropped"]
    extend = tiny.raw_config("dloop", draft={"dloop": {"mode": "extend", "max_loops": 2, "gate": -0.5}})
    assert "loop-mode" in codes(module, extend)


def test_rows_that_are_not_finite_are_drafted_uniformly_and_counted(module):
    """F17."""
    inf, nan = float("inf"), float("nan")
    logits = torch.tensor([[1.0, 2.0], [nan, 1.0], [inf, 1.0], [-inf, -inf], [-inf, 3.0]])
    kept, dropped = module.drop_non_finite(logits)
    assert dropped.tolist() == [False, True, True, True, False]
    assert kept.tolist() == [[1.0, 2.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [-inf, 3.0]]


def test_the_engines_cap_and_scale_give_the_drafters_scale_and_cap(module):
    """x 3, multiplier 2, cap 4: 4 * tanh(6 / 4) = 3.6206; capped first it would be 2 * 4 * tanh(3 / 4) = 5.0812."""
    scale, soft_cap = module.engine_order(2.0, 4.0)
    assert math.tanh(3 / soft_cap) * soft_cap * scale == pytest.approx(3.6206, abs=1e-4)
    assert module.engine_order(2.0, None) == (2.0, None)


def test_the_drafter_gets_its_scales(module):
    """Head of two ids, hidden [3, 1]: rows 3 and 1, each times 2, capped at 4 by 4 * tanh(x / 4)."""
    from vllm.config import VllmConfig, set_current_vllm_config

    plain = {"input_embedding_scale": 1.5, "output_multiplier": 2.0, "final_logit_softcapping": 4.0}
    model = SimpleNamespace(
        model=SimpleNamespace(),
        config=SimpleNamespace(draft_vocab_size=2),
        logits_processor=SimpleNamespace(scale=1.0),
    )
    with set_current_vllm_config(VllmConfig()):
        module.DFlashPluginsDraftModel._apply_scales(model, SimpleNamespace(**plain))
    assert model.model.input_embedding_scale == 1.5
    model.logits_processor.logits_as_input = True
    logits = model.logits_processor(None, torch.tensor([[3.0, 1.0]]))
    torch.testing.assert_close(logits, torch.tensor([[3.6206, 1.8485]]), rtol=0, atol=1e-4)


def test_a_parameter_the_loader_left_out_is_refused_by_name(module):
    """F28."""
    written, left, lent, ids = (torch.nn.Parameter(torch.zeros(2)) for _ in range(4))
    ids = torch.nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)
    named = [("written", written), ("left.weight", left), ("lent", lent), ("ids", ids)]
    loading.mark_unwritten(named)
    written.data.copy_(torch.ones(2))
    with pytest.raises(module.Refused) as refused:
        loading.refuse_unwritten(named, shared=["lent"])
    assert [finding.key for finding in refused.value.findings] == ["left.weight"]
    left.data[0] = 1.0
    with pytest.raises(module.Refused):
        loading.refuse_unwritten(named, shared=["lent"])
    left.data[1] = 1.0
    loading.refuse_unwritten(named, shared=["lent"])
