import numpy as np
import pytest
import tiny
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dflash_plugins.config import read_draft_config
from dflash_plugins.context import ContextKV
from dflash_plugins.drafter import Drafter
from dflash_plugins.errors import BadInput, Refused
from dflash_plugins.layout import block_input_ids, block_positions, training_mask, training_positions
from dflash_plugins.selector import move_scores

# fp32 sums in another order than the oracle's fp64 loops; a wrong mask, norm or angle moves results by more than 1e-2.
CLOSE = {"rtol": 1e-4, "atol": 2e-4}

CAUSAL_FULL = {"is_causal": True}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4, "use_sliding_window": True}
VARIANTS = {
    # name: (raw config, causal, windows) - the last two by hand
    "dflash": (tiny.smallest(), [False, False], [None, None]),
    "causal": (tiny.smallest(**CAUSAL_FULL), [True, True], [None, None]),
    "sliding and full": (tiny.smallest(**MIXED), [True, False], [4, None]),
    "sliding, both ways": (tiny.smallest(**MIXED, is_causal=False), [False, False], [4, None]),
    "bias": (tiny.smallest(attention_bias=True), [False, False], [None, None]),
    "dflash2": (tiny.smallest("dflash2"), [False, False], [6, 6]),
    "dflash2, three taps": (tiny.smallest("dflash2", draft={"conv_kernel_size": 3}), [False, False], [6, 6]),
    "scaled and capped": (
        tiny.smallest(draft={"input_embedding_scale": 3.0, "output_multiplier": 0.5, "final_logit_softcapping": 2.0}),
        [False, False],
        [None, None],
    ),
    "wider target": (tiny.smallest(target_hidden_size=24), [False, False], [None, None]),
    "one head per key": (tiny.smallest(num_key_value_heads=4), [False, False], [None, None]),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_hidden_states_and_logits_equal_plain_loops(name):
    raw, causal, windows = VARIANTS[name]
    drafter, plain = tiny.drafter(raw), tiny.plain(raw, causal, windows)
    features = tiny.features(raw, 1, 7)
    ids = block_input_ids(torch.tensor([5]), 39, 4)
    context = drafter.context_kv(features, tiny.columns(features))
    hidden = drafter.hidden(ids, block_positions(torch.tensor([7]), 4), context)
    expected = plain.hidden(ids[0].tolist(), 7, features[0].numpy())
    np.testing.assert_allclose(hidden[0].numpy(), np.stack(expected), **CLOSE)
    logits = np.stack([plain.logits(row) for row in expected])
    np.testing.assert_allclose(drafter.logits(hidden)[0].numpy(), logits, **CLOSE)


def test_a_block_without_context_is_the_first_block_of_a_text():
    raw = tiny.smallest()
    drafter, ids = tiny.drafter(raw), torch.tensor([[5, 39, 39]])
    hidden = drafter.hidden(ids, torch.arange(3)[None], drafter.empty_context(1))
    expected = tiny.plain(raw).hidden([5, 39, 39], 0, np.zeros((0, 32)))
    np.testing.assert_allclose(hidden[0].numpy(), np.stack(expected), **CLOSE)


@pytest.mark.parametrize("method", ["dflash", "dflash2"])
def test_batched_rows_equal_single_rows_and_padding_is_never_read(method):
    """F41, F49: rows of other lengths beside it change nothing, and NaN in padded columns reaches nobody."""
    drafter = tiny.drafter(tiny.smallest(method))
    features = tiny.features(tiny.smallest(method), 3, 9)
    lengths = torch.tensor([9, 1, 4])
    for row, length in enumerate(lengths.tolist()):
        features[row, length:] = torch.nan
    context = drafter.context_kv(features, tiny.columns(features), lengths)
    ids = block_input_ids(torch.tensor([5, 6, 7]), 39, 4)
    together = drafter.hidden(ids, block_positions(lengths, 4), context)
    for row, length in enumerate(lengths.tolist()):
        alone_features = features[row : row + 1, :length]
        alone_context = drafter.context_kv(alone_features, tiny.columns(alone_features))
        alone = drafter.hidden(ids[row : row + 1], block_positions(lengths[row : row + 1], 4), alone_context)
        torch.testing.assert_close(together[row : row + 1], alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("method", ["dflash", "dflash2"])
def test_blocks_of_one_sequence_equal_the_served_ones(method):
    """Training computes each block as serving does, and the features of its own answer (NaN here) do not reach it."""
    raw = tiny.smallest(method)
    drafter, features, anchors = tiny.drafter(raw), tiny.features(raw, 1, 9), torch.tensor([2, 5, 6])
    context = drafter.context_kv(features, tiny.columns(features))
    ids = block_input_ids(torch.tensor([5, 6, 7]), 39, 4)
    flat = drafter.hidden(
        ids.flatten()[None],
        training_positions(anchors, 5)[None],
        context,
        mask=training_mask(anchors, 9, 5)[None],
        block=5,
    )
    for index, anchor in enumerate(anchors.tolist()):
        known = features[:, :anchor]
        served = drafter.hidden(
            ids[index : index + 1],
            block_positions(anchors[index : index + 1], 4),
            drafter.context_kv(known, tiny.columns(known)),
        )
        torch.testing.assert_close(flat[:, index * 5 : index * 5 + 5], served, rtol=0, atol=1e-5)


def test_gradients_reach_every_parameter():
    raw = tiny.smallest("dflash2")
    drafter = tiny.drafter(raw).requires_grad_(True)
    features = tiny.features(raw, 1, 6)
    context = drafter.context_kv(features, tiny.columns(features))
    hidden = drafter.hidden(block_input_ids(torch.tensor([5]), 39, 4), block_positions(torch.tensor([6]), 4), context)
    selector, five = drafter.candidate_selector, torch.arange(5)[None]
    scores = move_scores(selector, hidden, five, five[..., None].expand(-1, -1, 3), hidden[..., :3])
    (drafter.logits(hidden).square().sum() + scores.square().sum()).backward()
    assert [name for name, p in drafter.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0] == []


def test_fresh_convolutions_change_nothing():
    """A DFlash 2 drafter that is not trained yet computes what its DFlash backbone computes."""
    raw = tiny.smallest("dflash2")
    fresh = Drafter(read_draft_config(raw).require()).eval()
    fresh.bind(*tiny.shared(raw))
    backbone = Drafter(fresh.config.model_copy(update={"conv": None, "selector": None})).eval()
    backbone.bind(*tiny.shared(raw))
    backbone.load_state_dict({n: t for n, t in fresh.state_dict().items() if n in backbone.state_dict()})
    features, ids = tiny.features(raw, 1, 6), torch.tensor([[5, 39, 39]])
    one, two = (
        d.hidden(ids, torch.arange(6, 9)[None], d.context_kv(features, tiny.columns(features)))
        for d in (fresh, backbone)
    )
    torch.testing.assert_close(one, two)


def test_low_precision_keeps_rotary_angles_exact():
    """bf16 frequencies would turn position 300 by whole radians; bf16 weights alone move results by about 1 %."""
    raw = tiny.smallest(max_position_embeddings=4096)
    features, ids = tiny.features(raw, 1, 6), torch.tensor([[5, 39, 39]])
    where = torch.arange(300, 306)[None]
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        drafter = tiny.drafter(raw).to(dtype)
        context = drafter.context_kv(features.to(dtype), where)
        results.append(drafter.hidden(ids, torch.arange(306, 309)[None], context).float())
    assert (results[0] - results[1]).abs().mean() < 0.05


def test_own_head_and_id_map_win_over_the_targets():
    """F10: four head rows, d2t [0, 2, 5, 9], target vocabulary 16; draft argmax 3 is target token 12."""
    raw = tiny.smallest(vocab_size=16, draft_vocab_size=4, draft={"mask_token_id": 15})
    weights = tiny.tensors(raw) | {"d2t": torch.tensor([0, 2, 5, 9])}
    weights["lm_head.weight"] = torch.eye(16)[:4]
    drafter = tiny.drafter(raw, weights, lent=False)
    drafter.bind(torch.ones(16, 16), torch.full((16, 16), 9.0))
    assert torch.equal(drafter.lm_head.weight, torch.eye(16)[:4])
    logits = drafter.logits(torch.eye(16)[3])
    assert logits.shape == (4,)
    assert drafter.target_ids(logits.argmax()).item() == 12
    assert drafter.target_ids(torch.arange(4)).tolist() == [0, 3, 7, 12]


def test_own_embedding_wins_and_lent_tensors_are_neither_trained_nor_saved():
    raw = tiny.smallest()
    weights = tiny.tensors(raw) | {"embed_tokens.weight": torch.full((40, 16), 2.0)}
    drafter = tiny.drafter(raw, weights)
    assert drafter.embed(torch.tensor([3])).unique().tolist() == [2.0]
    names = {name for name, _ in drafter.named_parameters()} | set(drafter.state_dict())
    assert not {name for name in names if "shared" in name or "lm_head" in name}


def test_nothing_is_computed_with_tensors_nobody_lent():
    drafter = tiny.drafter(tiny.smallest(), lent=False)
    with pytest.raises(BadInput, match="embedding"):
        drafter.embed(torch.tensor([1]))
    with pytest.raises(BadInput, match="head"):
        drafter.logits(torch.zeros(16))
    with pytest.raises(BadInput, match=r"\[V, 16\]"):
        drafter.bind(torch.zeros(40, 8), torch.zeros(40, 16))
    with pytest.raises(BadInput, match="mask_token_id 39"):
        drafter.bind(torch.zeros(39, 16), torch.zeros(39, 16))


def test_a_description_that_cannot_be_computed_is_refused_with_all_reasons():
    config = read_draft_config(tiny.smallest("dflash2")).require()
    wrong = config.model_copy(update={"hidden_act": "gelu", "num_kv_heads": 3, "causal": (True,), "head_dim": 7})
    with pytest.raises(Refused) as caught:
        Drafter(wrong)
    assert {f.key for f in caught.value.findings} == {"hidden_act", "num_kv_heads", "causal", "head_dim"}


def test_a_scaled_rope_turns_slower():
    """Linear scaling by 4 at position 8 is no scaling at position 2."""
    scaled = tiny.drafter(tiny.smallest(rope_scaling={"rope_type": "linear", "factor": 4.0}))
    plain = tiny.drafter(tiny.smallest())
    for got, expected in zip(scaled._rotary(torch.tensor([8])), plain._rotary(torch.tensor([2])), strict=True):
        torch.testing.assert_close(got, expected)


def test_context_is_appended_cropped_and_stacked_by_real_lengths():
    raw = tiny.smallest()
    drafter, features = tiny.drafter(raw), tiny.features(raw, 1, 6)
    whole = drafter.context_kv(features, tiny.columns(features))
    first = drafter.context_kv(features[:, :2], torch.tensor([[0, 1]]))
    rest = drafter.context_kv(features[:, 2:], torch.tensor([[2, 3, 4, 5]]))
    joined = first.append(rest)
    assert joined.lengths.tolist() == [6]
    torch.testing.assert_close(joined.keys[1], whole.keys[1])
    cropped = joined.crop(torch.tensor([3]))
    assert cropped.positions.tolist() == [[0, 1, 2]]
    with pytest.raises(BadInput, match=r"\[4\]"):
        cropped.crop(torch.tensor([4]))
    both = ContextKV.stack([cropped, whole])
    assert both.lengths.tolist() == [3, 6]
    with pytest.raises(BadInput, match="without padding"):
        both.append(both)
    back = both.row(0)
    torch.testing.assert_close(back.values[0], cropped.values[0])
    ids = torch.tensor([[5, 39], [5, 39]])
    together = drafter.hidden(ids, torch.tensor([[3, 4], [6, 7]]), both)
    alone = drafter.hidden(ids[:1], torch.tensor([[3, 4]]), cropped)
    torch.testing.assert_close(together[:1], alone, rtol=0, atol=1e-5)


def test_shapes_never_depend_on_values():
    with FakeTensorMode():
        raw = tiny.smallest("dflash2")
        drafter = Drafter(read_draft_config(raw).require())
        drafter.bind(torch.empty(40, 16), torch.empty(40, 16))
        context = drafter.context_kv(torch.empty(2, 5, 32), torch.zeros(2, 5).long(), torch.zeros(2).long())
        hidden = drafter.hidden(torch.zeros(2, 5).long(), torch.zeros(2, 5).long(), context)
        assert drafter.logits(hidden).shape == (2, 5, 40)


def test_an_explicit_mask_does_not_open_padded_columns():
    """Sequences of other lengths in one training batch: a mask that forgets the padding changes nothing."""
    raw = tiny.smallest()
    drafter, features = tiny.drafter(raw), tiny.features(raw, 1, 9)
    lengths, anchors = torch.tensor([4]), torch.tensor([[6]])
    ids, positions = block_input_ids(torch.tensor([5]), 39, 4), training_positions(anchors, 5)
    padded = drafter.context_kv(features, tiny.columns(features), lengths)
    short = drafter.context_kv(features[:, :4], tiny.columns(features[:, :4]))
    wide = drafter.hidden(ids, positions, padded, mask=training_mask(anchors, 9, 5), block=5)
    narrow = drafter.hidden(ids, positions, short, mask=training_mask(anchors, 4, 5), block=5)
    torch.testing.assert_close(wide, narrow, rtol=0, atol=1e-5)
