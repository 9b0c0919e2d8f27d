import pytest
import torch

import isotype
from isotype import dtypes
from isotype.dtypes import FLOATS, TensorSpec
from isotype.errors import DtypeError, ShapeError


def test_common_spellings_of_a_dtype_are_parsed():
    spellings = ("torch.bfloat16", "c10::Half", "BFloat16", "f32")
    assert [dtypes.parse(text) for text in spellings] == ["bf16", "fp16", "bf16", "fp32"]
    with pytest.raises(ValueError, match="bf16 fp16"):
        dtypes.parse("bf17")


def test_words_round_trip_through_torch():
    for word in FLOATS:
        assert dtypes.format_dtype(dtypes.to_torch(word)) == word
        assert dtypes.torch_dtype_name(word) == str(dtypes.to_torch(word)).removeprefix("torch.")
        assert dtypes.itemsize(word) == dtypes.to_torch(word).itemsize
        assert dtypes.eps(word) == torch.finfo(dtypes.to_torch(word)).eps


def test_expect_returns_its_tensor_or_refuses_a_wrong_dtype_or_shape():
    x = torch.zeros(2, 3, dtype=torch.bfloat16)
    for spec in ("bf16[T 3]", "fp32|bf16[*n 3]", "float[...]"):
        assert isotype.expect(x, spec) is x
    for spec, error in (
        ("fp32[T D]", DtypeError),
        ("bf16[T D E]", ShapeError),
        ("bf16[T 4]", ShapeError),
        ("bf16[T T]", ShapeError),
    ):
        with pytest.raises(error):
            isotype.expect(x, spec)
    for text in ("bf16", "bf17[T]", "bf16[*a *b]"):
        with pytest.raises(ValueError):
            TensorSpec.parse(text)
