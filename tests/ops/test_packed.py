"""Published formats of a weight: each widened value is what its definition gives, whatever the
pieces; damaged tensors are named.
"""

import pytest
import torch

from isotype.errors import UsageError
from isotype.ops import cpp
from isotype.ops.backend import force_backend
from tests.api import (
    KINDS,
    SERVING_TENSORS,
    TORCHAO_NAMES,
    Layout,
    PackedState,
    UnreadPacking,
    build_state,
    dequantise_4bit,
    dequantise_packed,
    pack_along_rows,
    read_packing,
    recognise_layout,
)
from tests.api import TensorHeader as Part
from tests.gpu import everywhere, kernels
from tests.published import FORMATS, element, packed

needs_compiler = pytest.mark.skipif(cpp.cpu_compiler() is None, reason="needs a C++ compiler")
ORDERED = [form for form in FORMATS if form != "gptq-act-order"]  # those of the one kernel
OUT, IN = 72, 80  # no multiples of the blocks' 32: the last ones are smaller


def read(form: str, tensors: dict, shape=(OUT, IN)) -> tuple[torch.Tensor, PackedState]:
    how = read_packing(FORMATS[form][1])
    parts = {
        name: Part(t.dtype, tuple(t.shape))
        for name, t in tensors.items()
        if name not in SERVING_TENSORS
    }
    layout = recognise_layout("layer", parts, how, shape)
    tensors = {TORCHAO_NAMES.get(name, name): t for name, t in tensors.items()}
    weight, made = pack_along_rows(
        tensors[layout.packed_tensor[0]], build_state("layer", layout, how.dtype_name, tensors)
    )
    return weight.view(torch.uint8), made


def test_each_value_is_what_the_definition_gives(subtests):
    for form, (word, _) in FORMATS.items():
        with subtests.test(form):
            tensors = packed(form, OUT, IN)
            weight, how = read(form, tensors)
            wide = dequantise_packed(weight, how, torch.float64)
            assert how.dtype_name == word
            assert wide.shape == how.shape == (OUT, IN)
            for o in range(0, OUT, 3):
                for i in range(0, IN, 7):
                    assert float(wide[o, i]) == pytest.approx(
                        element(form, tensors, o, i), rel=1e-15, abs=0
                    )
            torch.testing.assert_close(
                dequantise_packed(weight, how, torch.float32).double(), wide, rtol=2e-7, atol=0
            )
            assert torch.equal(
                dequantise_packed(weight, how, torch.bfloat16),
                dequantise_packed(weight, how, torch.float32).bfloat16(),
            )


@needs_compiler
def test_the_kernel_gives_the_values_of_plain_pytorch(subtests):
    rows = slice(24, OUT)  # an expert's part begins inside a block
    for form in ORDERED:
        weight, how = read(form, packed(form, OUT, IN))
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            with subtests.test(form, dtype=dtype):
                with force_backend("eager"):
                    want = dequantise_packed(weight, how, dtype)
                assert torch.equal(dequantise_packed(weight, how, dtype), want)
                part = torch.empty(OUT - 24, IN + 3, dtype=dtype)
                assert torch.equal(how.dequantise_rows(weight, rows, part)[:, :IN], want[rows])


def test_a_number_of_every_bit_pattern_is_read():
    """All 254 finite numbers of fp8, all of int8, all pairs of 4 bits, in each dtype of the result."""
    bits = torch.arange(256, dtype=torch.uint8)
    rows = {
        name: bits[torch.isfinite(bits.view(name).float())]
        for name in (torch.float8_e4m3fn, torch.float8_e5m2)
    }
    for name, row in {**rows, torch.int8: bits}.items():
        layout = Layout("scaled", (1, len(row)), ("weight", name, (1, len(row))), (1, len(row)))
        how = PackedState(layout, "fp8", {"weight_scale": torch.ones(1, 1)})
        assert torch.equal(dequantise_packed(row, how, torch.float32)[0], row.view(name).float())
    fours = Layout("mxfp4", (1, 512), ("weight_packed", torch.uint8, (1, 256)), (1, 32))
    made = dequantise_packed(
        bits,
        PackedState(fours, "mxfp4", {"weight_scale": torch.full((1, 16), 127, dtype=torch.uint8)}),
        torch.float32,
    )[0]
    sizes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    numbers = torch.tensor(sizes + [-size for size in sizes])
    assert torch.equal(
        made, torch.stack((numbers[bits.int() & 15], numbers[bits.int() >> 4]), 1).flatten()
    )


@everywhere
def test_the_kernel_of_a_gpu_gives_the_values_of_plain_pytorch(device, subtests):
    pytest.importorskip("triton")
    for form in ("fp8-block", "mxfp4-ct") if device == "cpu" else ORDERED:
        weight, how = read(form, packed(form, OUT, IN))
        with force_backend("eager"):
            want = dequantise_packed(weight, how, torch.bfloat16)
        with kernels(device), subtests.test(form):
            assert torch.equal(
                dequantise_packed(
                    weight.to(device), how.to_device(torch.device(device)), torch.bfloat16
                ).cpu(),
                want,
            )


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("form", ["fp8-block", "int4-ct-asymmetric", "mxfp4-ct"])
def test_the_kernel_compiles_for_every_output_and_target(form):
    from isotype.testing import compile_matrix
    from tests.api import packed_triton as triton
    from tests.api import state as forms

    weight, how = read(form, packed(form, 64, 640), (64, 640))
    name, dtype, shape = how.layout.packed_tensor
    made = forms.to_block_scaled(
        {**how.tensors, name: weight.view(dtype).view(shape)}, slice(0, 64), how.layout
    )

    fours = []
    for double in (False, True):
        bits, s = four_bit((64, 640), double=double)
        *inner, block = (
            (s.state2.absmax, s.state2.code, s.offset, s.state2.blocksize)
            if double
            else (None, None, None, 1)
        )
        fours.append((bits, s.absmax, s.code, *inner, s.blocksize, block))

    def run(out):
        triton.widen_(
            out, made.packed, made.scale, made.zero, KINDS[made.kind], 0, *how.layout.block
        )
        for given in fours:
            triton.widen_4bit(*given, out)

    compile_matrix(
        run,
        (torch.empty(64, 640),),
        targets=["sm_80", "sm_90", "sm_100", "gfx942"],
        fail_on="note",
        binary=True,
    )


def four_bit(shape, *, kind="nf4", double=True, blocksize=64, storage=torch.uint8, device="cpu"):
    functional = pytest.importorskip("bitsandbytes.functional")
    torch.manual_seed(0)
    weight = torch.randn(shape).mul_(torch.rand(shape[0], 1) * 4).to(device)
    return functional.quantize_4bit(
        weight,
        blocksize=blocksize,
        compress_statistics=double,
        quant_type=kind,
        quant_storage=storage,
    )


def test_4bit_weights_have_the_same_values_in_fp64(subtests):
    for options in ({}, {"double": False}, {"kind": "fp4"}):
        weight, state = four_bit((64, 128), **options)
        with subtests.test(str(options)):
            wide = dequantise_4bit(weight, state, torch.float64)
            torch.testing.assert_close(wide, dequantise_4bit(weight, state, torch.float32).double())


FOUR_BITS = (
    (torch.float16, {"blocksize": 128}),
    (torch.bfloat16, {"storage": torch.bfloat16}),
    (torch.float32, {"kind": "fp4", "double": False, "blocksize": 256}),
)


@everywhere
def test_the_kernel_gives_bitsandbytes_values(device, subtests):
    pytest.importorskip("triton")
    for dtype, options in FOUR_BITS:
        # the last program's block is not full, nor the last block of scales. Whole scales a row:
        # where two rows share one (blocksize 256, 640 columns) bitsandbytes 0.50.2 is wrong on a
        # CPU, by as much as the values themselves
        want = dequantise_4bit(*four_bit((67, 768), **options), dtype)
        weight, state = four_bit((67, 768), **options, device=device)
        with kernels(device):
            got = dequantise_4bit(weight, state, dtype)
        # the interpreter and bitsandbytes round each fp32 operation alike; a GPU's fused
        # multiply-add may round a scale to the other side
        exact = device == "cpu" and dtype != torch.float32
        with subtests.test(str(dtype)):
            torch.testing.assert_close(
                got.cpu(), want, rtol=0 if exact else 2 * torch.finfo(dtype).eps, atol=0
            )


BAD = {
    "missing scale": ("fp8-block", lambda t: t.pop("weight_scale_inv"), r"layer\.weight is float8_e4m3fn and has no scale"),
    "scale of another shape": ("fp8-block", lambda t: t.update(weight_scale_inv=torch.ones(2, 3)), r"inv is \[2, 3\].*fits no block"),
    "scale by the grid": ("fp8-ct-block", lambda t: t.update(weight_scale=torch.ones(4, 3)), r"fits no block of .*\(32 x 32\)"),
    "NaN scale": ("fp8-ct-channel", lambda t: t["weight_scale"][5].fill_(torch.nan), r"scale is not finite at \[5, 0\] \(1 in all\)"),
    "NaN weight": ("fp8-block", lambda t: t["weight"].view(torch.uint8)[2, 3].fill_(0xFF), r"is not finite at \[2, 3\] \(1 in all\)"),
    "NaN exponent": ("mxfp4-ct", lambda t: t["weight_scale"][1, 1].fill_(255), r"weight_scale is not finite at \[1, 1\]"),
    "missing zero points": ("gptq", lambda t: t.pop("qzeros"), r"layer\.qzeros is missing"),
    "groups of another size": ("awq", lambda t: t.update(scales=torch.ones(2, OUT)), r"layer\.scales is \[2, 72\], expected \[5, 72\]"),
    "rows that are not there": ("int8-bnb", lambda t: t.update(weight=t["weight"][:-1]), r"layer\.weight is \[71, 80\], expected"),
    "only scales": ("nvfp4-ct", lambda t: t.pop("weight_packed"), r"but no weight to which they belong"),
}  # fmt: skip


def test_damaged_tensors_are_named_with_a_fix(subtests):
    for case, (form, damage, message) in BAD.items():
        tensors = packed(form, OUT, IN)
        damage(tensors)
        with subtests.test(case):
            with pytest.raises(UsageError, match=message) as caught:
                read(form, tensors)
            assert caught.value.fix


UNREAD = [
        ({"quant_method": "hqq"}, "quantised by hqq, which is not read"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "GPTQ with 3 bits"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "marlin"}, "checkpoint_format marlin"),
        ({"quant_method": "gptq", "bits": 4}, "KeyError: 'group_size'"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "AWQ's version gemv"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo W4A8_AWQ"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24", "config_groups": {"g": {"weights": {}}}}, "format marlin-24"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "a block of 0 x 128"),
]  # fmt: skip


def test_what_is_not_read_is_refused_with_the_reason(subtests):
    for settings, message in UNREAD:
        with subtests.test(message), pytest.raises(UnreadPacking, match=message):
            read_packing(settings)
