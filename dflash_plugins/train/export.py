"""A trained drafter as a folder that both engines load, with its model card."""

from __future__ import annotations

import platform
from collections import Counter
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dflash_plugins.drafter import Drafter, save_drafter

if TYPE_CHECKING:
    from dflash_plugins.train.trainer import Trainer

DRAFTER_FOLDER = "drafter"


def export_drafter(drafter: Drafter, folder: Path, card: str) -> None:
    """Writes config.json and model.safetensors (bf16) in the released layout, then the card as README.md."""
    save_drafter(drafter, folder, dtype=torch.bfloat16, overwrite=True)
    (folder / "README.md").write_text(card, encoding="utf-8")


def model_card(trainer: Trainer, report: dict[str, Any]) -> str:
    """Markdown: data, recipe, cost and held-out acceptance of one run."""
    weights = sum(p.numel() for p in trainer.drafter.parameters() if p.requires_grad)
    sources = Counter(trainer.store.sources())
    lines = [
        "---",
        "license: apache-2.0",
        "---",
        "# A DFlash drafter",
        "",
        f"Trained {datetime.now(UTC).date()} with `dflash-plugins train --method {trainer.recipe.method}`"
        f" on {platform.machine()} CPUs ({torch.get_num_threads()} threads), torch {torch.__version__}.",
        "",
        "| what | figure |",
        "|---|---|",
        f"| target | `{trainer.store.meta.target_fingerprint}` |",
        f"| target layers read | {list(trainer.store.meta.target_layer_ids)} |",
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
        slots = " ".join(f"{rate:.3f}" for rate in result["accepted_by_slot"])
        lines.append(f"| {name[1:]} | {result['emitted_per_round']:.3f} | {slots} | {result['rounds']:,} |")
    lines += ["", "Each number of masks is another question: K is the number of mask rows that were run.", ""]
    lines += ["## Recipe", "", "```", *(f"{k}: {v}" for k, v in asdict(trainer.recipe).items()), "```", ""]
    return "\n".join(lines)
