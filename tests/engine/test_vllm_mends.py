"""The three CPU bugs of vLLM, shown by small numbers, and their mends against values written by hand."""

from types import SimpleNamespace

import pytest
import torch

from vllm_ext import cpu_mends

SENTINEL = -7.0


def expand_into(kernel, values, counts, dtype=torch.float32, replace=(0, 0)):
    output = torch.full((sum(counts) + 1,), SENTINEL).to(dtype)
    ends = torch.tensor(counts, dtype=torch.int32).cumsum(0).to(torch.int32)
    kernel(output, torch.tensor(values, dtype=dtype), ends, *replace, 128)
    return output.tolist()


@pytest.mark.parametrize(
    ("values", "counts", "dtype", "replace", "right"),
    [
        ([0.5, 0.0], [2, 1], torch.float32, (0, 1), [0.5, 0.5, 1.0, SENTINEL]),
        ([0.25, 0.75, 0.5], [1, 3, 2], torch.float32, (0, 0), [0.25, 0.75, 0.75, 0.75, 0.5, 0.5, SENTINEL]),
        ([50, 20], [1, 2], torch.int32, (0, 0), [50, 20, 20, SENTINEL]),
        ([50, 20], [0, 2], torch.int64, (20, 9), [9, 9, SENTINEL]),
        ([0.1], [0], torch.float32, (0, 1), [SENTINEL]),
    ],
)
def test_expand_kernel_writes_every_row_and_no_other(values, counts, dtype, replace, right):
    assert expand_into(cpu_mends.expand_kernel, values, counts, dtype, replace) == pytest.approx(right)


def test_probe_tells_a_kernel_that_writes_into_a_copy():
    def into_a_copy(output, *rest):
        cpu_mends.expand_kernel(output.clone(), *rest)

    def rounds(output, *rest):
        whole = output.long()
        cpu_mends.expand_kernel(whole, rest[0].long(), *rest[1:])
        output.copy_(whole)

    assert cpu_mends.expand_kernel_is_right(cpu_mends.expand_kernel)
    assert not cpu_mends.expand_kernel_is_right(into_a_copy)
    assert not cpu_mends.expand_kernel_is_right(rounds)


def test_stand_in_replaces_a_wrong_kernel_and_says_so_once(caplog):
    stand_in = cpu_mends.mended_expand_kernel(lambda *rest: None)
    for _ in range(2):
        assert expand_into(stand_in, [0.5], [2]) == [0.5, 0.5, SENTINEL]
    assert cpu_mends.kernel_fact(stand_in) == "mended"
    assert len(caplog.records) == 1


def test_stand_in_keeps_a_right_kernel_and_says_nothing(caplog):
    calls = []

    def right(output, input_val, cu_num_tokens, replace_from, replace_to, MAX_NUM_TOKENS=None):  # noqa: N803
        calls.append(output)
        cpu_mends.expand_kernel(output, input_val, cu_num_tokens, replace_from, replace_to)

    stand_in = cpu_mends.mended_expand_kernel(right)
    assert expand_into(stand_in, [0.5], [1]) == [0.5, SENTINEL]
    assert cpu_mends.kernel_fact(stand_in) == "right as shipped"
    assert len(calls) == 2
    assert not caplog.records


def test_a_kernel_that_is_not_ours_is_called_off():
    assert cpu_mends.kernel_fact(cpu_mends.expand_kernel) == "off"


def reads_before_the_row(
    output_token_ids, cu_num_draft_tokens, draft_token_ids, draft_probs, target_probs, bonus_token_ids,
    recovered_token_ids, uniform_probs, *rest, **named,
):  # fmt: skip
    """One request by plain loops; an index of -1 is read, as in C, from what lies before the row."""
    flat, width = target_probs.flatten().tolist(), target_probs.shape[1]
    for slot, draft in enumerate(draft_token_ids.tolist()):
        accepted = flat[slot * width + draft] >= uniform_probs[slot].item()
        output_token_ids[0, slot] = draft if accepted else recovered_token_ids[slot]
        if not accepted:
            return
    output_token_ids[0, len(draft_token_ids)] = bonus_token_ids[0, 0]


def test_padding_is_never_accepted_and_proposals_are_as_before(caplog):
    stand_in = cpu_mends.mended_rejection_kernel(reads_before_the_row)
    p = torch.tensor([[0.9, 0.0, 0.9], [0.9, 0.2, 0.7]])
    for drafts, right in (([0, -1], [0, 1, -1]), ([-1, 0], [1, -1, -1]), ([0, 2], [0, 2, 2]), ([0, 1], [0, 1, -1])):
        emitted = torch.full((1, 3), -1, dtype=torch.int32)
        uniforms = torch.tensor([0.5, 0.5], dtype=torch.float64)
        stand_in(
            emitted, torch.tensor([2]), torch.tensor(drafts), None, p, torch.tensor([[2]]), torch.tensor([1, 1]),
            uniforms, torch.tensor([False]), 2, 3, NO_DRAFT_PROBS=True,
        )  # fmt: skip
        assert emitted.tolist() == [right]
        assert uniforms.tolist() == [0.5, 0.5]
    assert cpu_mends.kernel_fact(stand_in) == "mended"
    assert len(caplog.records) == 1


@pytest.mark.engine
def test_the_engines_rejection_kernel_needs_its_mend():
    """Fails when a release mends bug C: then the mend can go."""
    pytest.importorskip("vllm")
    from vllm.platforms import current_platform
    from vllm.utils.cpu_triton_utils import _rejection_random_sample_kernel_impl as shipped

    current_platform.import_kernels()
    before = torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.bfloat16):  # a model's own dtype is the default while it is built
            torch.set_default_dtype(dtype)
            assert not cpu_mends.rejection_kernel_is_right(shipped)
            assert cpu_mends.rejection_kernel_is_right(cpu_mends.rejecting_padding(shipped))
            assert cpu_mends.expand_kernel_is_right(cpu_mends.expand_kernel)
    finally:
        torch.set_default_dtype(before)


def rms_norm(row, weight, eps):
    """By hand: row / sqrt(mean of squares + eps) * weight."""
    return row / torch.sqrt((row * row).mean() + eps) * weight


def test_probe_of_the_context_k_norm_wants_each_layers_own_weight():
    def by_layer(model, keys):
        return torch.stack(
            [torch.nn.functional.rms_norm(k, k.shape[-1:], w) for k, w in zip(keys, model._k_norm_weights, strict=True)]
        )

    def first_layer_for_all(model, keys):
        return torch.nn.functional.rms_norm(keys, keys.shape[-1:], model._k_norm_weights[0])

    assert cpu_mends.context_k_norm_is_right(by_layer)
    assert not cpu_mends.context_k_norm_is_right(first_layer_for_all)


@pytest.mark.engine
def test_shipped_expand_kernel_leaves_the_output_unwritten_and_the_mend_does_not():
    """Fails when a release mends bug B: then the mend can go."""
    pytest.importorskip("vllm._custom_ops")
    from vllm.utils.cpu_triton_utils import _expand_kernel_impl as shipped

    assert expand_into(shipped, [0.5, 0.25], [2, 1]) == [SENTINEL] * 4
    assert expand_into(cpu_mends.mended_expand_kernel(shipped), [0.5, 0.25], [2, 1]) == [0.5, 0.5, 0.25, SENTINEL]


@pytest.mark.engine
def test_shipped_context_k_norm_uses_the_first_layers_weight_and_the_mend_does_not():
    """Fails when a release mends bug A: then the mend can go."""
    pytest.importorskip("vllm._custom_ops")
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(3, 5, 2, 32, generator=generator)
    weights = torch.rand(3, 32, generator=generator) + 0.5
    model = SimpleNamespace(_k_norm_weights=weights, _rms_norm_eps=1e-6)
    right = torch.stack(
        [
            torch.stack(
                [torch.stack([rms_norm(head, weights[layer], 1e-6) for head in token]) for token in keys[layer]]
            )
            for layer in range(3)
        ]
    )
    shipped = DFlashQwen3Model._normalize_context_k(model, keys)
    # The kernel's fp32 sum of 32 squares may differ from ours in the last bits; a wrong weight differs by 1e-1.
    torch.testing.assert_close(shipped[0], right[0], rtol=1e-5, atol=1e-5)
    assert (shipped[1:] - right[1:]).abs().amax() > 0.1
    assert not cpu_mends.context_k_norm_is_right(DFlashQwen3Model._normalize_context_k)
    torch.testing.assert_close(cpu_mends.normalize_context_k_by_layer(model, keys), right, rtol=1e-5, atol=1e-5)
