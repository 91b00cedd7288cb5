"""What ``dflash-plugins train`` does: one run or one leg of it, then export and the model card."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from accelerate import PartialState
from pydantic import BaseModel, ConfigDict

from dflash_plugins.config import ARCHITECTURE_OF
from dflash_plugins.errors import BadInput
from dflash_plugins.train.answers import build_store, read_answers
from dflash_plugins.train.batches import Source
from dflash_plugins.train.export import DRAFTER_FOLDER, export_drafter, model_card
from dflash_plugins.train.journal import Journal
from dflash_plugins.train.live import LiveFeatures
from dflash_plugins.train.recipe import Recipe
from dflash_plugins.train.state import trained_parameters
from dflash_plugins.train.store import FeatureStore
from dflash_plugins.train.trainer import Progress, Trainer, on_cpu

Report = Callable[[str, int, int], None]
EVALUATED_AT = (3, 7)
FLOPS_PER_WEIGHT = 6  # forward and backward, multiply and add


class TrainReport(BaseModel):
    """Where the drafter is and how it does on held-out answers; ``finished`` is false after a leg cut short.

    ``taken_from_start`` and ``trained`` name the tensors that ``start_from`` gave and the parameters that changed.
    """

    model_config = ConfigDict(frozen=True)

    path: str
    finished: bool
    step: int
    steps: int
    seconds: float
    blocks: int
    training_flops: float
    response_tokens: int
    loss: float | None
    accepted_by_slot: list[float]
    emitted_per_round: float
    held_out: dict[str, dict[str, Any]]
    taken_from_start: list[str]
    trained: list[str]


def run(
    *,
    method: str,
    target: Path,
    data: Path | Sequence[Path],
    out: Path,
    steps: int | None = None,
    minutes: float | None = None,
    settings: dict[str, Any] | None = None,
    divided: bool = False,
    held_out_every: int | None = None,
    report: Report = lambda stage, done, total: None,
) -> TrainReport | None:
    """Trains (or goes on training) a drafter for ``target`` and exports it to ``out``.

    ``data`` is a folder of stored features, several of them, or a JSON-lines file of answers.

    ``minutes`` ends this leg after that time; running the same command again continues it. ``settings`` are fields of
    :class:`Recipe` as ``--set KEY=VALUE`` gives them. Raises BadInput for a method, path or setting that is not usable.
    What a run tells while it goes on is kept in ``LOG_FILE`` of ``out``, a JSON line every few steps: loss, accuracy by
    slot, and after every ``held_out_every`` steps (None: a twentieth of all) rounds walked over a few held-out answers.
    Of several processes (torchrun, accelerate) the first one exports and reports; the others return None.
    """
    settings = dict(settings or {})
    layer_ids, features = settings.pop("target_layer_ids", None), settings.pop("features", "stored")
    recipe = _recipe(method, steps, settings)
    state = PartialState(cpu=on_cpu())
    report = report if state.is_main_process else lambda stage, done, total: None
    with state.main_process_first():
        source = _source([data] if isinstance(data, Path) else data, target, layer_ids, features, report)
    trainer = Trainer(recipe, target, source, out, divided=divided)
    if trainer.taken:
        report(f"first weights from {recipe.start_from}, tensors", len(trainer.taken), len(trainer.taken))
    journal = Journal(out, trainer.step) if state.is_main_process else None

    def tell(progress: Progress) -> None:
        if journal is not None:
            report(f"training: {journal.add(progress)}", progress.step, progress.steps)

    every = held_out_every or max(1, recipe.steps // 20)
    until = float("inf") if minutes is None else minutes * 60.0
    finished = trainer.run(until=until, tell=tell, held_out_every=every)
    trainer.leave()
    if journal is None:
        return None
    document = _report(trainer, finished, journal.loss())
    card = model_card(trainer, document.model_dump(mode="json"))
    export_drafter(trainer.drafter, Path(document.path), card, trainer.dtype)
    return document


def _source(data: Sequence[Path], target: Path, layer_ids: Any, features: Any, report: Report) -> Source:
    """Stored features of the folders ``data``, or of a file of answers, for which they are made beside it.

    Of such a file with ``features`` "live" the answers instead, whose features are computed while training runs.
    """
    if features not in ("live", "stored"):
        raise BadInput(f"--set features={features}: known are live, stored")
    if not target.is_dir():
        raise BadInput(f"--target {target}: no such folder")
    if missing := [str(one) for one in data if not one.exists()]:
        raise BadInput(f"--data {', '.join(missing)}: no such file or folder")
    files = [one for one in data if not one.is_dir()]
    if not files:
        if features == "live":
            raise BadInput("--set features=live: a feature store holds its features; give a file of answers")
        if layer_ids is not None:
            raise BadInput("--set target_layer_ids: the feature store has its own; leave it out")
        return FeatureStore(*data)
    if len(data) > 1:
        raise BadInput(f"--data {files[0]}: a file of answers is taken alone; several folders of features go together")
    (answers,) = files
    if not isinstance(layer_ids, list) or not layer_ids:
        raise BadInput("--set target_layer_ids=[...]: name the layers of the target to read; none is guessed")
    if features == "live":
        return LiveFeatures(answers, target, layer_ids)
    folder = answers.with_name(answers.name + ".features")
    build_store(read_answers(answers, target), target, layer_ids, folder, report=report)
    return FeatureStore(folder)


def _recipe(method: str, steps: int | None, settings: dict[str, Any]) -> Recipe:
    if method not in ARCHITECTURE_OF:
        raise BadInput(f"--method {method}: known are {', '.join(ARCHITECTURE_OF)}")
    return Recipe.of({**settings, **({} if steps is None else {"steps": steps}), "method": method})


def _report(trainer: Trainer, finished: bool, loss: float | None) -> TrainReport:
    recipe = trainer.recipe
    whole_k = recipe.block_size - 1
    served = {k: trainer.evaluate(k) for k in sorted({*EVALUATED_AT, whole_k}) if k <= whole_k}
    whole = served[whole_k]
    return TrainReport(
        path=str(trainer.out / DRAFTER_FOLDER),
        finished=finished,
        step=trainer.step,
        steps=recipe.steps,
        seconds=trainer.seconds,
        blocks=trainer.step * recipe.blocks_per_step(),
        training_flops=float(FLOPS_PER_WEIGHT * trainer.multiplications_per_step() * trainer.step),
        response_tokens=trainer.response_tokens(),
        loss=loss,
        accepted_by_slot=list(whole.accepted_by_slot),
        emitted_per_round=whole.emitted_per_round,
        held_out={
            f"k{k}": {
                "emitted_per_round": result.emitted_per_round,
                "accepted_by_slot": list(result.accepted_by_slot),
                "rounds": result.rounds,
                "candidate_recall": None if result.candidate_recall is None else list(result.candidate_recall),
            }
            for k, result in served.items()
        },
        taken_from_start=trainer.taken,
        trained=sorted(trained_parameters(trainer.drafter)),
    )
