"""One op beside plain PyTorch under every dtype combination: what the op tests share. The tolerance comes from the plain ops' own error."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
AUTOCAST = (None, torch.bfloat16, torch.float16)
# The op's error against fp64 may be this many times that of the plain ops at the same dtypes: one factor for every op, output and gradient.
FACTOR = 2.0


def autocast(dtype: torch.dtype | None, device: str = "cpu"):
    return torch.autocast(device, dtype) if dtype is not None else nullcontext()


def error(got: Tensor, truth: Tensor) -> float:
    """Relative error in the norm; nan and inf are infinitely wrong."""
    got, truth = got.detach().double(), truth.detach().double()
    if not torch.isfinite(got).all():
        return float("inf")
    return float((got - truth).norm() / truth.norm().clamp_min(1e-30))


def floor(*dtypes: torch.dtype | None) -> float:
    """Half a rounding step of the narrowest dtype involved: below it no implementation can be told from another."""
    return max(torch.finfo(d).eps for d in dtypes if d is not None) / 2


class Raw:
    """The dtypes in which gradients really leave, before autograd's silent cast: leaves with `grad_dtype = None` keep them."""

    @staticmethod
    def leaf(x: Tensor, dtype: torch.dtype) -> Tensor:
        leaf = x.to(dtype).detach().clone().requires_grad_()
        leaf.grad_dtype = None
        return leaf


def run(f: Callable[..., Tensor], leaves: Sequence[Tensor], dy: Tensor, cast: torch.dtype | None, inside: bool):
    device = leaves[0].device.type
    with autocast(cast, device):
        y = f(*leaves)
    with autocast(cast if inside else None, device):
        y.backward(dy.to(y.dtype).expand_as(y))
    return y, [leaf.grad for leaf in leaves]


def keeps_its_dtypes(
    op: Callable[..., Tensor],
    plain: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    *,
    groups: Sequence[int],
    truth: Callable[..., Tensor] | None = None,
    out_dtype: Callable[..., torch.dtype],
    dtypes: Sequence[torch.dtype] = DTYPES,
    casts: Sequence[torch.dtype | None] = AUTOCAST,
) -> int:
    """Runs every combination; inputs of one group share a dtype. Gives the number of combinations.

    plain      the same mathematics in PyTorch's own ops; where they refuse a combination, the promoted dtypes are compared
    out_dtype  of (dtypes of the inputs, autocast dtype): what the contract says
    """
    tried = 0
    for choice in itertools.product(dtypes, repeat=max(groups) + 1):
        for cast, inside in itertools.product(casts, (False, True)):
            if cast is None and inside:
                continue
            own = [choice[g] for g in groups]
            label = f"{own} autocast={cast} backward {'inside' if inside else 'outside'}"
            leaves = [Raw.leaf(x, d) for x, d in zip(inputs, own)]
            # the truth is the mathematics on the values given, after the input's own rounding
            exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
            y64 = (truth or plain)(*exact)
            torch.manual_seed(1)
            dy = torch.randn(y64.shape, dtype=torch.float64).to(y64.device)
            y64.backward(dy)
            got, grads = run(op, leaves, dy, cast, inside)
            assert got.dtype == out_dtype(own, cast), f"{label}: output {got.dtype}"
            for leaf, grad in zip(leaves, grads):
                assert grad.dtype == leaf.dtype, f"{label}: a gradient leaves in {grad.dtype}, its tensor is {leaf.dtype}"
            try:
                peer = [Raw.leaf(x, d) for x, d in zip(inputs, own)]
                want, peer_grads = run(plain, peer, dy, cast, inside)
            except RuntimeError:
                wide = own[0]
                for d in own[1:]:
                    wide = torch.promote_types(wide, d)
                peer = [Raw.leaf(leaf, wide) for leaf in leaves]
                want, peer_grads = run(plain, peer, dy, cast, inside)
            least = floor(*own, cast, got.dtype)
            for what, mine, theirs, exactly in zip(
                ["output", *(f"gradient {i}" for i in range(len(leaves)))],
                [got, *grads],
                [want, *peer_grads],
                [y64, *(e.grad for e in exact)],
            ):
                mine_error, their_error = error(mine, exactly), error(theirs, exactly)
                assert mine_error <= FACTOR * max(their_error, least), f"{label}: {what} {mine_error:.1e}, plain {their_error:.1e}"
            tried += 1
    return tried
