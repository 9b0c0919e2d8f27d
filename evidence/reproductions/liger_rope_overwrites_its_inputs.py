"""liger-kernel 0.8.5, RoPE: is the caller's q overwritten, and is a second backward right? fp32, repaired interpreter."""

import torch

from isotype.testing.interpreter import install

install()
from liger_kernel.ops.rope import LigerRopeFunction  # noqa: E402

torch.manual_seed(0)
q0, k0 = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 8)
angle = torch.outer(torch.arange(4.0), 1.0 / 10000 ** (torch.arange(0, 8, 2) / 8)).repeat(1, 2)[None]
cos, sin = angle.cos(), angle.sin()


def rotate(x):
    a, b = x.chunk(2, -1)
    return x * cos.double()[:, None] + torch.cat([-b, a], -1) * sin.double()[:, None]


q, k = q0.clone().requires_grad_(), k0.clone().requires_grad_()
inner_q, inner_k = q * 1.0, k * 1.0
before = inner_q.detach().clone()
out_q, out_k = LigerRopeFunction.apply(inner_q, inner_k, cos, sin)
print("output error", (out_q.double() - rotate(q0.double())).abs().max().item())
print("caller's q changed:", not torch.equal(before, inner_q.detach()))
g = torch.randn_like(out_q)
q64 = q0.double().requires_grad_()
truth = torch.autograd.grad(rotate(q64), q64, g.double())[0]
kept = g.clone()
first = torch.autograd.grad(out_q, inner_q, g, retain_graph=True)[0].clone()
print(
    "incoming gradient changed:", not torch.equal(g, kept), " first backward error", ((first.double() - truth).norm() / truth.norm()).item()
)
second = torch.autograd.grad(out_q, inner_q, kept, retain_graph=True)[0]
print("second backward error", ((second.double() - truth).norm() / truth.norm()).item())
