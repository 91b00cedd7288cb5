"""The stand-ins that SGLang's environments on CPUs see: three real functions, and a clear error for everything else."""

import subprocess
import sys
from pathlib import Path

import pytest

STAND_INS = Path(__file__).parents[1] / "ci" / "sglang-cpu-stubs"


def run(code):
    """What ``code`` prints where the stand-ins are found first."""
    pytest.importorskip("torch")
    preamble = f"import sys; sys.path.insert(0, {str(STAND_INS)!r})\n"
    done = subprocess.run([sys.executable, "-c", preamble + code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_kernels_can_be_defined_and_say_what_they_are_when_they_are_launched():
    code = """
import triton, triton.language as tl
from triton.language.extra import libdevice
from triton.runtime.jit import JITFunction

@triton.autotune(configs=[triton.Config({"SIZE": 8}, num_warps=2)], key=["n"])
@triton.jit
def double(x, n, SIZE: tl.constexpr):
    tl.store(x, 2 * tl.load(x))

assert isinstance(double, JITFunction)
print(triton.cdiv(7, 2), triton.next_power_of_2(5), triton.next_power_of_2(8))
for use, argument in ((double[(1,)], None), (tl.load, 1), (libdevice.log1p, 1), (triton.set_allocator, 1)):
    try:
        use(argument)
    except RuntimeError as error:
        print(error)
"""
    figures, *refusals = run(code).splitlines()
    assert figures == "4 8 8"
    used = ["triton kernel __main__.double", "triton.language.load", "triton.language.extra.libdevice.log1p"]
    assert [line.partition(" was used")[0] for line in refusals] == [*used, "triton.set_allocator"]
    assert all("is a stand-in here" in line for line in refusals)


def test_names_of_torchvision_and_sgl_kernel_can_be_imported_and_not_be_called():
    code = """
from torchvision.transforms import InterpolationMode, functional
from sgl_kernel import silu_and_mul
from sgl_kernel.kvcacheio import transfer_kv_all_layer
print(InterpolationMode.BICUBIC, isinstance(3, InterpolationMode))
for use in (functional.resize, silu_and_mul, transfer_kv_all_layer, InterpolationMode):
    try:
        use(1)
    except RuntimeError as error:
        print(str(error).partition(" was used")[0])
"""
    assert run(code).splitlines() == [
        "<stand-in for torchvision.transforms.InterpolationMode.BICUBIC> False",
        "torchvision.transforms.functional.resize",
        "sgl_kernel.silu_and_mul",
        "sgl_kernel.kvcacheio.transfer_kv_all_layer",
        "torchvision.transforms.InterpolationMode",
    ]


def test_the_three_functions_do_what_the_engine_asks_of_them():
    code = """
import torch, sgl_kernel
table = torch.zeros(3, 6, dtype=torch.int32)
rows, starts, ends = torch.tensor([2, 0]), torch.tensor([1, 0]), torch.tensor([4, 2])
sgl_kernel.assign_req_to_token_pool_cpu(rows, table, starts, ends, torch.tensor([11, 12, 13, 21, 22]), 6)
print(table.tolist())
out = torch.empty(5, dtype=torch.int64)
sgl_kernel.assign_extend_cache_locs_cpu(rows, table, starts, ends, out, 6)
print(out.tolist())
keys = torch.arange(8, dtype=torch.float32).view(4, 2)
pointers, strides = torch.tensor([keys.data_ptr()]), torch.tensor([8])
sgl_kernel.copy_all_layer_kv_cache_cpu(pointers, strides, torch.tensor([1, 2]), torch.tensor([0, 1]))
print(keys.tolist())
"""
    assert run(code).splitlines() == [
        "[[21, 22, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0], [0, 11, 12, 13, 0, 0]]",
        "[11, 12, 13, 21, 22]",
        "[[0.0, 1.0], [0.0, 1.0], [2.0, 3.0], [6.0, 7.0]]",
    ]
