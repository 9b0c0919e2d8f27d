"""Finds in autograd's graph the operation that changed the dtype of a tensor."""

from __future__ import annotations

from typing import Any

import torch

_MAX_NODES = 200  # nodes of the autograd graph that one search visits


def read_grad_fn(tensor: torch.Tensor) -> Any:
    """Returns the node of autograd that computed a tensor, or None. PyTorch raises an error for a
    view that was made and changed in place without gradients, such as `embedding.weight[0].zero_()`
    in `nn.Embedding`: such a view has no node.
    """
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None


def find_widening_operation(tensor: torch.Tensor | None) -> str:
    """Returns the name of the operation that gave a tensor its dtype, such as `Add` for the sum of
    a bf16 and an fp32 tensor and `ToCopy` for a cast. Returns "" if the graph contains no tensor of
    another dtype, or if the tensor is not part of a graph.
    """
    node = None if tensor is None else read_grad_fn(tensor)
    if tensor is None or node is None:
        return ""
    for _ in range(_MAX_NODES):
        parents = [parent for parent, _ in node.next_functions if parent is not None]
        dtypes = [_output_dtype(parent) for parent in parents]
        if any(dtype not in (None, tensor.dtype) for dtype in dtypes):
            return type(node).__name__.partition("Backward")[0]
        if not parents:
            return ""
        node = parents[0]
    return ""


def _output_dtype(node: Any) -> torch.dtype | None:
    """Returns the dtype of the first output of a node. For a leaf, it is the leaf's dtype."""
    metadata = getattr(node, "_input_metadata", ())
    dtype = metadata[0].dtype if metadata else None
    return dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else None
