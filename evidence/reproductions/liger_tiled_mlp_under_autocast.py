"""liger-kernel 0.8.5, LT012: the tiled MLP recomputes in backward outside autocast."""

import torch
from liger_kernel.ops.tiled_mlp import LigerTiledMLPFunction

mlp, x = torch.nn.Linear(8, 8), torch.randn(1, 16, 8, dtype=torch.bfloat16).requires_grad_()
with torch.autocast("cpu", dtype=torch.bfloat16):
    y = LigerTiledMLPFunction.apply(lambda module, t: module(t), mlp, x, 2, list(mlp.parameters()))
y.float().sum().backward()
