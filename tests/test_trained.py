"""The tiny trained pairs, without training them: their language, their tokenizer, and when they are built anew."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import trained


def test_texts_follow_the_language() -> None:
    language = trained.Language.drawn()
    starts = {tuple(word) for word in language.words}
    assert len(starts) == trained.WORDS
    for ids in trained.prompts(30, seed=4, lengths=(9, 8, 7)):
        assert len(ids) in (7, 8, 9)
        assert ids[0] == trained.BOS
        assert not {trained.PAD, trained.EOS, trained.MASK} & set(ids)
    assert trained.prompts(5, seed=4) == trained.prompts(5, seed=4) != trained.prompts(5, seed=5)


def test_texts_are_what_the_tokenizer_reads_and_writes(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    trained._write_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for ids in trained.prompts(20):
        assert tokenizer(tokenizer.decode(ids[1:]))["input_ids"] == ids[1:]
    json_text = '{"name": "bo", "n": [1, 2]}'
    assert tokenizer.decode(tokenizer(json_text)["input_ids"]) == json_text


def test_only_what_decides_the_weights_asks_for_new_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in trained.DECIDING:
        copy = tmp_path / name
        copy.parent.mkdir(exist_ok=True)
        copy.write_text((trained.PACKAGE / name).read_text())
    before = trained.fingerprint()
    monkeypatch.setattr(trained, "PACKAGE", tmp_path)
    assert trained.fingerprint() == before
    losses = tmp_path / "train" / "losses.py"
    losses.write_text(losses.read_text().replace("of a drafter and", "of a drafter, and also") + "# a remark\n")
    assert trained.fingerprint() == before
    losses.write_text(losses.read_text().replace("8: 4.0", "8: 5.0"))
    assert trained.fingerprint() != before


def test_there_is_no_pair_of_another_name() -> None:
    with pytest.raises(ValueError, match="eagle"):
        trained.pair("eagle")


def test_docstrings_do_not_decide() -> None:
    bare, told = (ast.parse(f"def f():\n    {text}return 1\n") for text in ("", '"""Told."""\n    '))
    assert trained._dump(bare) == trained._dump(told)
