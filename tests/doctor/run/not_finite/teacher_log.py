"""A probability of the teacher is 0 in fp16, and its logarithm is multiplied by it."""

import sys

import torch
from torch import nn

REPAIRED = "repaired" in sys.argv

torch.manual_seed(0)
teacher = nn.Linear(12, 30).half()
student = nn.Linear(12, 30).half()
nn.init.normal_(teacher.weight, std=6.0)
optimizer = torch.optim.SGD(student.parameters(), lr=1e-3)
for _ in range(2):
    x = torch.randn(4, 12).half()
    with torch.no_grad():
        p = teacher(x).softmax(-1)
    if REPAIRED:
        p = p.clamp(min=torch.finfo(p.dtype).tiny)
    q = student(x).softmax(-1)
    loss = (p * (p.log() - q.log())).sum(-1).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
