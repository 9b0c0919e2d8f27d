"""A mask of -1e9 in fp16 scores."""

import sys

import torch


def masked_attention(scores, mask):
    constant = torch.finfo(scores.dtype).min if "repaired" in sys.argv else -1e9
    return scores.masked_fill(mask, constant).softmax(-1)


masked_attention(torch.randn(3, 3).half(), torch.ones(3, 3).triu(1).bool())
