"""An attention mask of floats is combined with `&`, an operator of bool and integers."""

import sys

import torch
from torch import nn


class Attention(nn.Module):
    def build_mask(self, valid):
        mask = torch.ones(valid.shape[-1], valid.shape[-1])
        return mask.bool() if "repaired" in sys.argv else mask

    def forward(self, x, valid):
        mask = self.build_mask(valid)
        allowed = mask & valid
        return nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=allowed)


Attention()(torch.randn(1, 4, 8), torch.tensor([True, True, True, False]))
