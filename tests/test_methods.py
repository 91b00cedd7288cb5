import warnings

import pytest
import tiny
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dflash_plugins.config import DraftConfig, read_draft_config
from dflash_plugins.drafter import Drafter
from dflash_plugins.errors import BadInput, Refused
from dflash_plugins.methods import METHODS, method_of
from dflash_plugins.proposals import Dense, OneHot, Sparse

K, N = 4, 6  # anchor at position 6: six context columns
UNIFORMS = [0.13, 0.91, 0.46, 0.74]


def looped(backbone: str, prefixes: list[int], **top):
    """A D-Loop description over the backbone of another method."""
    raw = tiny.smallest(backbone, **top)
    raw["architectures"] = ["DLoopDraftModel"]
    raw["dflash_config"] = raw["dflash_config"] | {"dloop": {"mode": "refine", "prefix_lengths": prefixes}}
    return raw


CASES = {
    # name: (raw config, windows of both layers, prefixes the oracle runs)
    "dflash": (tiny.smallest(), [None, None], ()),
    "dflash, reduced head": (tiny.smallest(draft_vocab_size=11), [None, None], ()),
    "dflash2": (tiny.smallest("dflash2"), [6, 6], ()),
    "dflash2, reduced head": (tiny.smallest("dflash2", draft_vocab_size=11), [6, 6], ()),
    "dloop, two passes": (looped("dflash", [1]), [None, None], (1,)),
    "dloop, three passes": (looped("dflash", [1, 3]), [None, None], (1, 3)),
    "dloop over dflash2": (looped("dflash2", [2]), [6, 6], (2,)),
}


def drafted(drafter, raw, anchors=(5,), lengths=(N,), k=K, **sampling):
    features = tiny.features(raw, len(anchors), max(lengths))
    context = drafter.context_kv(features, tiny.columns(features), torch.tensor(lengths))
    method = method_of(drafter.config)
    return method.draft(drafter, torch.tensor(anchors), torch.tensor(lengths), context, k, **sampling)


def q_rows(proposals, row=0, vocab=40):
    """q of every slot as a dictionary from token to probability."""
    out = []
    for slot in range(proposals.num_slots):
        slots = torch.full((len(proposals.lengths),), slot)
        dense = proposals.q.row(proposals.ids, slots, vocab)[row]
        out.append({token: p for token, p in enumerate(dense.tolist()) if p > 0})
    return out


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("name", CASES)
def test_proposals_and_q_equal_an_independent_oracle(name, temperature):
    raw, windows, prefixes = CASES[name]
    drafter = tiny.drafter(raw)
    got = drafted(drafter, raw, temperature=temperature, uniforms=torch.tensor([UNIFORMS]))
    features = tiny.features(raw, 1, N)[0].numpy()
    plain = tiny.plain(raw, windows=windows)
    expected = plain.draft(5, N, features, K, prefixes, temperature, UNIFORMS)
    assert got.ids.tolist() == [expected.ids]
    assert got.lengths.tolist() == [K]
    for ours, theirs in zip(q_rows(got), expected.q, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-6)


def test_the_second_pass_changes_the_draft():
    """Otherwise the two-pass cases above would hold for a loop that never runs again."""
    raw = looped("dflash", [1])
    once, twice = (drafted(tiny.drafter(r), r).ids[0] for r in (tiny.smallest(), raw))
    assert once[0] == twice[0]
    assert once.tolist() != twice.tolist()


@pytest.mark.parametrize("backbone", ["dflash", "dflash2"])
@pytest.mark.parametrize("temperature", [None, 1.0])
def test_a_loop_without_prefixes_is_its_backbone(backbone, temperature):
    sampling = {"temperature": temperature, "uniforms": torch.tensor([UNIFORMS] * 2)}
    rows = {"anchors": (5, 9), "lengths": (N, 3)}
    plain = drafted(tiny.drafter(tiny.smallest(backbone)), tiny.smallest(backbone), **rows, **sampling)
    raw = looped(backbone, [])
    loop = drafted(tiny.drafter(raw), raw, **rows, **sampling)
    assert torch.equal(plain.ids, loop.ids)
    assert type(plain.q) is type(loop.q)
    if temperature:
        assert torch.equal(plain.q.probs, loop.q.probs)


def test_selected_tokens_stay_and_every_pass_runs_k_masks():
    raw = looped("dflash", [1, 3])
    drafter, seen = tiny.drafter(raw), []
    inner = drafter.hidden
    drafter.hidden = lambda ids, *rest, **more: seen.append(ids[0].tolist()) or inner(ids, *rest, **more)
    ids = drafted(drafter, raw).ids[0].tolist()
    assert seen == [[5, 39, 39, 39, 39], [5, ids[0], 39, 39, 39], [5, *ids[:3], 39]]


@pytest.mark.parametrize(
    ("name", "temperature", "kind"),
    [("dflash", None, OneHot), ("dflash", 0, OneHot), ("dflash", 1.0, Dense), ("dflash, reduced head", 1.0, Sparse),
     ("dflash2", None, OneHot), ("dflash2", 1.0, Sparse), ("dloop over dflash2", 1.0, Sparse)],
)  # fmt: skip
def test_kind_of_q(name, temperature, kind):
    raw = CASES[name][0]
    assert isinstance(drafted(tiny.drafter(raw), raw, temperature=temperature).q, kind)


@pytest.mark.parametrize("name", ["dflash", "dflash2", "dloop over dflash2"])
def test_batched_rows_equal_single_rows(name):
    """F49, with another temperature per row; a greedy row beside sampled ones has a one-hot q."""
    raw = CASES[name][0]
    drafter = tiny.drafter(raw)
    features = tiny.features(raw, 3, N)
    lengths, anchors = torch.tensor([6, 2, 4]), torch.tensor([5, 9, 11])
    temperatures, uniforms = torch.tensor([0.7, 0.0, 1.3]), torch.rand(3, K, generator=torch.Generator().manual_seed(0))
    draft = method_of(drafter.config).draft
    context = drafter.context_kv(features, tiny.columns(features), lengths)
    together = draft(drafter, anchors, lengths, context, K, temperature=temperatures, uniforms=uniforms)
    for row in range(3):
        one = slice(row, row + 1)
        alone = draft(
            drafter, anchors[one], lengths[one], context.row(row), K,
            temperature=temperatures[one], uniforms=uniforms[one],
        )  # fmt: skip
        assert torch.equal(together.ids[one], alone.ids)
        torch.testing.assert_close(together.q.probs[one], alone.q.probs, rtol=0, atol=1e-5)
    assert all(list(q.values()) == [1.0] for q in q_rows(together, row=1))


@pytest.mark.parametrize("name", ["dflash", "dflash2", "dloop, two passes"])
@pytest.mark.parametrize("temperature", [None, 1.0])
def test_a_row_with_non_finite_logits_is_dropped_and_harms_nobody(name, temperature):
    """F17: a feature too large for the dtype makes the row's draft worthless, not its neighbour's."""
    raw = CASES[name][0]
    drafter = tiny.drafter(raw)
    features = tiny.features(raw, 2, N)
    features[0, 1] = torch.inf
    context = drafter.context_kv(features, tiny.columns(features))
    where, uniforms = torch.tensor([N, N]), torch.tensor([UNIFORMS, UNIFORMS])
    got = method_of(drafter.config).draft(
        drafter, torch.tensor([5, 5]), where, context, K, temperature=temperature, uniforms=uniforms
    )
    assert got.dropped.tolist() == [True, False]
    assert got.lengths.tolist() == [0, K]
    alone = method_of(drafter.config).draft(
        drafter, torch.tensor([5]), where[:1], context.row(1), K, temperature=temperature, uniforms=uniforms[:1]
    )
    assert torch.equal(got.ids[1:], alone.ids)
    if temperature:
        assert got.q.probs.isfinite().all()


def test_draws_come_from_the_generator_given():
    raw = tiny.smallest()
    drafter = tiny.drafter(raw)
    one, two, three = (
        drafted(drafter, raw, temperature=5.0, generator=torch.Generator().manual_seed(seed)).ids for seed in (1, 1, 2)
    )
    assert torch.equal(one, two)
    assert not torch.equal(one, three)


def test_prefixes_at_or_beyond_the_served_k_are_dropped_and_said_so_once():
    raw = looped("dflash", [1, 3])
    drafter = tiny.drafter(raw)
    from dflash_plugins.methods import dloop

    dloop._warn_once.cache_clear()
    with pytest.warns(UserWarning, match=r"refine.*\[3\] are dropped"):
        got = drafted(drafter, raw, k=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(drafted(drafter, raw, k=3).ids, got.ids)
    assert torch.equal(got.ids, drafted(tiny.drafter(looped("dflash", [1])), raw, k=3).ids)


def test_every_method_has_one_record():
    assert set(METHODS) == {"dflash", "dflash2", "dloop-refine", "dloop-extend"}
    assert all(name == method.name for name, method in METHODS.items())
    with pytest.raises(TypeError):
        METHODS["other"] = METHODS["dflash"]


def test_extend_is_refused_by_name():
    config = read_draft_config(looped("dflash", [1])).require()
    extend = DraftConfig(**config.model_dump() | {"loop": {"mode": "extend", "max_loops": 2, "gate": -0.5}})
    drafter = Drafter(extend)
    with pytest.raises(Refused, match="extend"):
        method_of(extend).draft(drafter, torch.tensor([5]), torch.tensor([0]), drafter.empty_context(1), K)
    with pytest.raises(BadInput, match="no refine loop"):
        METHODS["dloop-refine"].draft(drafter, torch.tensor([5]), torch.tensor([0]), drafter.empty_context(1), K)


def test_a_walk_needs_a_selector():
    raw = tiny.smallest()
    drafter = tiny.drafter(raw)
    with pytest.raises(BadInput, match="no selector"):
        METHODS["dflash2"].draft(drafter, torch.tensor([5]), torch.tensor([0]), drafter.empty_context(1), K)


@pytest.mark.parametrize("name", ["dflash", "dflash2", "dloop over dflash2"])
def test_no_method_depends_on_values(name):
    """Everything but the final list form can be captured in a graph."""
    config = read_draft_config(CASES[name][0]).require()
    with FakeTensorMode():
        drafter = Drafter(config)
        drafter.bind(torch.empty(40, 16), torch.empty(40, 16))
        context = drafter.context_kv(torch.empty(2, N, 32), torch.zeros(2, N).long(), torch.zeros(2).long())
        anchors = torch.zeros(2).long()
        got = method_of(config).draft(
            drafter, anchors, anchors, context, K, temperature=torch.empty(2), uniforms=torch.empty(2, K)
        )
        assert got.ids.shape == (2, K)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", ["dloop, two passes", "dloop over dflash2"])
def test_a_captured_block_replays_as_it_runs(name):
    """Two passes and the walk in one graph: replayed on other anchors and draws, it drafts what eager code drafts."""
    raw = CASES[name][0]
    drafter = tiny.drafter(raw).cuda()
    features = tiny.features(raw, 2, N).cuda()
    context = drafter.context_kv(features, tiny.columns(features).cuda())
    anchors, places = torch.tensor([5, 9]).cuda(), torch.tensor([N, N]).cuda()
    uniforms, temperature = torch.rand(2, K, device="cuda"), torch.tensor([0.7, 0.0]).cuda()
    draft = method_of(drafter.config).draft

    def run():
        return draft(drafter, anchors, places, context, K, temperature=temperature, uniforms=uniforms)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for seed in range(5):
        anchors.copy_(torch.randint(0, 39, (2,), generator=torch.Generator().manual_seed(seed)))
        uniforms.copy_(torch.rand(2, K, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        eager = run()
        assert torch.equal(captured.ids, eager.ids)
        torch.testing.assert_close(captured.q.probs, eager.q.probs, rtol=0, atol=1e-6)


def test_a_row_that_was_not_finite_in_any_pass_is_dropped():
    raw = looped("dflash", [1])
    drafter, passes = tiny.drafter(raw), []
    inner = drafter.logits

    def first_pass_overflows(hidden):
        passes.append(hidden.shape[1])
        logits = inner(hidden)
        return logits.fill_(torch.inf) if len(passes) == 1 else logits

    drafter.logits = first_pass_overflows
    got = drafted(drafter, raw)
    assert passes == [1, 3]
    assert got.dropped.tolist() == [True]
