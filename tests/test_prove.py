"""``prove`` on a fake engine: verdicts, what counts as a failure, and what is refused before an engine starts."""

import io
import json
import random

import pytest
import tiny
from fake_engine import FakeDriver
from rich.console import Console
from safetensors.torch import load_file

from dflash_plugins import prove
from dflash_plugins.driver import Completion
from dflash_plugins.errors import BadInput
from dflash_plugins.identity import compared_tokens, first_difference, judge, numerical_bound

PROMPTS = 3


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    base = tmp_path_factory.mktemp("pair")
    return tiny.write_target(base / "target"), tiny.write_drafter(base / "draft", tiny.raw_config())


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"id": f"p{n}", "ids": [n, n + 1]}) + "\n" for n in range(PROMPTS)))
    return path


@pytest.fixture
def proved(pair, prompts):
    def run(driver, **options):
        return prove.run("vllm", *pair, prompts=prompts, driver=driver, **({"max_tokens": 20} | options))

    return run


def done(*ids, reason="length"):
    return Completion(ids=ids, text=None, finish_reason=reason)


@pytest.mark.parametrize(
    ("gap", "best", "dtype", "verdict"),
    [
        (0.0, 16.0, "bfloat16", "tie"),
        (0.125, 16.0, "bfloat16", "numerical"),  # one unit in the last place of 16 with 8 significant bits
        (0.6, 16.0, "bfloat16", "FAIL"),
        (0.6, 60.0, "bfloat16", "FAIL"),  # whatever the scale
        (0.0, 16.0, "float32", "tie"),
        (5e-4, 16.0, "float32", "numerical"),
        (0.125, 16.0, "float32", "FAIL"),  # fp32 does not round like bf16
        (0.125, 16.0, "float16", "FAIL"),  # nor does fp16: one unit there is 1/64
        (1 / 64, 16.0, "float16", "numerical"),
        (0.125, 0.01, "bfloat16", "numerical"),  # small logits are differences of large sums
        (None, 16.0, "bfloat16", "FAIL"),
    ],
)
def test_gaps_are_called_what_they_are(gap, best, dtype, verdict):
    """F46."""
    assert judge(gap, numerical_bound(best, dtype)) == verdict


def test_first_difference():
    assert first_difference(done(1, 2, 3), done(1, 2, 3)) is None
    assert first_difference(done(1, 2, 3), done(1, 9, 3)) == 1
    assert first_difference(done(1, 2, reason="stop"), done(1, 2, 3)) == 2
    assert first_difference(done(1, 2), done(1, 2, reason="stop")) == 2
    assert compared_tokens(done(1, 2, 3), done(1, 9, 3)) == 2
    assert compared_tokens(done(1, 2, 3), done(1, 2, 3)) == 3


def test_same_ids_are_lossless(proved):
    report = proved(FakeDriver())
    assert report.lossless
    assert report.exit_code == 0
    assert (report.prompts, report.tokens, report.differences, report.k) == (PROMPTS, PROMPTS * 20, (), 7)
    assert report.emitted_per_round == 2.0
    assert report.accepted_by_slot == (1.0, 0.0, 0.0)


def test_a_real_gap_is_not_lossless_and_says_where(proved):
    driver = FakeDriver(deviate=lambda prompt, position: prompt == 1 and position in (5, 9), gap=0.6)
    report = proved(driver)
    assert not report.lossless
    assert report.exit_code == 1
    [found] = report.differences
    assert (found.prompt, found.position, found.verdict) == ("p1", 5, "FAIL")
    assert found.gap == pytest.approx(0.6)
    # The 14 tokens after the first difference of that prompt have other prefixes and are not compared.
    assert report.tokens == 2 * 20 + 6
    # The plain engine computed the logits again, for the prompt and the five tokens in common.
    name, rescored, how = driver.calls[-1]
    assert name == "plain"
    assert [len(row) for row in rescored] == [2 + 5]
    assert how.max_tokens == 1


@pytest.mark.parametrize(("gap", "dtype", "verdict"), [(0.0, "float32", "tie"), (0.125, "bfloat16", "numerical")])
def test_ties_and_rounding_are_listed_and_lossless(proved, gap, dtype, verdict):
    report = proved(FakeDriver(deviate=lambda prompt, position: position == 3, gap=gap), dtype=dtype)
    assert report.lossless
    assert [d.verdict for d in report.differences] == [verdict] * PROMPTS


def test_a_token_that_is_not_among_the_best_fails_even_at_a_tie_of_others(proved, monkeypatch):
    driver = FakeDriver(deviate=lambda prompt, position: 7 * (position == 3), gap=0.0)
    report = proved(driver)
    assert [d.verdict for d in report.differences] == ["FAIL"] * PROMPTS
    assert all(d.gap >= 9.0 for d in report.differences)


def test_a_text_that_ends_early_fails(proved):
    report = proved(FakeDriver(cut=12))
    assert {(d.position, d.gap, d.verdict) for d in report.differences} == {(12, None, "FAIL")}


def test_drafter_independence_runs_a_second_drafter_of_the_same_shape(proved, pair):
    seen = []

    class Watching(FakeDriver):
        def start(self, config):
            if config.draft:
                seen.append(
                    {name: tensor.clone() for name, tensor in load_file(f"{config.draft}/model.safetensors").items()}
                )
            return super().start(config)

    report = proved(Watching(), drafter_independence=True)
    assert report.drafter_independence.lossless
    own, shuffled = seen
    assert {n: t.shape for n, t in own.items()} == {n: t.shape for n, t in shuffled.items()}
    assert not own["fc.weight"].equal(shuffled["fc.weight"])
    assert own["fc.weight"].flatten().sort().values.equal(shuffled["fc.weight"].flatten().sort().values)


def test_a_failure_with_the_other_drafter_only_is_a_failure(proved, pair):
    class Leaky(FakeDriver):
        def start(self, config):
            self.deviate = lambda prompt, position: config.draft not in (None, str(pair[1])) and position == 4
            return super().start(config)

    report = proved(Leaky(), drafter_independence=True)
    assert not report.differences
    assert not report.lossless


def sampler(seed, shift):
    rng = random.Random(seed)

    def sample(name, position):
        weights = [4, 3, 2, 1]
        if shift and name != "plain" and position > 0:
            weights = weights[::-1]
        return rng.choices(range(4), weights)[0]

    return sample


def test_equal_distributions_pass_and_the_report_says_what_could_be_seen(proved):
    driver = FakeDriver(sample=sampler(1, shift=False))
    report = proved(driver, temperature=1.0, samples=200)
    assert report.lossless
    assert report.test.samples == PROMPTS * 200
    assert 0.05 < report.test.smallest_detectable_tv < 0.5
    assert {s.config.draft_sample_method for s in driver.started} == {"greedy", "probabilistic"}
    plain, speculative = (s.config for s in driver.started)
    assert plain.seed != speculative.seed  # else both arms would share their random numbers


def test_a_shifted_distribution_of_the_speculated_tokens_fails(proved):
    report = proved(FakeDriver(sample=sampler(1, shift=True)), temperature=1.0, samples=200)
    assert not report.lossless
    assert report.exit_code == 1
    assert report.test.p < report.test.alpha


def test_the_first_token_is_not_tested(proved):
    """It comes from the prompt's forward: were it among the data it would only dilute them."""
    rng = random.Random(2)

    def sample(name, position):
        return (name != "plain") if position == 0 else rng.randrange(4)

    assert proved(FakeDriver(sample=sample), temperature=1.0, samples=100).lossless


def test_json_keys_that_scripts_rely_on(proved):
    greedy = proved(FakeDriver(deviate=lambda prompt, position: position == 3, gap=0.0)).model_dump(mode="json")
    keys = {"lossless", "tokens", "prompts", "differences", "emitted_per_round", "accepted_by_slot"}
    assert keys <= set(greedy)
    assert {"prompt", "position", "gap", "verdict"} <= set(greedy["differences"][0])
    sampled = proved(FakeDriver(sample=sampler(1, shift=False)), temperature=1.0, samples=50).model_dump(mode="json")
    assert {"statistic", "p", "samples", "smallest_detectable_tv"} <= set(sampled["test"])


def test_people_read_the_same_outcome(proved):
    console = Console(width=200, record=True, file=io.StringIO())
    proved(FakeDriver(deviate=lambda prompt, position: position == 3, gap=0.6), drafter_independence=True).render(
        console
    )
    proved(FakeDriver(sample=sampler(1, shift=False)), temperature=1.0, samples=50).render(console)
    text = console.export_text()
    assert "FAIL: not lossless" in text
    assert "p = " in text


def test_no_round_proves_nothing(proved):
    with pytest.raises(BadInput, match="no speculative round"):
        proved(FakeDriver(rounds=0))


def test_other_flags_that_differ_are_refused(proved):
    """F40."""
    with pytest.raises(BadInput, match="differs in 1 flags besides speculation: max_num_batched_tokens"):
        proved(FakeDriver(flags={"max_num_batched_tokens": 1}))


def test_every_session_is_closed_also_after_an_error(proved):
    driver = FakeDriver(flags={"dtype": "other"})
    with pytest.raises(BadInput):
        proved(driver)
    assert len(driver.started) == 2
    assert all(session.closed for session in driver.started)


def test_prompts_without_room_are_named(pair, tmp_path):
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"id": "long", "ids": [1] * 500}) + "\n" + json.dumps({"id": "short", "ids": [1]}))
    with pytest.raises(BadInput, match=r"long \(500\)$"):
        prove.run("vllm", *pair, prompts=path, driver=FakeDriver(), max_tokens=20)


class NoStart(FakeDriver):
    def start(self, config):
        raise AssertionError("an engine was started")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"concurrency": 0}, "concurrency is 0"),
        ({"temperature": -1.0}, "temperature is -1"),
        ({"temperature": 1.0, "drafter_independence": True}, "needs temperature 0"),
        ({"temperature": 1.0, "samples": 0}, "samples is 0"),
    ],
)
def test_bad_arguments_are_refused_before_an_engine_starts(proved, options, reason):
    with pytest.raises(BadInput, match=reason):
        proved(NoStart(), **options)


def test_bad_files_are_refused_before_an_engine_starts(pair, prompts, tmp_path):
    target, draft = pair
    wide = tiny.raw_config()
    wide["hidden_size"] = 96
    broken = tiny.write_drafter(tmp_path / "broken", wide, tiny.tensors(tiny.raw_config()))
    for bad in ((target, tmp_path / "none"), (tmp_path / "none", draft), (target, broken)):
        with pytest.raises(BadInput):
            prove.run("vllm", *bad, prompts=prompts, driver=NoStart())
    with pytest.raises(BadInput, match=r"none\.jsonl"):
        prove.run("vllm", target, draft, prompts=tmp_path / "none.jsonl", driver=NoStart())
