"""A trained drafter as a folder that both engines load, with its model card."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dflash_plugins.drafter import Drafter, save_drafter

if TYPE_CHECKING:
    from dflash_plugins.train.trainer import Trainer

DRAFTER_FOLDER = "drafter"


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
    lines += ["## Recipe", "", "```", *_recipe_lines(trainer), "```", ""]
    return "\n".join(lines)


def held_out_row(k: int, emitted_per_round: float, accepted_by_slot: Sequence[float], rounds: int) -> str:
    """A line of the card's table of held-out figures."""
    slots = " ".join(f"{rate:.3f}" for rate in accepted_by_slot)
    return f"| {k} | {emitted_per_round:.3f} | {slots} | {rounds:,} |"


def _recipe_lines(trainer: Trainer) -> list[str]:
    """The settings; a folder is named by its last part, the rest is nobody's business."""
    settings = asdict(trainer.recipe)
    if trainer.recipe.start_from is not None:
        settings["start_from"] = Path(trainer.recipe.start_from).name
    return [f"{key}: {value}" for key, value in settings.items()]
