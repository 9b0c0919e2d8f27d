"""A compiled function multiplies fp32 probabilities by bf16 values."""

import sys

import torch


def attend(scores, values):
    probabilities = scores.softmax(-1, dtype=torch.float32)
    if repaired:
        probabilities = probabilities.to(values.dtype)
    return torch.matmul(probabilities, values)


repaired = "repaired" in sys.argv
compiled = torch.compile(attend, backend="eager")
compiled(torch.randn(2, 3, 3).bfloat16(), torch.randn(2, 3, 4).bfloat16())
