"""A wrapper of the optimizer returns the autocast region in which the detector runs; autocast
computes `prod` in fp32, and the program's own check wants one dtype.
"""

import contextlib
import sys

import torch
from torch import nn


class AmpWrapper:
    def __init__(self, dtype):
        self.dtype = dtype

    def context(self):
        if self.dtype is None:
            return contextlib.nullcontext()
        return torch.autocast("cpu", dtype=self.dtype)


def suppress(boxes, scores):
    if boxes.dtype != scores.dtype:
        raise RuntimeError(f"expected scalar type {boxes.dtype} but found {scores.dtype}")
    return boxes[scores.argsort()]


def decode(factors):
    sizes = factors.prod(0)
    return torch.cat([-sizes, sizes], dim=1)


def detect(head, images):
    features = head(images)
    boxes = decode(features[None].sigmoid())
    scores = features.amax(1)
    if "repaired" in sys.argv:
        return suppress(boxes.to(torch.bfloat16), scores)
    return suppress(boxes, scores)


wrapper = AmpWrapper(torch.bfloat16)
with contextlib.ExitStack() as stack:
    stack.enter_context(torch.no_grad())
    stack.enter_context(wrapper.context())
    detect(nn.Linear(4, 2), torch.randn(3, 4))
