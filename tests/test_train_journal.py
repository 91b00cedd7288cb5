"""What a run tells while it goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_plugins.errors import BadInput
from dflash_plugins.train.evaluate import HeldOut
from dflash_plugins.train.journal import LOG_FILE, Journal
from dflash_plugins.train.trainer import Progress


def step(number: int, loss: float, **more: object) -> Progress:
    return Progress(number, 100, loss, 10.0, 3, **more)  # type: ignore[arg-type]


def test_the_sentence_holds_loss_accuracy_and_held_out_rounds(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 0)
    assert journal.add(step(1, 4.0)) == "loss 4.000"
    found = HeldOut(50, 1.625, (0.5, 0.1, 0.025))
    said = journal.add(step(2, 2.0, accuracy=(0.5, 0.25, 0.125), held_out=found))
    assert said == "loss 3.000, K 3 slots right .50 .25 .12, held out 1.62 emitted"
    assert journal.add(step(3, 3.0)) == said, "what was found last stays"
    (line,) = (tmp_path / LOG_FILE).read_text().splitlines()
    assert json.loads(line) == {
        "step": 2,
        "loss": 3.0,
        "blocks_per_second": 10.0,
        "k": 3,
        "accuracy": [0.5, 0.25, 0.125],
        "held_out": {"k": 3, "emitted_per_round": 1.625, "accepted_by_slot": [0.5, 0.1, 0.025]},
    }


def test_a_run_that_goes_on_forgets_what_was_written_of_steps_it_takes_again(tmp_path: Path) -> None:
    before = Journal(tmp_path, 0)
    for number in (10, 20, 30):
        before.add(step(number, 1.0, accuracy=(0.5,)))
    with (tmp_path / LOG_FILE).open("a") as file:
        file.write('{"step": 4')
    Journal(tmp_path, 20).add(step(30, 2.0, accuracy=(0.75,)))
    lines = [json.loads(line) for line in (tmp_path / LOG_FILE).read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(10, 1.0), (20, 1.0), (30, 2.0)]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full is Linux's")
def test_a_full_disk_is_said_by_the_name_of_the_file(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 0)
    (tmp_path / LOG_FILE).symlink_to("/dev/full")
    with pytest.raises(BadInput, match=rf"{LOG_FILE} takes no more lines: .*No space left"):
        journal.add(step(1, 4.0, accuracy=(0.5,)))
