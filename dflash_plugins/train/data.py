"""What a run takes from its data: answers to train on and to hold out, and the tokens of the draft's head."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from dflash_plugins.errors import BadInput
from dflash_plugins.train.answers import target_fingerprint
from dflash_plugins.train.batches import Source
from dflash_plugins.train.losses import IGNORED
from dflash_plugins.train.store import SequenceRef


def require_same_target(store: Source, target: Path) -> None:
    """BadInput when the features are not of the target in the folder ``target``."""
    found, wanted = target_fingerprint(target), store.meta.target_fingerprint
    if found != wanted:
        raise BadInput(
            f"{target} is {found}, the features in {store.paths[0].parent} are of {wanted}: features of another target "
            "teach nothing; give that target, or make the features again"
        )


def split(store: Source, held: int, block: int) -> tuple[list[SequenceRef], list[SequenceRef]]:
    """The first sequences are held out: prompts are shuffled, so they are a fair sample that stays as data grow.

    An answer shorter than a block holds no round to walk, so it is trained on only.
    """
    usable = [ref for ref in store.sequences if ref.stop - ref.start - ref.prompt_length >= 2]
    whole = [ref for ref in usable if ref.stop - ref.start - ref.prompt_length >= block]
    kept = whole[: min(held, len(usable) // 10)]
    if len(usable) - len(kept) < 1 or not kept:
        raise BadInput(
            f"{len(usable)} sequences, {len(whole)} of them with {block} response tokens or more, are too few to train "
            "on and to hold some out"
        )
    held_out = set(kept)
    return [ref for ref in usable if ref not in held_out], kept


def draft_vocabulary(store: Source, refs: Sequence[SequenceRef], size: int | None, target_rows: int) -> Tensor:
    """Target ids of the draft's head, rising: the most frequent response tokens, int64 [V_draft]."""
    if size is None or size >= target_rows:
        return torch.arange(target_rows)
    counts: Counter[int] = Counter()
    for ref in refs:
        counts.update(store.ids(ref)[ref.prompt_length :].tolist())
    frequent = [token for token, _ in counts.most_common(size)]
    # Ids are roughly in order of frequency in a byte-pair vocabulary, so small unseen ones fill up.
    unseen = (token for token in range(target_rows) if token not in counts)
    chosen = [*frequent, *(next(unseen) for _ in range(size - len(frequent)))]
    return torch.tensor(sorted(chosen))


def label_table(vocabulary: Tensor, target_rows: int) -> Tensor:
    """Row of the draft's head of every target id, ``IGNORED`` where it has none; int64 [target rows]."""
    table = torch.full((target_rows,), IGNORED)
    table[vocabulary] = torch.arange(len(vocabulary))
    return table
