"""Programs that lose bits in tensors without a dense storage of their own: sparse ones, and rows of several lengths."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .program import program
from .tiny import HIDDEN, MLP, tiny


class SparseActivations(MLP):
    def forward(self, x: Tensor) -> Tensor:
        sparse = x.detach().half().flatten(0, 1).to_sparse()
        return super().forward(x + ((sparse * 2).to_dense().view_as(x).float() / 2 - x).detach())


class NarrowGraph(MLP):
    """Neighbours are mixed by a sparse matrix in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("graph", (torch.eye(HIDDEN) * 1.3).to_sparse(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.sparse.mm(self.graph.bfloat16(), x.bfloat16().flatten(0, 1).T).T
        return super().forward(x + 0.1 * mixed.reshape(x.shape).to(x.dtype))


class RowsInHalf(MLP):
    def forward(self, x: Tensor) -> Tensor:
        rows = torch.nested.nested_tensor([row.half() for row in x.detach()])
        return super().forward(x + (torch.nested.to_padded_tensor(rows * 2, 0.0).to(x.dtype) / 2 - x).detach())


class JaggedRowsInHalf(MLP):
    def forward(self, x: Tensor) -> Tensor:
        rows = torch.nested.as_nested_tensor([x[0], x[1]], layout=torch.jagged).half()
        return super().forward(F.silu(rows).to_padded_tensor(0.0).to(x.dtype))


for made in (SparseActivations, NarrowGraph, RowsInHalf, JaggedRowsInHalf):
    program(made.__name__, lambda made=made: tiny(mlp=made), preset="fp32")
