"""A traceback's own line names the function and its tensors."""

from __future__ import annotations

import pytest

from isotype.doctor.explain.log import Frame
from isotype.doctor.explain.situation import failing_call, read

TORCH = Frame("/env/lib/python3.11/site-packages/torch/functional.py", 372, "einsum", "return _VF.einsum(equation, operands)")
LAYER = Frame("/env/lib/python3.11/site-packages/torch/nn/modules/linear.py", 125, "forward", "return F.linear(input, self.weight)")


@pytest.mark.parametrize(
    ("code", "function", "tensors"),
    [
        ("return torch.einsum('ij,jk->ik', h, probs)", "einsum", ("h", "probs")),
        ("y = a @ self.w.t()", "@", ("a", "self.w.t()")),
        ("acc.addbmm_(g, b.mT)", "addbmm_", ("acc", "g", "b.mT")),
        ("if torch.allclose(a, b, atol=1e-2):", "allclose", ("a", "b")),
        ("out = F.grid_sample(x, grid=points, align_corners=False)", "grid_sample", ("x", "points")),
    ],
)
def test_the_call_and_its_tensors(code: str, function: str, tensors: tuple[str, ...]):
    call = failing_call(read([Frame("/home/me/m.py", 3, "forward", code), TORCH]))
    assert call is not None
    assert (call.function, call.tensors) == (function, tensors)
    assert call.is_product == (function not in ("allclose", "grid_sample"))
    assert call.in_place == function.endswith("_")


@pytest.mark.parametrize(
    "frames",
    [
        [Frame("/home/me/m.py", 3, "forward", "return self.fc(x)"), LAYER],  # a layer's weight takes part
        [Frame("/home/me/m.py", 3, "forward", "return (a @ b) @ c")],  # which of the two products is not said
        [Frame("/home/me/m.py", 3, "forward", "return torch.einsum('ij,jk->ik',")],  # cut
        [],
    ],
)
def test_what_the_line_does_not_decide_is_none(frames: list[Frame]):
    assert failing_call(read(frames)) is None
