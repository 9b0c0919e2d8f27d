"""Functions that the gate lets pass, and one wrong function for each question."""

from __future__ import annotations

import torch


def inputs(rows=6, columns=16):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, columns, generator=generator)
    return x, torch.randn(rows + 1, columns, generator=generator)


def reference(x, weight):
    return torch.tanh(x @ weight.t())


class TanhLinear(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, x, weight):
        out = torch.tanh(x @ weight.t())
        ctx.save_for_backward(x, weight, out)
        return out

    @classmethod
    def product(cls, left, right):
        return left @ right

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, d):
        x, weight, out = ctx.saved_tensors
        dtype = torch.promote_types(out.dtype, torch.float32)
        wide = d.to(dtype) * (1 - out.to(dtype) ** 2)
        product = ctx._forward_cls.product
        return product(wide, weight.to(dtype)).to(x.dtype), (wide.t() @ x.to(dtype)).to(
            weight.dtype
        )


class CompiledPart(TanhLinear):
    """Its backward calls a function that PyTorch's compiler must see as one graph."""

    @classmethod
    def product(cls, left, right):
        return _compiled_product(left, right)


@torch.compile(fullgraph=True, dynamic=True)
def _compiled_product(left, right):
    return left @ right


class WrongFormula(TanhLinear):
    @classmethod
    def product(cls, left, right):
        return 0.5 * (left @ right)


class Imprecise(TanhLinear):
    @classmethod
    def product(cls, left, right):
        total = torch.zeros(left.shape[0], right.shape[1], dtype=torch.bfloat16)
        if left.dtype == torch.float64:
            total = total.double()
        for k in range(left.shape[1]):
            total += left[:, k : k + 1].to(total.dtype) * right[k : k + 1].to(total.dtype)
        return total


class Unscaled(torch.autograd.Function):
    """Its backward has no custom_bwd, so that it meets two dtypes after autocast."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return torch.tanh(x @ weight.t())

    @staticmethod
    def backward(ctx, d):
        x, weight = ctx.saved_tensors
        inner = d * (1 - torch.tanh(x @ weight.t()) ** 2)
        return inner @ weight, inner.t() @ x


class WrongDtype(TanhLinear):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, x, weight):
        out = torch.tanh(x @ weight.t())
        ctx.save_for_backward(x, weight, out)
        return out.float()


class InheritsForward(TanhLinear):
    """entmax 1.3 calls the forward of a base class in this way, which the compiler cannot trace."""

    @classmethod
    def forward(cls, ctx, x, weight):
        return super().forward(ctx, x, weight)


def reads_while_traced(x, weight):
    """Another result when it is compiled, because the tracer runs the Python code once."""
    factor = 1.25 if torch.compiler.is_compiling() else 1.0
    return factor * torch.tanh(x @ weight.t())


def random_noise(x, weight):
    return torch.tanh(x @ weight.t()) + torch.rand(())


def needs_a_gpu(x, weight):
    if not x.is_cuda:
        raise ValueError("needs a GPU")
    return reference(x, weight)
