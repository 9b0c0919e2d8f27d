"""liger-kernel 0.8.5, conform's AC010 and AC016 on fused linear JSD: a second backward, and inputs that are not contiguous.

Runs on a CPU in the repaired Triton interpreter; the truth is plain torch in fp64.
"""

import torch

from isotype.testing.interpreter import install

install()
from liger_kernel.ops.fused_linear_jsd import LigerFusedLinearJSDFunction  # noqa: E402


def reference(student, weight, teacher, teacher_weight):
    p, q = (student @ weight.T).log_softmax(-1), (teacher @ teacher_weight.T).log_softmax(-1)
    mean = (p.exp() + q.exp()).mul(0.5).log()
    return 0.5 * ((p.exp() * (p - mean)).sum() + (q.exp() * (q - mean)).sum()) / len(student)


def relative(a, b):
    return ((a.double() - b).norm() / b.norm()).item()


torch.manual_seed(0)
student, weight, teacher, teacher_weight = (torch.randn(n, 16) for n in (6, 20, 6, 20))
for name, given in (("contiguous", student), ("transposed", student.T.contiguous().T)):
    s, w = given.clone(memory_format=torch.preserve_format).requires_grad_(), weight.clone().requires_grad_()
    s64, w64 = student.double().requires_grad_(), weight.double().requires_grad_()
    truth = torch.autograd.grad(reference(s64, w64, teacher.double(), teacher_weight.double()), (s64, w64))
    loss = LigerFusedLinearJSDFunction.apply(s, w, teacher, teacher_weight)
    first = [g.clone() for g in torch.autograd.grad(loss, (s, w), torch.tensor(0.5), retain_graph=True)]
    second = [g.clone() for g in torch.autograd.grad(loss, (s, w), torch.tensor(0.5), retain_graph=True)]
    for label, got in (("first", first), ("second", second)):
        print(name, label, "backward with 0.5, relative error:", [round(relative(g, 0.5 * t), 6) for g, t in zip(got, truth)])
