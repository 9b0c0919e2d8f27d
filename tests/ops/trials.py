"""What the op tests share: an error, how many times that of plain PyTorch's it may be, and the
sizes of tensors that a call makes.
"""

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# The op's error against fp64 may be this many times that of the plain ops at the same dtypes: one
# factor for every op, output and gradient.
FACTOR = 2.0


def error(got: Tensor, truth: Tensor) -> float:
    """Relative error in the norm; nan and inf are infinitely wrong."""
    got, truth = got.detach().double(), truth.detach().double()
    if not torch.isfinite(got).all():
        return float("inf")
    return float((got - truth).norm() / truth.norm().clamp_min(1e-30))


class Sizes(TorchDispatchMode):
    """Inside, `numbers` gets how many numbers each result of an operator holds; only of those in
    `dtype`, where it is given.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.dtype, self.numbers = dtype, list[int]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.numbers += [
            t.numel()
            for t in tree_leaves(out)
            if isinstance(t, Tensor) and self.dtype in (None, t.dtype)
        ]
        return out


def floor(*dtypes: torch.dtype | None) -> float:
    """Half a rounding step of the narrowest dtype involved: below it no implementation can be told
    from another.
    """
    return max(torch.finfo(d).eps for d in dtypes if d is not None) / 2
