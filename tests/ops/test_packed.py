"""Published formats of a weight: each widened value is what its definition gives, whatever the pieces; damaged tensors are named."""

from __future__ import annotations

import pytest
import torch

from isotype.errors import UsageError
from isotype.ops.packed import PackedState, state, widen
from isotype.ops.packed.recognise import OF_ACTIVATIONS, Part, recognise, state_of
from isotype.precision.packing import UnreadPacking, packing
from tests.published import FORMATS, element, packed

OUT, IN = 72, 80  # no multiples of the blocks' 32: the last ones are smaller


def read(form: str, tensors: dict, shape=(OUT, IN)) -> tuple[torch.Tensor, PackedState]:
    how = packing(FORMATS[form][1])
    parts = {name: Part(t.dtype, tuple(t.shape)) for name, t in tensors.items() if name not in OF_ACTIVATIONS}
    layout = recognise("layer", parts, how, shape)
    return tensors[layout.main[0]].view(torch.uint8), state_of("layer", layout, how.word, tensors)


@pytest.mark.parametrize("form", FORMATS)
def test_each_value_is_what_the_definition_gives(form):
    tensors = packed(form, OUT, IN)
    weight, how = read(form, tensors)
    wide = widen(weight, how, torch.float64)
    assert how.word == FORMATS[form][0]
    assert wide.shape == how.shape == (OUT, IN)
    for o in range(0, OUT, 3):
        for i in range(0, IN, 7):
            assert float(wide[o, i]) == pytest.approx(element(form, tensors, o, i), rel=1e-15, abs=0)
    torch.testing.assert_close(widen(weight, how, torch.float32).double(), wide, rtol=2e-7, atol=0)
    assert torch.equal(widen(weight, how, torch.bfloat16), widen(weight, how, torch.float32).bfloat16())


@pytest.mark.parametrize("form", FORMATS)
def test_pieces_change_nothing(form, monkeypatch):
    weight, how = read(form, packed(form, OUT, IN))
    whole = widen(weight, how, torch.bfloat16)
    monkeypatch.setattr(state, "_CPU", 1)
    assert torch.equal(widen(weight, how, torch.bfloat16), whole)


BAD = {
    "missing scale": ("fp8-block", lambda t: t.pop("weight_scale_inv"), r"layer\.weight is float8_e4m3fn and has no scale"),
    "scale of another shape": ("fp8-block", lambda t: t.update(weight_scale_inv=torch.ones(2, 3)), r"inv is \[2, 3\].*fits no block"),
    "scale by the grid": ("fp8-ct-block", lambda t: t.update(weight_scale=torch.ones(4, 3)), r"fits no block of .*\(32 x 32\)"),
    "NaN scale": ("fp8-ct-channel", lambda t: t["weight_scale"][5].fill_(torch.nan), r"weight_scale is not finite at \[5, 0\] \(1 such\)"),
    "NaN weight": ("fp8-block", lambda t: t["weight"].view(torch.uint8)[2, 3].fill_(0xFF), r"weight is not finite at \[2, 3\] \(1 such\)"),
    "NaN exponent": ("mxfp4-ct", lambda t: t["weight_scale"][1, 1].fill_(255), r"weight_scale is not finite at \[1, 1\]"),
    "missing zero points": ("gptq", lambda t: t.pop("qzeros"), r"layer\.qzeros is missing"),
    "groups of another size": ("awq", lambda t: t.update(scales=torch.ones(2, OUT)), r"layer\.scales is \[2, 72\], expected \[5, 72\]"),
    "rows that are not there": ("int8-bnb", lambda t: t.update(weight=t["weight"][:-1]), r"layer\.weight is \[71, 80\], expected"),
    "only scales": ("nvfp4-ct", lambda t: t.pop("weight_packed"), r"and no weight to which they belong"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_damaged_tensors_are_named_with_a_fix(case):
    form, damage, message = BAD[case]
    tensors = packed(form, OUT, IN)
    damage(tensors)
    with pytest.raises(UsageError, match=message) as caught:
        read(form, tensors)
    assert caught.value.fix


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "hqq"}, "quantised by hqq, which is not read"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "GPTQ with 3 bits"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "marlin"}, "checkpoint_format marlin"),
        ({"quant_method": "gptq", "bits": 4}, "KeyError: 'group_size'"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "AWQ's version gemv"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo W4A8_AWQ"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24", "config_groups": {"g": {"weights": {}}}}, "format marlin-24"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "a block of 0 x 128"),
    ],
)  # fmt: skip
def test_what_is_not_read_is_refused_with_the_reason(settings, message):
    with pytest.raises(UnreadPacking, match=message):
        packing(settings)
