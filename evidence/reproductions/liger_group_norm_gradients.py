"""liger-kernel 0.8.5, group norm: output and gradients against torch in fp64, fp32 inputs, repaired interpreter."""

import torch

from isotype.testing.interpreter import install

install()
from liger_kernel.ops.group_norm import LigerGroupNormFunction  # noqa: E402

torch.manual_seed(0)
x, w, b = torch.randn(2, 6, 32), torch.randn(6), torch.randn(6)
ours, truth = [t.clone().requires_grad_() for t in (x, w, b)], [t.double().requires_grad_() for t in (x, w, b)]
out = LigerGroupNormFunction.apply(*ours, 6, 3, 1e-6)
right = torch.nn.functional.group_norm(truth[0], 3, truth[1], truth[2], 1e-6)
g = torch.randn_like(out)
grads = torch.autograd.grad(out, ours, g)
truths = torch.autograd.grad(right, truth, g.double())
print("output", ((out.double() - right).norm() / right.norm()).item())
print("gradients", [((a.double() - t).norm() / t.norm()).item() for a, t in zip(grads, truths)])
