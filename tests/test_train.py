"""The trainer: losses by hand, the information boundary, resumption, bad input."""

from __future__ import annotations

import json
import math
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from dflash_plugins.cli import _parse_settings
from dflash_plugins.errors import BadInput
from dflash_plugins.train.answers import Answer, build_store, read_answers
from dflash_plugins.train.batches import every_anchor, make_batch, random_anchors
from dflash_plugins.train.blocks import BatchBackbone
from dflash_plugins.train.evaluate import _walk, held_out
from dflash_plugins.train.export import command_lines
from dflash_plugins.train.losses import IGNORED, block_loss, keep_best, slot_weights, unexpected
from dflash_plugins.train.prompts import Prompt, finish_opening, training_prompts
from dflash_plugins.train.recipe import Recipe, learning_rate
from dflash_plugins.train.store import FeatureStore, write_shard
from dflash_plugins.train.trainer import Trainer

RECIPE: dict[str, Any] = {
    "num_layers": 2,
    "mask_token_id": tiny.MASK,
    "draft_vocab_size": 64,
    "steps": 6,
    "sequences_per_step": 2,
    "anchors_per_sequence": 4,
    "held_out_sequences": 2,
}


def _response(token: int) -> list[int]:
    """Twenty tokens in 3..39, each decided by the one before it."""
    ids = []
    for _ in range(20):
        token = 3 + (7 * token + 1) % 37
        ids.append(token)
    return ids


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny target and a feature store of 24 answers of it."""
    folder = tmp_path_factory.mktemp("train")
    target = tiny.write_target(folder / "target")
    generator = torch.Generator().manual_seed(3)
    answers = [
        Answer(
            torch.randint(3, 500, (5 + i % 4,), generator=generator).tolist(),
            _response(3 + i),
            "test",
        )
        for i in range(24)
    ]
    build_store(answers, target, [0, 2], folder / "store", dtype=torch.float32)
    return target, folder / "store"


def test_slot_weights_decay_from_one() -> None:
    assert slot_weights(3, 4.0).tolist() == pytest.approx([1.0, math.exp(-0.25), math.exp(-0.5)])


def test_block_loss_by_hand() -> None:
    logits = torch.log(torch.tensor([[[0.5, 0.25, 0.25], [0.2, 0.2, 0.6]]]))
    labels = torch.tensor([[1, IGNORED]])
    weights = torch.tensor([1.0, 0.5])
    assert float(block_loss(logits, labels, weights)) == pytest.approx(-math.log(0.25))
    both = block_loss(logits, torch.tensor([[1, 2]]), weights)
    assert float(both) == pytest.approx((-math.log(0.25) - 0.5 * math.log(0.6)) / 1.5)


def test_soft_loss_by_hand() -> None:
    logits = torch.log(torch.tensor([[[0.5, 0.25, 0.25]]]))
    teacher = torch.log(torch.tensor([[[0.1, 0.9, 1e-9]]]))
    soft = -(0.1 * math.log(0.5) + 0.9 * math.log(0.25))
    mixed = block_loss(logits, torch.tensor([[0]]), torch.ones(1), teacher=teacher, soft_share=0.25)
    assert float(mixed) == pytest.approx(0.75 * -math.log(0.5) + 0.25 * soft, rel=1e-5)


def test_a_soft_label_may_be_of_the_best_tokens_only() -> None:
    teacher = torch.log(torch.tensor([[[0.5, 0.1, 0.3, 0.1]]]))
    kept = keep_best(teacher, 2)
    assert kept.softmax(-1).flatten().tolist() == pytest.approx([0.625, 0.0, 0.375, 0.0])
    assert keep_best(teacher, None) is teacher
    logits = torch.log(torch.tensor([[[0.4, 0.4, 0.1, 0.1]]]))
    loss = block_loss(logits, torch.tensor([[0]]), torch.ones(1), teacher=kept, soft_share=1.0)
    assert float(loss) == pytest.approx(-(0.625 * math.log(0.4) + 0.375 * math.log(0.1)))


def test_what_is_not_expected_to_be_accepted_by_hand() -> None:
    chances = torch.tensor([[0.5, 0.5, 1.0], [0.2, 0.1, 0.1], [1.0, 1.0, 1.0]])
    known = torch.tensor([[True, True, True], [True, False, True], [False, False, False]])
    first, second = 1 - (0.5 + 0.25 + 0.25) / 3, 1 - 0.2 / 3
    assert float(unexpected(chances.log(), known)) == pytest.approx((first + second) / 2)


def test_the_expected_objective_spends_nothing_behind_a_token_that_cannot_be_proposed() -> None:
    logits = torch.randn(1, 3, 5, requires_grad=True)
    weights = torch.zeros(3)
    block_loss(logits, torch.tensor([[2, IGNORED, 1]]), weights, expected_weight=1.0).backward()
    assert logits.grad is not None
    assert logits.grad[0, 0].abs().sum() > 0
    assert logits.grad[0, 1:].abs().sum() == 0


def test_the_decay_of_the_block_size_may_be_set_otherwise() -> None:
    assert (Recipe().decay(), Recipe(block_size=16).decay(), Recipe(gamma=1.5).decay()) == (4.0, 7.0, 1.5)


def test_store_gives_back_what_was_written(data: tuple[Path, Path]) -> None:
    store = FeatureStore(data[1])
    ref = store.sequences[5]
    assert (ref.stop - ref.start, ref.prompt_length) == (26, 6)
    model = tiny.target()
    layers: list[torch.Tensor] = []
    for index in (0, 2):
        model.model.layers[index].register_forward_hook(
            lambda module, args, out: layers.append(out[0] if isinstance(out, tuple) else out)
        )
    with torch.no_grad():
        model(store.ids(ref).long()[None])
    expected = torch.cat(layers, dim=-1)[0]
    assert torch.allclose(store.rows(ref, "features").float(), expected, rtol=1e-2, atol=1e-2)


def test_several_folders_are_one_store(data: tuple[Path, Path], tmp_path: Path) -> None:
    more = tmp_path / "more"
    build_store([Answer(list(range(3, 9)), list(range(20, 40)), "more")], data[0], [0, 2], more)
    one, both = FeatureStore(data[1]), FeatureStore(data[1], more)
    assert both.sequences[: len(one.sequences)] == one.sequences
    assert both.sources() == [*one.sources(), "more"]
    assert both.ids(both.sequences[-1]).tolist() == [*range(3, 9), *range(20, 40)]
    assert torch.equal(both.rows(both.sequences[0], "final"), one.rows(one.sequences[0], "final"))
    with pytest.raises(BadInput, match=r"nothing: no shard"):
        FeatureStore(data[1], tmp_path / "nothing")


def test_labels_are_the_tokens_after_the_anchor(data: tuple[Path, Path]) -> None:
    store = FeatureStore(data[1])
    ref = store.sequences[0]
    ids = store.ids(ref).tolist()
    last = len(ids) - 2
    batch = make_batch(store, [ref], [torch.tensor([7, last])], 3)
    assert batch.anchor_ids.tolist() == [[ids[7], ids[last]]]
    assert batch.labels.tolist() == [[ids[8:11], [ids[-1], IGNORED, IGNORED]]]
    final = store.rows(ref, "final")
    assert torch.equal(batch.final[0, 0], final[7:10])


def test_anchors_lie_in_the_response(data: tuple[Path, Path]) -> None:
    ref = FeatureStore(data[1]).sequences[0]
    drawn = random_anchors(ref, 500, torch.Generator().manual_seed(0))
    length = ref.stop - ref.start
    assert set(drawn.tolist()) == set(range(ref.prompt_length, length - 1)) == set(every_anchor(ref).tolist())


def test_a_block_never_reads_its_own_answer(data: tuple[Path, Path], tmp_path: Path) -> None:
    """The information boundary: features at and after the anchor must not change the block's hidden states."""
    trainer = Trainer(Recipe(**RECIPE), *data, tmp_path)
    store, ref = trainer.store, trainer.train_refs[0]
    batch = make_batch(store, [ref], [torch.tensor([9, 15])], 7)
    nothing = batch.anchor_ids.flatten()[:, None][:, :0]

    def rows() -> torch.Tensor:
        return BatchBackbone.of(trainer.drafter, batch, 7).rows(nothing)

    with torch.no_grad():
        before = rows()
        batch.features[:, 9:] = 77.0
        after = rows()
        assert torch.equal(before[0], after[0])
        assert not torch.equal(before[1], after[1])
        batch.features[:, 8] = 77.0
        assert not torch.equal(before[0], rows()[0])


def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(data: tuple[Path, Path], tmp_path: Path) -> None:
    whole = Trainer(Recipe(**RECIPE), *data, tmp_path / "whole")
    assert whole.run()
    first = Trainer(Recipe(**RECIPE), *data, tmp_path / "legs")
    for _ in range(3):
        first._train_step()
        first.step += 1
    first.save()
    second = Trainer(Recipe(**RECIPE), *data, tmp_path / "legs")
    assert second.step == 3
    assert second.run()
    for (name, a), b in zip(whole.drafter.named_parameters(), second.drafter.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_another_recipe_does_not_resume(data: tuple[Path, Path], tmp_path: Path) -> None:
    Trainer(Recipe(**RECIPE), *data, tmp_path).save()
    with pytest.raises(BadInput, match="learning_rate"):
        Trainer(Recipe(**{**RECIPE, "learning_rate": 0.5}), *data, tmp_path)


def test_a_state_older_than_a_setting_had_its_default(data: tuple[Path, Path], tmp_path: Path) -> None:
    first = Trainer(Recipe(**RECIPE), *data, tmp_path)
    del first.facts["precision"]
    first.save()
    Trainer(Recipe(**RECIPE), *data, tmp_path)
    with pytest.raises(BadInput, match="precision"):
        Trainer(Recipe(**{**RECIPE, "precision": "fp32"}), *data, tmp_path)


def test_the_end_may_be_moved_on_the_way(data: tuple[Path, Path], tmp_path: Path) -> None:
    assert Trainer(Recipe(**RECIPE), *data, tmp_path).run()
    longer = Trainer(Recipe(**{**RECIPE, "steps": 8}), *data, tmp_path)
    assert longer.step == 6
    assert longer.run()
    assert longer.step == 8


def test_training_lowers_the_loss(data: tuple[Path, Path], tmp_path: Path) -> None:
    losses: list[float] = []
    recipe = Recipe(
        **{
            **RECIPE,
            "steps": 60,
            "sequences_per_step": 8,
            "anchors_per_sequence": 8,
            "soft_share": 0.0,
            "learning_rate": 5e-3,
        }
    )
    Trainer(recipe, *data, tmp_path).run(tell=lambda progress: losses.append(progress.loss))
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])


def test_walk_takes_every_round_once() -> None:
    assert _walk([2, 9, 9, 0, 1, 9, 0]) == [2, 0, 1, 0]


def test_answers_shorter_than_a_block_are_not_held_out(data: tuple[Path, Path], tmp_path: Path) -> None:
    answers = [Answer([5, 6, 7], list(range(3, 3 + n)), "test") for n in (3, 20, 4, 20, *[5] * 30)]
    build_store(answers, data[0], [0, 2], tmp_path / "mixed")
    trainer = Trainer(Recipe(**{**RECIPE, "draft_vocab_size": None}), data[0], tmp_path / "mixed", tmp_path / "run")
    assert [ref.stop - ref.start for ref in trainer.held_refs] == [23, 23]
    assert len(trainer.train_refs) == 32
    build_store(answers[4:], data[0], [0, 2], tmp_path / "short")
    with pytest.raises(BadInput, match="0 of them with 8 response tokens"):
        Trainer(Recipe(**RECIPE), data[0], tmp_path / "short", tmp_path / "other")


def test_held_out_counts_rounds(data: tuple[Path, Path], tmp_path: Path) -> None:
    trainer = Trainer(Recipe(**RECIPE), *data, tmp_path)
    result = held_out(trainer.drafter, trainer.store, trainer.held_refs, 3)
    assert result.emitted_per_round == pytest.approx(1 + sum(result.accepted_by_slot))
    assert list(result.accepted_by_slot) == sorted(result.accepted_by_slot, reverse=True)


def test_the_drafts_head_holds_the_targets_rows(data: tuple[Path, Path], tmp_path: Path) -> None:
    trainer = Trainer(Recipe(**RECIPE), *data, tmp_path)
    head = trainer.tensors.head()
    ids = trainer.drafter.target_ids(torch.arange(64))
    assert torch.equal(ids, trainer.vocabulary)
    assert trainer.drafter.lm_head is not None
    assert torch.equal(trainer.drafter.lm_head.weight, head[ids])
    assert not trainer.drafter.lm_head.weight.requires_grad
    seen = {token for ref in trainer.train_refs for token in trainer.store.ids(ref)[ref.prompt_length :].tolist()}
    assert seen <= set(ids.tolist())


def test_learning_rate_warms_up_and_falls() -> None:
    recipe = Recipe(steps=1000, learning_rate=1.0)
    rates = [learning_rate(recipe, step) for step in (0, 99, 500, 999)]
    assert rates[0] == pytest.approx(0.01, rel=0.01)
    assert rates[1] > 0.95
    assert rates[3] < 0.03 < rates[2] < rates[1]


def test_shards_that_disagree_are_refused(data: tuple[Path, Path], tmp_path: Path) -> None:
    from dflash_plugins.train.store import StoreMeta

    source = FeatureStore(data[1])
    tensors = {name: source._files[0].get_tensor(name) for name in source._files[0].keys()}  # noqa: SIM118
    write_shard(tmp_path / "shard-00000.safetensors", tensors, StoreMeta("sha256:a", (0, 2)), ["x"])
    write_shard(tmp_path / "shard-00001.safetensors", tensors, StoreMeta("sha256:b", (0, 2)), ["x"])
    with pytest.raises(BadInput, match="disagree"):
        FeatureStore(tmp_path)


def test_answers_that_are_no_answers_are_named(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text(json.dumps({"prompt_ids": [1], "response_ids": [2]}) + "\n{oops\n")
    with pytest.raises(BadInput, match="line 2"):
        read_answers(path, tmp_path)


def test_prompts_are_the_same_for_a_seed_and_mixed() -> None:
    first = training_prompts(total=200, seed=5)
    assert first == training_prompts(total=200, seed=5)
    assert {p.source for p in first[:60]} >= {"self", "stdlib", "problems"}


def test_a_stub_ends_with_its_docstring() -> None:
    stub = Prompt("def f(", "self", opening=True, stub=True)
    done = finish_opening(stub, 'a):\n    """Add one."""\n    return a + 1')
    assert done == Prompt('def f(a):\n    """Add one."""\n', "self")
    assert finish_opening(stub, "a): return a") is None


def test_train_exports_what_it_trained(data: tuple[Path, Path], tmp_path: Path) -> None:
    from dflash_plugins.drafter import load_drafter
    from dflash_plugins.train.run import run

    settings = {key: value for key, value in RECIPE.items() if key != "steps"}
    report = run(method="dflash", target=data[0], data=data[1], out=tmp_path, steps=3, settings=settings)
    assert report.finished
    trained = Trainer(Recipe(**{**RECIPE, "steps": 3}), *data, tmp_path).drafter
    loaded = load_drafter(Path(report.path))
    assert loaded.config.draft_vocab_size == 64
    for name, tensor in trained.state_dict().items():
        assert torch.equal(loaded.state_dict()[name].float(), tensor.to(loaded.state_dict()[name].dtype).float()), name
    card = (Path(report.path) / "README.md").read_text()
    assert f"{report.response_tokens:,}" in card
    words = shlex.split(card.partition("## Command\n\n```\n")[2].partition("```")[0].replace("\\\n", " "))
    assert words[:6] == ["dflash-plugins", "train", "--method", "dflash", "--target", "TARGET"]
    said = _parse_settings([value for flag, value in pairwise(words) if flag == "--set"])
    assert Recipe.of({"steps": 3, **said}) == Recipe.of({"steps": 3, **settings})


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "dloop", "prefix_lengths": [1, 2], "short_k": None, "learning_rate": 1e-05, "gamma": 1.5},
        {
            "method": "dflash2",
            "start_from": "base/drafter",
            "train_only": ["*conv*", "norm.weight"],
            "precision": "fp32",
        },
    ],
)
def test_the_command_on_a_card_is_the_recipe(settings: dict[str, Any]) -> None:
    recipe = Recipe.of(settings)
    words = shlex.split("".join(line.removesuffix("\\") for line in command_lines(recipe, ["one", "two"])))
    options = [(flag, value) for flag, value in pairwise(words) if flag.startswith("--")]
    said = _parse_settings([value for flag, value in options if flag == "--set"])
    assert Recipe.of({"method": dict(options)["--method"], **said}) == recipe
    assert [value for flag, value in options if flag == "--data"] == ["one", "two"]


def test_a_file_of_answers_needs_layer_ids(data: tuple[Path, Path], tmp_path: Path) -> None:
    from dflash_plugins.train.run import run

    path = tmp_path / "answers.jsonl"
    rows = [{"prompt_ids": [5, 6, 7], "response_ids": _response(3 + i)} for i in range(12)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {key: value for key, value in RECIPE.items() if key != "steps"}
    arguments: dict[str, Any] = {"method": "dflash", "target": data[0], "data": path, "out": tmp_path / "o", "steps": 1}
    with pytest.raises(BadInput, match="target_layer_ids"):
        run(**arguments, settings=settings)
    report = run(**arguments, settings={**settings, "target_layer_ids": [0, 2]})
    assert report.response_tokens == 11 * 20


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"method": "medusa"}, "medusa"),
        ({"settings": {"larning_rate": 1}}, "larning_rate"),
        ({"data": Path("nowhere")}, "nowhere"),
        ({"target": Path("nowhere")}, "nowhere"),
    ],
)
def test_train_names_what_is_wrong(data: tuple[Path, Path], tmp_path: Path, change: dict[str, Any], named: str) -> None:
    from dflash_plugins.train.run import run

    arguments: dict[str, Any] = {"method": "dflash", "target": data[0], "data": data[1], "out": tmp_path / "out"}
    with pytest.raises(BadInput, match=named):
        run(**(arguments | change))
    assert not (tmp_path / "out").exists()


def test_a_run_goes_on_with_more_data_but_not_with_less(data: tuple[Path, Path], tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    shard = next(data[1].glob("shard-*"))
    for number in range(2):
        (store / f"shard-{number:05d}.safetensors").write_bytes(shard.read_bytes())
    first = Trainer(Recipe(**RECIPE), data[0], store, tmp_path / "run")
    first.save()
    (store / "shard-00002.safetensors").write_bytes(shard.read_bytes())
    more = Trainer(Recipe(**RECIPE), data[0], store, tmp_path / "run")
    assert more.held_refs == first.held_refs
    assert len(more.train_refs) > len(first.train_refs)
    more.save()
    (store / "shard-00002.safetensors").unlink()
    with pytest.raises(BadInput, match="3 shards"):
        Trainer(Recipe(**RECIPE), data[0], store, tmp_path / "run")
