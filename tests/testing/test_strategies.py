import torch
from hypothesis import given, settings
from right_functions import SiluMul

from isotype.testing import ampcheck, strategies
from isotype.testing.expect import binding, expect


@given(strategies.tensors(strategies.shapes(2, 3), dtype=strategies.dtypes(("bf16",))))
def test_tensors_have_the_shape_and_dtype_asked_for(x):
    assert x.dtype == torch.bfloat16
    assert 2 <= x.dim() <= 3
    assert max(x.shape) <= 17


@given(strategies.arguments("gate: F[*n d], up: F[*n d], weight: fp32[d 4], index: int[n]"))
def test_arguments_fit_their_signature(drawn):
    gate, up, weight, index = drawn
    with binding():
        expect(gate, "F[*n d]")
        expect(up, "F[*n d]")
        expect(weight, "fp32[d 4]")
        expect(index, "int[_]")
    assert gate.requires_grad
    assert not index.requires_grad


@settings(max_examples=5, deadline=None)
@given(strategies.arguments("gate: F[*n d], up: F[*n d]"))
def test_a_right_function_is_right_everywhere(drawn):
    ampcheck(SiluMul, drawn)


@given(strategies.shapes(1, 2, empty=True))
def test_empty_shapes_only_when_asked_for(shape):
    assert all(size >= 0 for size in shape)
