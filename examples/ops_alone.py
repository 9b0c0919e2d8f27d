"""The ops without the rest of Isotype: a norm, and the head with its loss in chunks, in bf16. Every
gradient has the dtype of its tensor, under autocast too.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from isotype.ops import linear_cross_entropy, rms_norm

torch.manual_seed(0)
tokens, hidden_size, vocabulary_size = 512, 64, 4000
hidden = torch.randn(tokens, hidden_size).bfloat16().requires_grad_()
# norms often have fp32 weights with bf16 activations
norm = torch.ones(hidden_size, requires_grad=True)
head = (torch.randn(vocabulary_size, hidden_size) / 8).bfloat16().requires_grad_()
targets = torch.randint(vocabulary_size, (tokens,))
targets[::7] = -100  # left out of the loss

loss = linear_cross_entropy(rms_norm(hidden, norm), head, targets)
loss.backward()
print(
    "loss",
    loss.dtype,
    round(loss.item(), 3),
    "gradients",
    hidden.grad.dtype,
    norm.grad.dtype,
    head.grad.dtype,
)

# the exact result, in plain PyTorch and fp64: the op's gradient differs from it by less than one
# rounding step of bf16
exact_inputs = [t.detach().double().requires_grad_() for t in (hidden, norm, head)]
exact_loss = F.cross_entropy(
    F.rms_norm(exact_inputs[0], (hidden_size,), exact_inputs[1], eps=1e-6) @ exact_inputs[2].T,
    targets,
)
exact_loss.backward()
exact_gradient = exact_inputs[0].grad
error = float((hidden.grad.double() - exact_gradient).norm() / exact_gradient.norm())
print(f"relative error of the gradient of the hidden states: {error:.1e}")
assert abs(loss.item() - exact_loss.item()) < 0.01 * exact_loss.item()
assert error < torch.finfo(torch.bfloat16).eps
