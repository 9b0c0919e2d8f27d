"""The int64 mask of a tokenizer is passed to attention."""

import sys

import torch
import torch.nn.functional as F


def attend(hidden, attention_mask):
    mask = attention_mask[:, None, None, :]
    if "repaired" in sys.argv:
        mask = mask.bool()
    return F.scaled_dot_product_attention(hidden, hidden, hidden, attn_mask=mask)


attend(torch.randn(1, 2, 3, 4).bfloat16(), torch.tensor([[1, 1, 0]]))
