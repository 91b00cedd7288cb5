"""Features computed while training runs: those of a store, in few forwards, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

from dflash_plugins.errors import BadInput
from dflash_plugins.features import FeatureTap
from dflash_plugins.train import live as module
from dflash_plugins.train.answers import Answer, build_store, read_answers
from dflash_plugins.train.batches import Source, every_anchor, make_batch
from dflash_plugins.train.live import LiveFeatures, target_rows
from dflash_plugins.train.recipe import Recipe
from dflash_plugins.train.run import run
from dflash_plugins.train.store import FeatureStore
from dflash_plugins.train.trainer import Trainer

RECIPE: dict[str, Any] = {
    "mask_token_id": tiny.MASK, "draft_vocab_size": 64, "steps": 12, "sequences_per_step": 4, "anchors_per_sequence": 6,
    "held_out_sequences": 2, "precision": "fp32", "learning_rate": 3e-3,
}  # fmt: skip
LAYERS = [0, 2]
# bf16 keeps eight bits: where two fp32 sums differ in their last bits, a rounded value may differ by one of its own.
ONE_BF16_STEP = {"rtol": 2**-7, "atol": 1e-5}


def answers_of(count: int) -> list[Answer]:
    """Answers of mixed lengths, so that any two of them need padding."""
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(3, 90, (9 + 5 * i % 18,), generator=generator).tolist() for i in range(count)]
    return [Answer(row[:6], row[6:], f"source {i % 3}") for i, row in enumerate(rows)]


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def as_rows(answers: list[Answer]) -> list[dict[str, Any]]:
    return [{"prompt_ids": a.prompt_ids, "response_ids": a.response_ids, "source": a.source} for a in answers]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A tiny target, a file of 40 answers, and the feature store of the same answers."""
    folder = tmp_path_factory.mktemp("live")
    target, answers = tiny.write_target(folder / "target"), answers_of(40)
    build_store(answers, target, LAYERS, folder / "store", dtype=torch.float32)
    return target, write(folder / "answers.jsonl", as_rows(answers)), folder / "store"


@pytest.fixture(scope="module")
def live(data: tuple[Path, Path, Path]) -> LiveFeatures:
    return LiveFeatures(data[1], data[0], LAYERS, dtype=torch.float32)


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many sequences each forward of the target took."""
    taken: list[int] = []

    def counted(model: Any, tap: FeatureTap, sequences: list[Tensor]) -> Any:
        taken.append(len(sequences))
        return target_rows(model, tap, sequences)

    monkeypatch.setattr(module, "target_rows", counted)
    return taken


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_rows_of_padded_sequences_are_those_of_each_alone(kind: str) -> None:
    model, sequences = tiny.target(kind), [torch.tensor(a.prompt_ids + a.response_ids) for a in answers_of(5)]
    found = target_rows(model, FeatureTap(model, LAYERS), sequences)
    for ids, (features, final) in zip(sequences, found, strict=True):
        with torch.no_grad(), FeatureTap(model, LAYERS) as tap:
            alone = model.model(ids[None]).last_hidden_state[0]
            wanted = tap.take()[0]
        assert features.dtype == final.dtype == torch.float32
        # Of the largest value: another token's row, or one that saw the padding, would be off by about one.
        for rows, right in ((features, wanted), (final, alone)):
            torch.testing.assert_close(rows, right, rtol=0, atol=1e-5 * float(right.abs().max()))


def test_it_stands_where_a_store_of_the_same_answers_stands(data: tuple[Path, Path, Path], live: LiveFeatures) -> None:
    store = FeatureStore(data[2])
    sources: list[Source] = [live, store]
    assert sources[0].sequences == sources[1].sequences
    assert (live.meta, live.sources(), len(live.paths)) == (store.meta, store.sources(), len(store.paths))
    for ref in store.sequences:
        assert torch.equal(live.ids(ref), store.ids(ref))
        assert live.ids(ref).dtype == torch.int32
        for name in ("features", "final"):
            found, wanted = live.rows(ref, name), store.rows(ref, name)
            assert found.dtype == wanted.dtype == torch.bfloat16
            torch.testing.assert_close(found, wanted, **ONE_BF16_STEP)


def test_shards_are_counted_as_a_store_counts_them(data: tuple[Path, Path, Path], tmp_path: Path) -> None:
    path = write(tmp_path / "many.jsonl", as_rows(answers_of(257)))
    found = LiveFeatures(path, data[0], LAYERS)
    assert found.paths == [path, path]
    assert (found.sequences[256].shard, found.sequences[256].start) == (1, 0)
    wanted = answers_of(257)[256]
    assert found.ids(found.sequences[256]).tolist() == wanted.prompt_ids + wanted.response_ids


def test_a_step_is_computed_in_one_forward_and_kept(data: tuple[Path, Path, Path], forwards: list[int]) -> None:
    live = LiveFeatures(data[1], data[0], LAYERS, keep=2)
    refs = live.sequences[:4]
    anchors = [every_anchor(ref)[:2] for ref in refs]
    first, again = (make_batch(live, refs, anchors, 3) for _ in range(2))
    assert forwards == [4]
    assert torch.equal(first.features, again.features)
    live.prepare([refs[1]])  # two are kept: this one and the one before it
    live.rows(refs[1], "features")
    live.rows(refs[3], "final")
    assert forwards == [4]
    live.rows(refs[0], "final")  # drops refs[3]
    live.prepare([refs[3], refs[1], refs[3]])
    assert forwards == [4, 1, 1]


def test_a_forward_takes_no_more_tokens_than_are_allowed(
    data: tuple[Path, Path, Path], forwards: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TOKENS_AT_ONCE", 50)
    live = LiveFeatures(data[1], data[0], LAYERS, dtype=torch.float32)
    lengths = [ref.stop - ref.start for ref in live.sequences[:6]]
    assert sorted(lengths, reverse=True) == [24, 19, 16, 14, 11, 9]  # 24 24 | 16 16 16 | 9 with padding
    live.prepare(live.sequences[:6])
    assert forwards == [2, 3, 1]
    store = FeatureStore(data[2])
    for ref in live.sequences[:6]:
        torch.testing.assert_close(live.rows(ref, "features"), store.rows(ref, "features"), **ONE_BF16_STEP)
    assert forwards == [2, 3, 1]


def test_autocast_of_an_evaluation_does_not_reach_the_target(data: tuple[Path, Path, Path], live: LiveFeatures) -> None:
    ref = live.sequences[3]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = LiveFeatures(data[1], data[0], LAYERS, dtype=torch.float32).rows(ref, "features")
    torch.testing.assert_close(under, live.rows(ref, "features"), **ONE_BF16_STEP)


def test_training_goes_as_it_goes_from_a_store(
    data: tuple[Path, Path, Path], live: LiveFeatures, tmp_path: Path, forwards: list[int]
) -> None:
    def losses(source: Any, out: Path) -> list[float]:
        found: list[float] = []
        trainer = Trainer(Recipe.of(RECIPE), data[0], source, out)
        trainer.run(tell=lambda progress: found.append(progress.loss))
        assert trainer.evaluate(3).rounds > 0
        return found

    stored = losses(data[2], tmp_path / "stored")
    assert not forwards
    computed = losses(live, tmp_path / "live")
    # A wrong row, layer or order moves a loss by far more; what is left is the rounding to bf16.
    assert computed == pytest.approx(stored, rel=1e-3)
    assert computed[-1] < computed[0]
    assert sum(forwards) <= 12 * 4 + 2
    assert max(forwards) == 4


def test_the_setting_chooses_between_live_and_stored(data: tuple[Path, Path, Path], tmp_path: Path) -> None:
    settings = {key: value for key, value in RECIPE.items() if key != "steps"} | {"target_layer_ids": LAYERS}
    answers = write(tmp_path / "answers.jsonl", as_rows(answers_of(40)))
    arguments: dict[str, Any] = {"method": "dflash", "target": data[0], "data": answers, "steps": 2}
    report = run(**arguments, out=tmp_path / "live", settings=settings | {"features": "live"})
    assert report is not None
    assert report.finished
    assert not (tmp_path / "answers.jsonl.features").exists()
    assert run(**arguments, out=tmp_path / "stored", settings=settings | {"features": "stored"}) is not None
    assert (tmp_path / "answers.jsonl.features").is_dir()


@pytest.mark.parametrize(
    ("where", "settings", "named"),
    [
        (2, {"features": "live"}, "a feature store holds its features"),
        (1, {"features": "live"}, "target_layer_ids"),
        (1, {"features": "lazy", "target_layer_ids": LAYERS}, "features=lazy: known are live, stored"),
        (1, {"features": "live", "target_layer_ids": [0, 9]}, "layers 0..3"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    data: tuple[Path, Path, Path], tmp_path: Path, where: int, settings: dict[str, Any], named: str
) -> None:
    with pytest.raises(BadInput, match=named):
        run(method="dflash", target=data[0], data=data[where], out=tmp_path, settings=settings)


GOOD = {"prompt_ids": [5, 6], "response_ids": [7, 8]}


@pytest.mark.parametrize(
    ("row", "named"),
    [
        (GOOD | {"response_ids": [3] * 511}, "line 2: 513 tokens, the target has 512 positions"),
        (GOOD | {"response_ids": [7, 512]}, "line 2: token id 512, the target's vocabulary has 512"),
        (GOOD | {"response_ids": []}, "line 2: the response is empty"),
        (GOOD | {"response_ids": [-1]}, "line 2: response_ids has to be a list of token ids"),
        (GOOD | {"prompt_ids": "56"}, "line 2: prompt_ids has to be a list of token ids"),
        ({"prompt": "Hello?", "response": "Hello!"}, "line 2: is text, and the target has no tokenizer"),
        ({"prompt_ids": [5, 6]}, r"line 2: needs prompt and response, .* has \['prompt_ids'\]"),
        ([5, 6], "line 2: an object is needed, not list"),
    ],
)
def test_an_answer_that_is_of_no_use_is_named(
    data: tuple[Path, Path, Path], tmp_path: Path, row: Any, named: str
) -> None:
    path = write(tmp_path / "answers.jsonl", [GOOD, row])
    with pytest.raises(BadInput, match=named):
        LiveFeatures(path, data[0], LAYERS)


def test_a_file_that_is_no_json_lines_is_named(data: tuple[Path, Path, Path], tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    for content, named in (
        (json.dumps(GOOD) + "\n{oops\n", "line 2: not JSON"),
        (json.dumps(GOOD) + "\n\n", "line 2: not JSON"),
        ("", "no answer in it"),
    ):
        path.write_text(content)
        with pytest.raises(BadInput, match=named):
            LiveFeatures(path, data[0], LAYERS)
    with pytest.raises(BadInput, match="cannot be read"):
        LiveFeatures(tmp_path / "nowhere", data[0], LAYERS)


TEMPLATE = (
    "<|start|>system\nYou are of help.<|end|>\n<|start|>user\n{{ messages[0]['content'] }}<|end|>\n<|start|>assistant"
)


@pytest.fixture(scope="module")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer of bytes that puts <bos> before a text and has a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = {one: 4 + i for i, one in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    special = {"<bos>": 0, "<eos>": 1, "<|start|>": 2, "<|end|>": 3}
    tokenizer = Tokenizer(models.BPE(vocab=special | letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    tokenizer.add_special_tokens(["<|start|>", "<|end|>"])
    folder = tmp_path_factory.mktemp("chatting")
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", chat_template=TEMPLATE
    )
    made.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def encode(chatting: Path) -> Callable[[str], list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(chatting)
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False))


MEASURING = (
    "Compose an engaging travel blog post about a recent trip to Hawaii.",
    "Express z-x in y",  # the second turn of an item, shorter than the guard's eight words
)


@pytest.mark.parametrize("text", MEASURING)
def test_a_measuring_prompt_is_found_in_ids_of_a_chat(
    chatting: Path, encode: Callable[[str], list[int]], tmp_path: Path, text: str
) -> None:
    chat = TEMPLATE.replace("{{ messages[0]['content'] }}", text)
    for prompt in (text, chat, "<|start|>user\nHi<|end|>" + chat):
        path = write(tmp_path / "answers.jsonl", [{"prompt_ids": encode(prompt), "response_ids": [9]}])
        with pytest.raises(BadInput, match="line 1: is a measuring prompt"):
            read_answers(path, chatting)
    text_row = write(tmp_path / "text.jsonl", [{"prompt": text, "response": "No."}])
    with pytest.raises(BadInput, match="line 1: is a measuring prompt"):
        read_answers(text_row, chatting)


def test_ids_of_an_ordinary_chat_pass(chatting: Path, encode: Callable[[str], list[int]], tmp_path: Path) -> None:
    chat = TEMPLATE.replace("{{ messages[0]['content'] }}", "Tell me a story about a dog that lives in a small town.")
    path = write(tmp_path / "answers.jsonl", [{"prompt_ids": encode(chat), "response_ids": [9]}])
    assert read_answers(path, chatting) == [Answer(encode(chat), [9], "file")]


def test_text_is_encoded_as_it_is_served(chatting: Path, encode: Callable[[str], list[int]], tmp_path: Path) -> None:
    """The template holds what stands before the prompt, and a response goes on: no <bos> is put before either."""
    row = {"prompt": "Hi\u2028there", "response": "Yes", "source": "mine"}
    path = tmp_path / "answers.jsonl"
    path.write_text(json.dumps(row, ensure_ascii=False) + "\n")
    chat = TEMPLATE.replace("{{ messages[0]['content'] }}", row["prompt"])
    assert read_answers(path, chatting) == [Answer(encode(chat), encode("Yes"), "mine")]
