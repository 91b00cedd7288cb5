"""Tiny TRAINED pairs for engine tests: ``pair("dflash2")`` gives the folders of a target and of a drafter for it.

The target is a small Qwen3 that has learnt a language of 72 words; the drafters come out of the package's own trainer.
All of it is built once, in a few minutes of one core, into the cache of the package under a hash of what decides the
weights; comments, docstrings and unrelated code do not change it. ``python tests/trained.py`` builds and shows a table.

The language has real entropy and correlated neighbours: what word follows is drawn, with odds that depend on the two
words before it, and words share first syllables. So a wrong walk, a wrong loop or a wrong q costs acceptance.
"""

from __future__ import annotations

import ast
import fcntl
import hashlib
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

PACKAGE = Path(__file__).resolve().parent.parent / "dflash_plugins"
METHODS = ("dflash", "dflash2", "dloop", "dloop-selector")
VOCAB, PAD, BOS, EOS, MASK = 256, 0, 1, 2, 255
BLOCK, PREFIX_LENGTHS, TAPS = 8, [1, 3], (0, 2)
WORDS, CLASSES, ODDS = 72, 8, (0.6, 0.25, 0.15)
CONSONANTS, VOWELS = "bdfgklmnprstvwxz", "aeiou"
SYLLABLES = [c + v for c in CONSONANTS for v in VOWELS]
FIRST_CHARACTER, FIRST_SYLLABLE = 3, 100
FIRST_INITIAL, INITIALS = FIRST_SYLLABLE + len(SYLLABLES), 24

# What decides the weights, by file of the package: definitions or single methods, or the whole file.
DECIDING: dict[str, str] = {
    "context.py": "ContextKV",
    "drafter.py": "Drafter scale_and_cap",
    "drafter_layers.py": "",
    "features.py": "FeatureTap",
    "layout.py": "block_input_ids training_mask training_positions layer_visibility real_columns",
    "selector.py": "CandidateSelector pair_scores move_scores candidates",
    "train/answers.py": "build_store _shard",
    "train/batches.py": "random_anchors make_batch _sequence",
    "train/blocks.py": "BatchBackbone.of BatchBackbone.rows BatchBackbone.hidden",
    "train/initialise.py": "initialise_from_target _identity_on_deepest_tap",
    "train/losses.py": "",
    "train/recipe.py": "Recipe.decay Recipe.has_selector Recipe.prefix_choices learning_rate draft_config "
    "_method_parts",
    "train/start.py": "take_tensors freeze_others",
    "train/store.py": "pack",
    "train/data.py": "split draft_vocabulary label_table",
    "train/trainer.py": "Trainer._build Trainer._train_step Trainer._draw Trainer._draw_parts Trainer.loss "
    "Trainer._part_loss Trainer._selector_loss Trainer._teacher _parameter_groups",
}


def pair(method: str) -> tuple[Path, Path]:
    """(target folder, drafter folder) of the tiny trained pair, both fp32; built when they are not in the cache."""
    if method not in METHODS:
        raise ValueError(f"no tiny trained pair {method!r}: there are {', '.join(METHODS)}")
    folder = built()
    return folder / "target", folder / method


def built(tell: Callable[[str], None] = lambda line: None) -> Path:
    """The folder with ``target``, one folder per method and ``report.json``; whole or not there at all."""
    cache = Path(os.environ.get("DFLASH_PLUGINS_CACHE") or "~/.cache/dflash-plugins").expanduser() / "tiny"
    folder = cache / fingerprint()
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be building it: wait for it
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=cache, prefix=".building-") as scratch, _one_thread():
                _build(Path(scratch) / "whole", tell)
                (Path(scratch) / "whole").rename(folder)
    return folder


def fingerprint() -> str:
    """Sixteen hex digits over the definitions that decide the weights, without their docstrings and comments."""
    here = ast.parse(Path(__file__).read_text(encoding="utf-8"))
    here.body = [node for node in here.body if getattr(node, "name", "") not in ("pair", "built", "main")]
    digest = hashlib.sha256(_dump(here).encode())
    for name, wanted in DECIDING.items():
        module = ast.parse((PACKAGE / name).read_text(encoding="utf-8"))
        found = dict(_definitions(module, ""))
        for node in [found[one] for one in wanted.split()] or [module]:
            digest.update(_dump(node).encode())
    return digest.hexdigest()[:16]


def _definitions(scope: ast.Module | ast.ClassDef, prefix: str) -> Iterator[tuple[str, ast.AST]]:
    for node in scope.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield prefix + node.name, node
        if isinstance(node, ast.ClassDef):
            yield from _definitions(node, f"{node.name}.")


def _dump(tree: ast.AST) -> str:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if (
            isinstance(body, list)
            and body
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
        ):
            body.pop(0)
    return ast.dump(tree)


# The language


@dataclass(frozen=True)
class Language:
    """``words``: token ids of each word. ``successors`` [words][class of the word before]: the next words, best first.

    A successor -1 ends the text. The class of a word is its number modulo ``CLASSES``.
    """

    words: list[list[int]]
    successors: list[list[list[int]]]

    @classmethod
    def drawn(cls, seed: int = 11) -> Language:
        """The language of this seed."""
        source = random.Random(seed)
        words = []
        for number in range(WORDS):
            rest = [FIRST_SYLLABLE + source.randrange(len(SYLLABLES)) for _ in range(number // INITIALS)]
            words.append([FIRST_INITIAL + number % INITIALS, *rest])
        successors = []
        for number in range(WORDS):
            drawn = [source.sample(range(WORDS), len(ODDS)) for _ in range(CLASSES)]
            if number % 9 == 5:
                drawn[source.randrange(CLASSES)][0] = -1
            successors.append(drawn)
        return cls(words, successors)

    def text(self, least: int, source: random.Random) -> list[int]:
        """Token ids of a drawn text of at least ``least`` tokens, or to its end with EOS."""
        before, word = source.randrange(WORDS), source.randrange(WORDS)
        ids = [BOS, *self.words[before]]
        while word >= 0 and len(ids) < least:
            ids += self.words[word]
            before, word = word, source.choices(self.successors[word][before % CLASSES], ODDS)[0]
        return [*ids, EOS] if word < 0 else ids


def prompts(count: int, seed: int = 1, lengths: Sequence[int] = range(6, 25)) -> list[list[int]]:
    """Beginnings of texts as token ids, of the ``lengths`` in turn."""
    language, source = Language.drawn(), random.Random(seed)
    chosen: list[list[int]] = []
    while len(chosen) < count:
        length = lengths[len(chosen) % len(lengths)]
        ids = language.text(length, source)[:length]
        if len(ids) == length and EOS not in ids:
            chosen.append(ids)
    return chosen


# The target


def _build(folder: Path, tell: Callable[[str], None]) -> None:
    from dflash_plugins.train.answers import Answer, build_store

    began = time.perf_counter()

    def say(line: str) -> None:
        tell(f"[{time.perf_counter() - began:4.0f} s] {line}")

    model = _trained_target(say)
    model.save_pretrained(folder / "target", safe_serialization=True)
    _write_tokenizer(folder / "target")
    answers = [Answer(p, r, "tiny") for p, r in _answers(model, say)]
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        build_store(answers, folder / "target", TAPS, Path(work) / "store", dtype=torch.float32)
        say(f"{len(answers)} answers and their features")
        report = {method: _train_drafter(method, folder, Path(work), say) for method in METHODS}
    report["seconds"] = round(time.perf_counter() - began)
    (folder / "report.json").write_text(json.dumps(report, indent=1), encoding="utf-8")


def _target_model() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=4096,
            bos_token_id=BOS,
            eos_token_id=EOS,
            pad_token_id=PAD,
            initializer_range=0.05,
            tie_word_embeddings=False,
            dtype="float32",
        )
    )


TARGET_STEPS, TARGET_ROWS, TARGET_LENGTH = 400, 16, 96


def _trained_target(say: Callable[[str], None]) -> Any:
    model, language = _target_model().train(), Language.drawn()
    source = random.Random(5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=TARGET_STEPS, pct_start=0.1)
    for step in range(TARGET_STEPS):
        ids = torch.stack([_packed(language, source) for _ in range(TARGET_ROWS)])
        logits = model(ids).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 99:
            say(f"target, step {step + 1} of {TARGET_STEPS}: loss {float(loss.detach()):.3f}")
    return model.eval()


def _packed(language: Language, source: random.Random) -> torch.Tensor:
    """Texts one after another, cut at the length; now and then a text begins after tokens of no meaning."""
    ids: list[int] = []
    while len(ids) < TARGET_LENGTH:
        if source.random() < 0.2:
            ids += source.choices(range(3, MASK), k=6)
        ids += language.text(TARGET_LENGTH, source)
    return torch.tensor(ids[:TARGET_LENGTH])


ANSWERS, HELD_OUT, ANSWER_LENGTH = 1000, 64, 96


@torch.no_grad()
def _answers(model: Any, say: Callable[[str], None]) -> Iterator[tuple[list[int], list[int]]]:
    """Prompts and the target's answers, greedy for the held out first ones and for every second one after them."""
    from transformers import DynamicCache

    generator = torch.Generator().manual_seed(9)
    by_length: dict[int, list[list[int]]] = {}
    for ids in prompts(ANSWERS, seed=2):
        by_length.setdefault(len(ids), []).append(ids)
    done: list[tuple[list[int], list[int]]] = []
    for together in by_length.values():
        cache, rows = DynamicCache(), torch.tensor(together)
        greedy = torch.arange(len(rows)) % 2 == 0
        ids, out = rows, []
        for _ in range(ANSWER_LENGTH):
            logits = model(input_ids=ids, past_key_values=cache, use_cache=True).logits[:, -1]
            drawn = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            ids = torch.where(greedy[:, None], logits.argmax(-1, keepdim=True), drawn)
            out.append(ids)
        ends = torch.cat(out, dim=1).tolist()
        done += [
            (prompt, row[: row.index(EOS) + 1] if EOS in row else row, bool(one))
            for prompt, row, one in zip(together, ends, greedy, strict=True)
        ]
    say("answers")
    mixed = [done[i] for i in torch.randperm(len(done), generator=generator).tolist()]
    mixed = [one for one in mixed if len(one[1]) > BLOCK]
    held = [one for one in mixed if one[2]][:HELD_OUT]
    kept = held + [one for one in mixed if one not in held]
    return ((prompt, row) for prompt, row, _ in kept)


def _write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer: printable characters, syllables, and syllables after a space."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": PAD, "<bos>": BOS, "<eos>": EOS, "<mask>": MASK}
    characters = ["Ġ", "Ċ", *(chr(code) for code in range(33, 127))]
    vocabulary |= {one: FIRST_CHARACTER + i for i, one in enumerate(characters)}
    vocabulary |= {one: FIRST_SYLLABLE + i for i, one in enumerate(SYLLABLES)}
    initials = SYLLABLES[:: len(SYLLABLES) // INITIALS][:INITIALS]
    vocabulary |= {"Ġ" + one: FIRST_INITIAL + i for i, one in enumerate(initials)}
    merges = [(one[0], one[1]) for one in SYLLABLES] + [("Ġ", one) for one in initials]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", mask_token="<mask>"
    ).save_pretrained(folder)


# The drafters

COMMON: dict[str, Any] = {
    "num_layers": 2, "block_size": BLOCK, "mask_token_id": MASK, "draft_vocab_size": None, "short_k": None,
    "soft_share": 0.5, "precision": "fp32", "held_out_sequences": HELD_OUT, "anchors_per_sequence": 16,
    "selector_top_k": 8, "learning_rate": 4e-3,
}  # fmt: skip
OF_METHOD: dict[str, dict[str, Any]] = {
    "dflash": {"method": "dflash", "steps": 300},
    "dflash2": {"method": "dflash2", "steps": 200},
    "dloop": {"method": "dloop", "steps": 200, "prefix_lengths": PREFIX_LENGTHS},
    "dloop-selector": {"method": "dloop", "steps": 200, "prefix_lengths": PREFIX_LENGTHS, "dloop_selector": True},
}


def _train_drafter(method: str, folder: Path, work: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Trains into ``folder / method``; all but the plain one start from the plain one. Its figures."""
    from dflash_plugins.train.run import run

    settings = COMMON | OF_METHOD[method]
    name, steps = settings.pop("method"), settings.pop("steps")
    if method != "dflash":
        settings["start_from"] = str(folder / "dflash")
    data, target = work / "store", folder / "target"
    done = run(method=name, target=target, data=data, out=work / method, steps=steps, settings=settings)
    Path(done.path).rename(folder / method)
    say(f"{method}: loss {done.loss:.3f}, {done.emitted_per_round:.2f} emitted per round, {done.seconds:.0f} s")
    return {"emitted_per_round": done.emitted_per_round, "accepted_by_slot": done.accepted_by_slot}


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def main() -> int:
    """Build what is missing, with progress, and show how the drafters do on held-out answers."""
    folder = built(lambda line: print(line, flush=True))
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    print(f"{folder}: built in {report['seconds']} s; greedy, K = {BLOCK - 1}")
    print(f"{'drafter':<16}{'emitted':>8}   accepted by slot")
    for method in METHODS:
        slots = " ".join(f"{rate:.2f}" for rate in report[method]["accepted_by_slot"])
        print(f"{method:<16}{report[method]['emitted_per_round']:>8.2f}   {slots}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
