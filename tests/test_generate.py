"""The reference generator: its text is the target's own, whatever the drafter says."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import tiny
import torch

from dflash_plugins.alignment import Lengths
from dflash_plugins.errors import BadInput
from dflash_plugins.features import FeatureTap
from dflash_plugins.generate import (
    Generation,
    ReferenceRequest,
    Settings,
    TargetCache,
    bind,
    draft_together,
    generate,
    rounds,
)
from dflash_plugins.methods import method_of
from dflash_plugins.sampling import Sampling

K = 7
PROMPTS = [[17, 3, 250], [5] * 8, list(range(40, 53)), [400, 9, 77, 9, 77, 9, 77, 301, 12, 50, 51]]


@cache
def target(kind: str = "qwen3") -> Any:
    """A tiny target in fp64: one row or many rows at once then give the same ids."""
    return tiny.target(kind).double()


@cache
def drafter(method: str = "dflash", kind: str = "qwen3") -> Any:
    return bind(tiny.drafter(tiny.raw_config(method), lent=False), target(kind))


def plain(prompt: Sequence[int], count: int, kind: str = "qwen3", *, model: Any = None, **options: Any) -> list[int]:
    """Greedy ids of transformers itself."""
    model = target(kind) if model is None else model
    model.generation_config.eos_token_id = options.pop("eos", None)
    inputs = torch.tensor([list(prompt)])
    with torch.no_grad():
        out = model.generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=count, do_sample=False, **options
        )
    return out[0, len(prompt) :].tolist()


def forced(texts: Sequence[Sequence[int]], prompts: Sequence[Sequence[int]], right: Callable[[int], int]) -> Any:
    """Drafts that follow the greedy ``texts`` for ``right(k)`` tokens and are wrong after."""

    def propose(request: int, ids: Sequence[int]) -> list[int]:
        text = [*texts[request], *[0] * K]
        done = len(ids) - len(prompts[request])
        wanted = text[done : done + K]
        agree = right(K)
        return [token if slot < agree else (token + 1) % tiny.VOCAB for slot, token in enumerate(wanted)]

    return propose


def check_lengths(one: Generation, prompt: Sequence[int]) -> None:
    """Target KV and drafter context are one behind the committed tokens after every round."""
    committed = len(prompt)
    for each in one.rounds:
        committed += len(each.emitted)
        assert each.lengths == Lengths(committed, committed - 1, committed - 1)
        assert each.accepted <= len(each.proposals) <= K
        assert each.emitted[: each.accepted] == each.proposals[: len(each.emitted)][: each.accepted]


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize("method", ["dflash", "dflash2", "dloop"])
def test_greedy_ids_are_those_of_the_target_alone(kind: str, method: str) -> None:
    prompts = PROMPTS[:3:2]
    done = generate(target(kind), drafter(method, kind), prompts, Settings(k=K, max_new_tokens=14))
    for one, prompt in zip(done, prompts, strict=True):
        assert list(one.ids) == plain(prompt, 14, kind)
        assert one.reason == "length"
        check_lengths(one, prompt)
        assert any(each.proposals for each in one.rounds)


def test_the_drafter_cannot_change_text_or_lengths() -> None:
    """F54: always wrong, always right, partly right."""
    texts = [plain(prompt, 25) for prompt in PROMPTS]
    chance = random.Random(5)
    for right in (lambda k: 0, lambda k: k, lambda k: chance.randrange(k + 1)):
        done = generate(
            target(), drafter(), PROMPTS, Settings(k=K, max_new_tokens=25), forced_drafts=forced(texts, PROMPTS, right)
        )
        for one, text, prompt in zip(done, texts, PROMPTS, strict=True):
            assert list(one.ids) == text
            assert one.rounds[-1].lengths == Lengths(len(prompt) + 25, len(prompt) + 24, len(prompt) + 24)
            check_lengths(one, prompt)
    always = generate(
        target(),
        None,
        PROMPTS,
        Settings(k=K, max_new_tokens=25),
        forced_drafts=forced(texts, PROMPTS, lambda k: k),
    )
    assert [[each.accepted for each in one.rounds] for one in always] == [[0, 7, 7, 7]] * len(PROMPTS)


def context_of(ids: Sequence[int]) -> Any:
    """The drafter's context from one plain target forward over ``ids``."""
    with torch.no_grad(), FeatureTap(target(), tiny.TAPS) as tap:
        target()(input_ids=torch.tensor([list(ids)]))
        return drafter().context_kv(tap.take(), torch.arange(len(ids))[None])


def test_the_drafters_context_is_that_of_one_forward_over_the_text() -> None:
    """After rounds of all kinds the context K/V equals the one computed from a single plain pass."""
    prompt, chance = PROMPTS[3], random.Random(9)
    text = plain(prompt, 40)
    propose = forced([text], [prompt], lambda k: chance.randrange(k + 1))
    request = ReferenceRequest(target(), drafter(), prompt, Settings(k=K, max_new_tokens=40, chunk=4))
    request.prefill()
    method = method_of(drafter().config)
    while request.reason is None:
        (drafted,) = draft_together([request], method)
        anchor, before = torch.tensor(request.ids[-1:]), len(request.ids) - 1
        fresh = method.draft(drafter(), anchor, torch.tensor([before]), context_of(request.ids[:-1]), K)
        assert drafted.lists() == fresh.lists()
        request.verify(dataclasses.replace(drafted, ids=torch.tensor([propose(0, request.ids)])))
    whole = [*prompt, *text][:-1]
    wanted = context_of(whole)
    assert request.context is not None
    assert request.context.positions.tolist() == [list(range(len(whole)))]
    for ours, one_pass in zip(request.context.keys + request.context.values, wanted.keys + wanted.values, strict=True):
        # fp32 rounding is below 1e-6; a row of a wrong position differs by more than 1e-2.
        torch.testing.assert_close(ours, one_pass, rtol=0, atol=1e-5)


def test_chunked_prefill_changes_nothing() -> None:
    whole = generate(target(), drafter(), PROMPTS, Settings(k=K, max_new_tokens=5))
    for chunk in (1, 5):
        assert generate(target(), drafter(), PROMPTS, Settings(k=K, max_new_tokens=5, chunk=chunk)) == whole


@pytest.mark.parametrize("length", [1, K, K + 1, K + 2, 2 * (K + 1)])
def test_prompts_as_long_as_a_block(length: int) -> None:
    """F48, and the shortest prompt."""
    prompt = [(7 * i + 11) % tiny.VOCAB for i in range(length)]
    (one,) = generate(target(), drafter(), [prompt], Settings(k=K, max_new_tokens=6))
    assert list(one.ids) == plain(prompt, 6)
    assert one.rounds[0].proposals == ()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", ["dflash", "dflash2", "dloop"])
def test_alone_and_in_a_batch_the_same(temperature: float, method: str) -> None:
    """F49: ids, proposals and lengths of every round, with every request's own seed."""
    settings = Settings(k=K, max_new_tokens=5, sampling=Sampling(temperature=temperature), seed=(3, 1, 4, 1))
    together = generate(target(), drafter(method), PROMPTS, settings)
    for index, prompt in enumerate(PROMPTS):
        own = dataclasses.replace(settings, seed=(settings.seed_of(index),))
        (alone,) = generate(target(), drafter(method), [prompt], own)
        assert [dataclasses.replace(each, request=index) for each in alone.rounds] == list(together[index].rounds)


def test_past_the_drafter_limit_it_decodes_plainly() -> None:
    """F73: 98 to 102 tokens with a limit of 100, and k 2 so that one more block fits."""
    prompt = [(31 * i + 2) % tiny.VOCAB for i in range(97)]
    (one,) = generate(target(), drafter(), [prompt], Settings(k=2, max_new_tokens=5, drafter_limit=100))
    assert list(one.ids) == plain(prompt, 5)
    sizes = [(each.lengths.committed, len(each.proposals)) for each in one.rounds]
    assert all(proposals == 0 for committed, proposals in sizes if committed > 101)
    assert sizes[1][1] == 2
    assert one.rounds[-1].lengths.committed == 102
    assert one.rounds[-1].lengths.drafter_context <= 100


@pytest.mark.parametrize("layer", [0, 2, 3])
def test_an_exception_inside_verify_leaves_everything_as_it_was(layer: int) -> None:
    """F73: the target dies half-way through its layers; the same round can be run again."""
    prompt = PROMPTS[2]
    request = ReferenceRequest(target(), drafter(), prompt, Settings(k=K, max_new_tokens=12))
    request.prefill()
    method = method_of(drafter().config)

    def die(*_: Any) -> None:
        raise RuntimeError("device lost")

    (proposals,) = draft_together([request], method)
    before, context = request.alignment.lengths, request.context
    handle = target().model.layers[layer].register_forward_pre_hook(die)
    try:
        with pytest.raises(RuntimeError, match="device lost"):
            request.verify(proposals)
    finally:
        handle.remove()
    assert request.alignment.lengths == before
    assert request.cache.length == before.target_kv
    assert request.context is context
    while request.reason is None:
        request.verify(draft_together([request], method)[0] if request.alignment.block().proposals else None)
    assert request.ids[len(prompt) :] == plain(prompt, 12)


def ended_by(position: int, prompt: Sequence[int], count: int = 30) -> tuple[list[int], int]:
    """The greedy text and an id that occurs in it first at about ``position``."""
    text = plain(prompt, count)
    firsts = [index for index, token in enumerate(text) if token not in text[:index]]
    return text, text[min(firsts, key=lambda index: abs(index - position))]


@pytest.mark.parametrize("position", [0, 3, 8])
@pytest.mark.parametrize("right", [0, 3, K])
def test_eos_cuts_inside_accepted_drafts_and_at_the_bonus(position: int, right: int) -> None:
    """F64, F69: first token, inside a draft, as bonus; ids given as a list."""
    prompt = PROMPTS[2]
    text, eos = ended_by(position, prompt)
    settings = Settings(k=K, max_new_tokens=30, eos_ids=(511, eos))
    (one,) = generate(target(), drafter(), [prompt], settings, forced_drafts=forced([text], [prompt], lambda k: right))
    wanted = plain(prompt, 30, eos=[511, eos])
    assert list(one.ids) == wanted == text[: text.index(eos) + 1]
    assert one.reason == "stop"
    check_lengths(one, prompt)
    (ignored,) = generate(target(), drafter(), [prompt], dataclasses.replace(settings, ignore_eos=True))
    assert list(ignored.ids) == text


@pytest.mark.parametrize("count", [1, 2, 8, 9, 13])
def test_max_tokens_is_exact_and_the_block_keeps_its_masks(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """F64: near the budget fewer proposals are verified, drafted by the same K mask rows."""
    prompt, blocks = PROMPTS[2], []
    ours = drafter()
    hidden = ours.hidden

    def watched(ids: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        blocks.append(ids[0].tolist())
        return hidden(ids, *rest, **named)

    monkeypatch.setattr(ours, "hidden", watched)
    (one,) = generate(target(), ours, [prompt], Settings(k=K, max_new_tokens=count))
    assert list(one.ids) == plain(prompt, count)
    assert one.reason == "length"
    assert all(block[1:] == [tiny.MASK] * K for block in blocks)
    left = count
    for each in one.rounds:
        assert len(each.proposals) == (0 if each is one.rounds[0] else min(K, left - 1))
        left -= len(each.emitted)


@pytest.mark.parametrize(("position", "least"), [(2, 6), (5, 3)])
def test_min_new_tokens_holds_the_end_back_as_transformers_does(position: int, least: int) -> None:
    """Only for the tokens before the minimum, also where it falls inside a round."""
    prompt = PROMPTS[2]
    text, eos = ended_by(position, prompt)
    wanted = plain(prompt, 12, eos=[eos], min_new_tokens=least)
    settings = Settings(k=K, max_new_tokens=12, eos_ids=(eos,), min_new_tokens=least)
    assert position < least or len(wanted) < 12
    for drafts in (None, forced([wanted], [prompt], lambda k: k), forced([text], [prompt], lambda k: k)):
        (one,) = generate(target(), drafter(), [prompt], settings, forced_drafts=drafts)
        assert list(one.ids) == wanted


def test_drafts_that_are_not_finite_are_dropped_and_counted() -> None:
    broken = bind(tiny.drafter(tiny.raw_config(), lent=False), target())
    broken.fc.weight.fill_(float("nan"))
    (one,) = generate(target(), broken, PROMPTS[:1], Settings(k=K, max_new_tokens=6))
    assert list(one.ids) == plain(PROMPTS[0], 6)
    assert [each.dropped for each in one.rounds] == [False, *[True] * 4, False]
    assert not any(each.proposals for each in one.rounds)


def test_one_draft_that_is_not_finite_leaves_its_neighbours_alone() -> None:
    settings = Settings(k=K, max_new_tokens=6)
    requests = [ReferenceRequest(target(), drafter(), prompt, settings, i) for i, prompt in enumerate(PROMPTS[:3])]
    for request in requests:
        request.prefill()
    assert requests[1].context is not None
    requests[1].context.values[0][:, 2] = float("nan")
    drafts = draft_together(requests, method_of(drafter().config))
    assert [bool(draft.dropped) for draft in drafts] == [False, True, False]
    assert [len(draft.lists()[0]) for draft in drafts] == [K, 0, K]


def test_every_request_has_its_own_random_numbers_and_a_seed_repeats_them() -> None:
    settings = Settings(k=K, max_new_tokens=8, sampling=Sampling(temperature=1.0), seed=11)
    first, second = generate(target(), drafter(), [PROMPTS[0]] * 2, settings)
    assert first.ids != second.ids
    assert [one.ids for one in generate(target(), drafter(), [PROMPTS[0]] * 2, settings)] == [first.ids, second.ids]


@pytest.mark.parametrize(("target_hit", "drafter_hit"), [(0, 0), (16, 16), (16, 5), (10**6, 10**6)])
def test_preempted_and_resumed_from_a_prefix_hit(target_hit: int, drafter_hit: int) -> None:
    """F41, F42: context slots beyond the drafter's hit are poisoned; none is read and the text is the same."""
    prompt, method = PROMPTS[3], method_of(drafter().config)
    request = ReferenceRequest(target(), drafter(), prompt, Settings(k=K, max_new_tokens=24))
    request.prefill()
    for _ in range(8):
        request.verify(draft_together([request], method)[0])
    assert request.context is not None
    for tensor in request.context.keys + request.context.values:
        tensor[:, drafter_hit:] = float("nan")
    held = request.alignment.lengths.target_kv
    request.preempt(min(target_hit, held), min(drafter_hit, held))
    assert request.cache.length == min(target_hit, drafter_hit, held)
    if request.alignment.lengths.target_kv < held:
        request.prefill()
    assert all(tensor.isfinite().all() for tensor in request.context.keys + request.context.values)
    while request.reason is None:
        last = request.verify(draft_together([request], method)[0] if request.alignment.block().proposals else None)
        assert not last.dropped
    assert request.ids[len(prompt) :] == plain(prompt, 24)


def recurrent_target() -> Any:
    """Gated delta rule and convolution states in three of four layers."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    torch.manual_seed(1)
    sizes = {
        "vocab_size": tiny.VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "linear_num_value_heads": 4,
        "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "num_experts": 0,
        "initializer_range": 0.2, "mlp_only_layers": [0, 1, 2, 3],
    }  # fmt: skip
    return Qwen3NextForCausalLM(Qwen3NextConfig(**sizes)).eval().double()


def sliding_target() -> Any:
    return tiny.target(
        "qwen3",
        use_sliding_window=True,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ).double()


@pytest.mark.parametrize("build", [recurrent_target, sliding_target])
def test_states_that_cannot_be_cropped_are_restored(build: Callable[[], Any]) -> None:
    model, chance = build(), random.Random(3)
    assert not TargetCache(model).croppable
    texts = [plain(prompt, 24, model=model) for prompt in PROMPTS[:2]]
    done = generate(
        model,
        bind(tiny.drafter(tiny.raw_config(), lent=False), model),
        PROMPTS[:2],
        Settings(k=K, max_new_tokens=24, chunk=5),
        forced_drafts=forced(texts, PROMPTS, lambda k: chance.randrange(k + 1)),
    )
    assert [list(one.ids) for one in done] == texts
    assert any(0 < each.accepted < K for one in done for each in one.rounds)


@pytest.mark.parametrize(("missing", "reused"), [(0, True), (1, False)])
def test_a_recurrent_state_is_reused_only_where_it_stands(missing: int, reused: bool) -> None:
    model, prompt = recurrent_target(), PROMPTS[0]
    request = ReferenceRequest(model, None, prompt, Settings(k=0, max_new_tokens=8))
    request.prefill()
    request.verify()
    held = request.alignment.lengths.target_kv
    request.preempt(held - missing)
    assert request.cache.length == (held if reused else 0)
    if not reused:
        request.prefill()
    while request.reason is None:
        request.verify()
    assert request.ids[len(prompt) :] == plain(prompt, 8, model=model)


def test_rounds_come_one_by_one() -> None:
    calls = []
    handle = target().register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        stream = rounds(target(), drafter(), PROMPTS[:1], Settings(k=K, max_new_tokens=9))
        for expected in (1, 2, 3):
            next(stream)
            assert len(calls) == expected
    finally:
        handle.remove()


def test_settings_and_a_missing_drafter_are_refused() -> None:
    with pytest.raises(BadInput, match=r"k must be at least 0, not -1; max_new_tokens .* not 0; chunk .* not 0"):
        Settings(k=-1, max_new_tokens=0, chunk=0)
    with pytest.raises(BadInput, match="no drafter"):
        next(rounds(target(), None, PROMPTS, Settings(k=3, max_new_tokens=4)))
    (one,) = generate(target(), None, PROMPTS[:1], Settings(k=0, max_new_tokens=4))
    assert list(one.ids) == plain(PROMPTS[0], 4)
