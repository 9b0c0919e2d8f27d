"""A 4-bit weight widened by one kernel: bitsandbytes' values in the interpreter, machine code for GPUs that are not here."""

import pytest
import torch
import torch._dynamo  # library ops import it on their first call, which must not happen while launches are trapped

pytest.importorskip("triton")
pytest.importorskip("bitsandbytes")

from bitsandbytes.functional import quantize_4bit

from isotype.ops.packed import triton, widen_4bit
from isotype.testing import compile_matrix
from tests.gpu import everywhere, kernels


def packed(shape, *, kind="nf4", double=True, blocksize=64, storage=torch.uint8, device="cpu"):
    torch.manual_seed(0)
    weight = torch.randn(shape).mul_(torch.rand(shape[0], 1) * 4).to(device)
    return quantize_4bit(weight, blocksize=blocksize, compress_statistics=double, quant_type=kind, quant_storage=storage)


@everywhere
@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"blocksize": 128}, torch.float16),
        ({"storage": torch.bfloat16}, torch.bfloat16),
        ({"kind": "fp4", "double": False, "blocksize": 256}, torch.float32),
    ],
    ids=str,
)
def test_the_kernel_gives_bitsandbytes_values(options, dtype, device):
    # the last program's block is not full, nor the last block of scales. Whole scales a row: where two rows share one (blocksize 256,
    # 640 columns) bitsandbytes 0.50.2 is wrong on a CPU, by as much as the values themselves
    want = widen_4bit(*packed((67, 768), **options), dtype)
    weight, state = packed((67, 768), **options, device=device)
    with kernels(device):
        got = widen_4bit(weight, state, dtype)
    assert got.dtype == dtype
    assert got.shape == (67, 768)
    # the interpreter and bitsandbytes round each fp32 operation alike; a GPU's fused multiply-add may round a scale to the other side
    exact = device == "cpu" and dtype != torch.float32
    torch.testing.assert_close(got.cpu(), want, rtol=0 if exact else 2 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("double", [False, True])
def test_the_kernel_compiles_for_every_output_and_target(double):
    weight, state = packed((64, 640), double=double)
    inner = (state.state2.absmax, state.state2.code, state.offset, state.state2.blocksize) if double else (None, None, None, 1)

    def run(out):
        triton.widen_4bit(weight, state.absmax, state.code, *inner[:3], state.blocksize, inner[3], out)

    compile_matrix(run, (torch.empty(64, 640),), targets=["sm_80", "sm_90", "sm_100", "gfx942"], fail_on="note", binary=True)
