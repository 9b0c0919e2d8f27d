import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import isotype
from isotype import dtypes
from isotype.dtypes import FLOATS, TensorSpec
from isotype.errors import DtypeError, ShapeError


@pytest.mark.parametrize(("text", "word"), [("torch.bfloat16", "bf16"), ("c10::Half", "fp16"), ("BFloat16", "bf16"), ("f32", "fp32")])
def test_common_spellings_of_a_dtype_are_parsed(text, word):
    assert dtypes.parse(text) == word


def test_unknown_word_names_the_known_ones():
    with pytest.raises(ValueError, match="bf16 fp16"):
        dtypes.parse("bf17")


@pytest.mark.parametrize("word", FLOATS)
def test_round_trips_through_torch(word):
    assert dtypes.name(dtypes.to_torch(word)) == word
    assert dtypes.torch_word(word) == str(dtypes.to_torch(word)).removeprefix("torch.")
    assert dtypes.itemsize(word) == dtypes.to_torch(word).itemsize
    assert dtypes.eps(word) == torch.finfo(dtypes.to_torch(word)).eps


@given(st.sampled_from([*FLOATS, "complex64", "complex128"]), st.sampled_from([*FLOATS, "complex64", "complex128"]))
def test_promotes_as_torch_does(left, right):
    assert dtypes.to_torch(dtypes.promote(left, right)) == torch.promote_types(dtypes.to_torch(left), dtypes.to_torch(right))


def test_expect_returns_its_tensor():
    x = torch.zeros(2, 3, dtype=torch.bfloat16)
    assert isotype.expect(x, "bf16[T 3]") is x
    assert isotype.expect(x, "fp32|bf16[*n 3]") is x
    assert isotype.expect(x, "float[...]") is x


@pytest.mark.parametrize(
    ("spec", "error"), [("fp32[T D]", DtypeError), ("bf16[T D E]", ShapeError), ("bf16[T 4]", ShapeError), ("bf16[T T]", ShapeError)]
)
def test_expect_refuses_a_wrong_dtype_or_shape(spec, error):
    with pytest.raises(error):
        isotype.expect(torch.zeros(2, 3, dtype=torch.bfloat16), spec)


def test_a_spec_without_meaning_is_refused():
    for text in ("bf16", "bf17[T]", "bf16[*a *b]"):
        with pytest.raises(ValueError):
            TensorSpec.parse(text)
