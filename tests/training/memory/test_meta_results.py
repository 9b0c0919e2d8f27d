"""Operators on meta tensors give the same results as PyTorch's, and run once for equal arguments."""

import pytest
import torch
from tests.api import MetaResults, ReuseMetaResults

ATEN = torch.ops.aten


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def layout(tensor: torch.Tensor) -> tuple:
    return (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


CALLS = [
    (ATEN.addmm.default, (meta(5), meta(3, 4), meta(4, 5)), {}),
    (ATEN.mm.default, (meta(4, 3).t(), meta(4, 5)), {}),
    (ATEN.clone.default, (meta(4, 3).t(),), {}),
    (ATEN.clone.default, (meta(4, 3).t(),), {"memory_format": torch.contiguous_format}),
    (ATEN.add.Tensor, (meta(3, dtype=torch.int64), 1), {}),
    (ATEN.add.Tensor, (meta(3, dtype=torch.int64), 1.0), {}),
    (ATEN.add.Tensor, (meta(3, dtype=torch.bool), True), {}),
    (ATEN.cat.default, ([meta(2, 3), meta(4, 3)],), {}),
    (ATEN.native_layer_norm.default, (meta(2, 3), [3], None, None, 1e-5), {}),
    (ATEN.view.default, (meta(2, 3), [6]), {}),
    (ATEN._unsafe_view.default, (meta(2, 3), [6]), {}),
    (ATEN.empty.memory_format, ([2, 3],), {"device": torch.device("cpu")}),
]


@pytest.mark.parametrize(("function", "args", "kwargs"), CALLS)
def test_a_repeated_call_gives_pytorchs_result(function, args, kwargs):
    results = MetaResults()
    for other_function, other_args, other_kwargs in CALLS:
        results.compute(other_function, other_args, other_kwargs)
    expected = function(*args, **kwargs)
    for _ in range(2):
        result = results.compute(function, args, kwargs)
        assert type(result) is type(expected)
        pairs = (
            zip(result, expected, strict=True)
            if isinstance(expected, tuple)
            else [(result, expected)]
        )
        assert all(layout(one) == layout(other) for one, other in pairs)
    shares_storage = function in (ATEN.view.default, ATEN._unsafe_view.default)
    if shares_storage:
        assert result.untyped_storage()._cdata == args[0].untyped_storage()._cdata


def test_equal_calls_run_once_and_their_results_have_own_memory():
    calls = []

    def double(x, factor):
        calls.append(factor)
        return torch.empty_like(x)

    results = MetaResults()
    first, second = (results.compute(double, (meta(2, 3), 2), {}) for _ in range(2))
    assert calls == [2]
    assert first.untyped_storage()._cdata != second.untyped_storage()._cdata
    results.compute(double, (meta(3, 2), 2), {})
    results.compute(double, (meta(2, 3), 3), {})
    assert calls == [2, 2, 3]


def test_operators_that_change_a_tensor_return_it_and_run_on_the_cpu():
    x = meta(2, 3)
    y = torch.zeros(2, 3)
    with ReuseMetaResults():
        for _ in range(3):
            assert x.add_(1) is x
            assert y.add_(1) is y
    assert y.tolist() == [[3.0] * 3] * 2
