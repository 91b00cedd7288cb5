"""A trained drafter as a folder that both engines load, with its model card."""

from __future__ import annotations

import json
import platform
import shlex
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dflash_plugins.drafter import Drafter, save_drafter
from dflash_plugins.train.recipe import Recipe

if TYPE_CHECKING:
    from dflash_plugins.train.trainer import Trainer

DRAFTER_FOLDER = "drafter"
_OPTIONS = ("method", "steps")


TITLES = {"dflash": "DFlash", "dflash2": "DFlash 2", "dloop": "D-Loop (mode refine)"}


def export_drafter(drafter: Drafter, folder: Path, card: str, dtype: torch.dtype = torch.bfloat16) -> None:
    """Writes config.json and model.safetensors in the released layout, then the card as README.md."""
    save_drafter(drafter, folder, dtype=dtype, overwrite=True)
    (folder / "README.md").write_text(card, encoding="utf-8")


def model_card(trainer: Trainer, report: dict[str, Any]) -> str:
    """Markdown: data, recipe, cost and held-out acceptance of one run."""
    weights = sum(p.numel() for p in trainer.drafter.parameters() if p.requires_grad)
    sources = Counter(trainer.store.sources())
    started = f"{len(trainer.taken)} tensors of another drafter" if trainer.taken else "the target's last layers"
    lines = [
        "---",
        "license: apache-2.0",
        "---",
        f"# A {TITLES[trainer.recipe.method]} drafter",
        "",
        f"Trained {datetime.now(UTC).date()} with `dflash-plugins train --method {trainer.recipe.method}`"
        f" on {platform.machine()} CPUs ({torch.get_num_threads()} threads), torch {torch.__version__}.",
        "",
        "| what | figure |",
        "|---|---|",
        f"| target | `{trainer.store.meta.target_fingerprint}` |",
        f"| target layers read | {list(trainer.store.meta.target_layer_ids)} |",
        f"| started from | {started} |",
        f"| trained weights | {weights:,} |",
        f"| response tokens (the target's own answers) | {report['response_tokens']:,} |",
        f"| prompts by source | {', '.join(f'{name} {count:,}' for name, count in sorted(sources.items()))} |",
        f"| steps, blocks | {report['step']:,} of {report['steps']:,}; {report['blocks']:,} |",
        f"| time | {report['seconds'] / 60:.0f} minutes |",
        f"| training FLOPs, about | {report['training_flops']:.2g} |",
        "",
        "## Held-out answers (greedy drafting, rounds walked over answers that were not trained on)",
        "",
        "| K | emitted per round | accepted by slot | rounds |",
        "|---|---|---|---|",
    ]
    for name, result in report["held_out"].items():
        figures = (result[key] for key in ("emitted_per_round", "accepted_by_slot", "rounds"))
        lines.append(held_out_row(int(name[1:]), *figures))
    for name, result in report["held_out"].items():
        if recall := result["candidate_recall"]:
            rates = " ".join(f"{rate:.3f}" for rate in recall)
            lines += ["", f"The selector's candidates hold the true token, K = {name[1:]}, by slot: {rates}."]
    lines += ["", "Each number of masks is another question: K is the number of mask rows that were run.", ""]
    lines += ["## Command", "", "```", *command_lines(trainer.recipe, _data(trainer.store.paths)), "```", ""]
    lines += ["## Recipe", "", "```", *_recipe_lines(trainer.recipe), "```", ""]
    return "\n".join(lines)


def held_out_row(k: int, emitted_per_round: float, accepted_by_slot: Sequence[float], rounds: int) -> str:
    """A line of the card's table of held-out figures."""
    slots = " ".join(f"{rate:.3f}" for rate in accepted_by_slot)
    return f"| {k} | {emitted_per_round:.3f} | {slots} | {rounds:,} |"


def command_lines(recipe: Recipe, data: Iterable[str]) -> list[str]:
    """The command of a run with ``recipe`` on ``data``, with whatever is not as it would be by itself."""
    usual = asdict(Recipe())
    said = {key: value for key, value in _settings(recipe).items() if value != usual[key]}
    words = ["dflash-plugins train", f"--method {recipe.method}", "--target TARGET", *(f"--data {one}" for one in data)]
    words += ["--out RUN", f"--steps {recipe.steps}"]
    words += [f"--set {shlex.quote(f'{key}={_yaml(value)}')}" for key, value in said.items() if key not in _OPTIONS]
    text = " ".join(word.replace(" ", "\0") for word in words)
    lines = textwrap.wrap(text, 110, subsequent_indent="    ", break_on_hyphens=False, break_long_words=False)
    return " \\\n".join(lines).replace("\0", " ").splitlines()


def _yaml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def _data(paths: Iterable[Path]) -> list[str]:
    """Names of what was given as ``--data``: the folders of shards, or the files of answers."""
    return list(dict.fromkeys(path.parent.name if path.suffix == ".safetensors" else path.name for path in paths))


def _recipe_lines(recipe: Recipe) -> list[str]:
    return [f"{key}: {value}" for key, value in _settings(recipe).items()]


def _settings(recipe: Recipe) -> dict[str, Any]:
    """A folder is named by its last part, and by its run where that says nothing; the rest is nobody's business."""
    settings = asdict(recipe)
    if recipe.start_from is not None:
        folder = Path(recipe.start_from)
        settings["start_from"] = "/".join(folder.parts[-2:] if folder.name == DRAFTER_FOLDER else folder.parts[-1:])
    return settings
