"""The ops alone: the head with its loss in chunks, and a norm, in bf16. Every gradient has its
tensor's dtype, under autocast too.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from isotype.ops import linear_cross_entropy, rms_norm

torch.manual_seed(0)
tokens, hidden_size, words = 512, 64, 4000
hidden = torch.randn(tokens, hidden_size).bfloat16().requires_grad_()
# fp32, as norms often are beside bf16 activations
norm = torch.ones(hidden_size, requires_grad=True)
head = (torch.randn(words, hidden_size) / 8).bfloat16().requires_grad_()
targets = torch.randint(words, (tokens,))
targets[::7] = -100  # not learnt

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

# the same in plain PyTorch and fp64: the truth, of which the op's gradient is off by a rounding
# step of bf16
exact = [t.detach().double().requires_grad_() for t in (hidden, norm, head)]
truth = F.cross_entropy(
    F.rms_norm(exact[0], (hidden_size,), exact[1], eps=1e-6) @ exact[2].T, targets
)
truth.backward()
error = float((hidden.grad.double() - exact[0].grad).norm() / exact[0].grad.norm())
print(f"gradient of the hidden states: {error:.1e} from the truth")
assert abs(loss.item() - truth.item()) < 0.01 * truth.item()
assert error < torch.finfo(torch.bfloat16).eps
