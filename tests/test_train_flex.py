"""Flex attention sees what the dense mask sees: its rule against loops, hidden states and gradients against SDPA's."""

from __future__ import annotations

from dataclasses import replace

import oracle
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dflash_plugins.config import read_draft_config
from dflash_plugins.drafter import Drafter
from dflash_plugins.train.batches import Batch
from dflash_plugins.train.blocks import BatchBackbone
from dflash_plugins.train.flex import FlexMasks

KINDS = {
    "all": {"causal": (False, False), "windows": (None, None)},
    "windows": {"causal": (False, False), "windows": (6, 6)},
    "causal": {"causal": (True, True), "windows": (None, None)},
    "mixed": {"causal": (True, False), "windows": (4, None)},
}


def by_loops(
    anchors: list[int], length: int, num_context: int, block: int, causal: bool, window: int | None
) -> list[list[bool]]:
    """Rows of one sequence; keys beyond ``length`` are padding."""
    where = [anchor + i for anchor in anchors for i in range(block)]
    keys = [*range(num_context), *where]
    rows = []
    for query, position in enumerate(where):
        allowed = oracle.training_row(anchors, num_context, block, query)
        real = [column < length or column >= num_context for column in range(len(keys))]
        seen = [oracle.sees(position, key, causal, window) for key in keys]
        rows.append([bool(a and b and c) for a, b, c in zip(allowed, real, seen, strict=True)])
    return rows


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 9), min_size=2, max_size=2),
    st.lists(st.integers(0, 9), min_size=2, max_size=2),
    st.integers(1, 10),
    st.integers(1, 4),
    st.booleans(),
    st.none() | st.integers(1, 8),
)
def test_the_rule_equals_the_loop(first, second, num_context, block, causal, window):
    lengths = [num_context, max(1, num_context - 2)]
    masks = FlexMasks(torch.tensor([first, second]), torch.tensor(lengths), num_context, block)
    rows, columns = 2 * block, num_context + 2 * block
    grid = torch.meshgrid(torch.arange(2), torch.arange(rows), torch.arange(columns), indexing="ij")
    got = masks.rule(causal, window)(grid[0], torch.tensor(0), grid[1], grid[2]).tolist()
    expected = [
        by_loops(anchors, length, num_context, block, causal, window)
        for anchors, length in zip((first, second), lengths, strict=True)
    ]
    assert got == expected


def batch() -> Batch:
    """Two sequences, one shorter, with blocks at their edges."""
    generator = torch.Generator().manual_seed(2)
    lengths, anchors = torch.tensor([20, 13]), torch.tensor([[3, 9, 10, 18], [2, 6, 11, 1]])
    features = torch.randn(2, 20, len(tiny.TAPS) * tiny.HIDDEN, generator=generator)
    features[1, 13:] = float("nan")  # padding may hold anything
    labels = torch.randint(3, 500, (2, 4, 7), generator=generator)
    ids = torch.randint(3, 500, (2, 4), generator=generator)
    return Batch(features, lengths, anchors, ids, labels, torch.zeros(2, 4, 7, tiny.HIDDEN))


def hidden_and_gradients(kind: str, device: str, *, flex: bool) -> list[Tensor]:
    """On a CPU, where flex attention has no backward, the hidden states alone."""
    config = read_draft_config(tiny.raw_config()).require().model_copy(update=KINDS[kind])
    torch.manual_seed(0)
    drafter = Drafter(config)
    drafter.bind(torch.randn(tiny.VOCAB, tiny.HIDDEN), torch.randn(tiny.VOCAB, tiny.HIDDEN))
    drafter.to(device)
    there = batch().to(torch.device(device))
    with torch.set_grad_enabled(device != "cpu"):
        backbone = replace(BatchBackbone.of(drafter, there, 7), flex=flex)
        hidden = backbone.rows(there.labels.flatten(0, 1)[:, :3])
    if device == "cpu":
        return [hidden]
    hidden.square().mean().backward()
    return [hidden.detach(), *(p.grad for p in drafter.parameters() if p.grad is not None)]


GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("kind", KINDS)
def test_hidden_states_and_gradients_are_those_of_the_dense_mask(kind: str, device: str) -> None:
    dense, sparse = (hidden_and_gradients(kind, device, flex=flex) for flex in (False, True))
    for expected, got in zip(dense, sparse, strict=True):
        assert bool(torch.isfinite(got).all())
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
