"""Implements gradient checkpointing that recomputes only a part of a layer. It does not recompute
results that backward does not read, and results that were kept from the forward.

A layer under gradient checkpointing runs twice: once for its output, and again inside backward for
the tensors that its gradients need. An op can ask this module which of the two runs is in progress.
Nothing is skipped if a hook reads a result of the layer, since the hook would read values that were
not computed. Nothing is skipped in a compiled graph either, since both runs use the same graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# the layers under gradient checkpointing that are running now, the innermost last; empty outside
# gradient checkpointing
running_checkpointed_layers: list[RecomputedLayer] = []


def _identity(x: Any) -> Any:
    return x


class RecomputedLayer:
    """One call of a layer under gradient checkpointing. The first call of `run` is the forward.
    Each further call of `run` recomputes the layer in backward.

    keep_attention     whether the recompute reuses the attention results of the forward; with 32
                       heads of size 128 in bf16, the output takes 8 KiB per token and the logsumexp
                       128 bytes
    offload, restore   functions that move an attention result to other memory and back
    attention_results  the kept results, in the order in which the attentions ran
    """

    def __init__(
        self,
        *,
        keep_attention: bool,
        offload: Callable[[Tensor], Any] = _identity,
        restore: Callable[[Any], Tensor] = _identity,
    ) -> None:
        self.keep_attention = keep_attention
        self.offload = offload
        self.restore = restore
        self.attention_results = list[tuple[Any, ...]]()
        self.has_run = False
        self.is_hooked = False
        # the ids of the autograd nodes of the products whose output can be skipped
        self.product_nodes = list[int]()
        # the position in `product_nodes` of the product whose output no recompute needs, or -1
        self.unused_product = -1

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        self.is_recomputing = self.has_run
        self.has_run = True
        self.next_result = 0
        self.product_count = 0
        running_checkpointed_layers.append(self)
        try:
            output = function(*args)
        finally:
            running_checkpointed_layers.pop()
        if not self.is_recomputing:
            self.unused_product = self._find_unused_product(output)
            self.product_nodes = []
        return output

    def _find_unused_product(self, output: Any) -> int:
        if self.is_hooked:
            return -1
        node = _output_product_node(output)
        position = -1
        if node is not None:
            for i, product_node in enumerate(self.product_nodes):
                if product_node == id(node):
                    position = i
        return position


def current_layer() -> RecomputedLayer | None:
    """Returns the layer that is running, or None outside recomputed layers and in a compiled graph."""
    if not running_checkpointed_layers or torch.compiler.is_compiling():
        return None
    return running_checkpointed_layers[-1]


def is_recomputed() -> bool:
    """Whether the current run is the forward of a layer that will be recomputed. PyTorch does not
    keep the tensors that such a forward saves for backward.
    """
    layer = current_layer()
    return layer is not None and not layer.is_recomputing


def is_output_unused(node: Any) -> bool:
    """Whether the current run is a recompute in which the output of this matrix product is not
    needed. Each matrix product whose output can be skipped calls this function once per run.

    node  the context (`ctx`) of the autograd function that computes the matrix product. It is also
          the `grad_fn` of the output
    """
    layer = current_layer()
    if layer is None:
        return False
    position = layer.product_count
    layer.product_count = layer.product_count + 1
    if layer.is_recomputing:
        return position == layer.unused_product
    layer.product_nodes.append(id(node))
    return False


def mark_layer_hooked() -> None:
    """Records that a hook inside the running layer reads a result."""
    layer = current_layer()
    if layer is not None:
        layer.is_hooked = True


def compute_or_restore_attention(compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Returns `compute()`. In a recompute, it returns the stored results of the forward instead."""
    layer = current_layer()
    if layer is None or not layer.keep_attention:
        return compute()
    if not layer.is_recomputing:
        results = compute()
        # aliases are stored, since autograd attaches the graph to the returned tensors themselves
        layer.attention_results.append(tuple(layer.offload(t.detach()) for t in results))
        return results
    # a recompute calls the same attentions in the same order as the forward
    offloaded = layer.attention_results[layer.next_result]
    layer.next_result = layer.next_result + 1
    return tuple(layer.restore(t).detach() for t in offloaded)


# autograd nodes of views, which save no tensor
_VIEWS = ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0")


def _output_product_node(output: Any) -> Any:
    """If the layer's output is a sum, returns the autograd node of the matrix product whose result
    is one of its terms. A sum saves no tensor for backward, so the recompute can skip this matrix
    product.

    Gemma applies a norm to the MLP's output before the sum. The norm saves its input, so the
    recompute needs the matrix product, and this function returns None.
    """
    outputs = output
    if not isinstance(output, tuple):
        outputs = (output,)
    first, *other_outputs = outputs
    for tensor in other_outputs:
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            # another output may depend on the product
            return None
    if not isinstance(first, Tensor):
        return None
    node = first.grad_fn
    if node is None or type(node).__name__ != "AddBackward0":
        return None
    products = [
        term
        for term in map(_skip_views, node.next_functions)
        if type(term).__name__ in _SKIPPABLE_PRODUCTS
    ]
    if len(products) != 1:
        return None
    return products[0]


# autograd nodes of functions that call `is_output_unused`
_SKIPPABLE_PRODUCTS = ("LoraMlpBackward", "LoraLinearBackward", "ExpertsBackward")


def _skip_views(edge: Any) -> Any:
    node = edge[0]
    while type(node).__name__ in _VIEWS:
        node = node.next_functions[0][0]
    return node


# one zero for each device and dtype
_zeros: dict[tuple[torch.device, torch.dtype], Tensor] = {}


def placeholder_tensor(shape: tuple[int, ...], like: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a tensor of this shape for values that are never read. All its elements share the
    memory of one element. Checkpointing compares only its metadata.

    The element is created once for each device and dtype and is then cached, because creating it
    takes a kernel launch. Without the cache, a training step with 32 layers would make 416 such
    launches.
    """
    if like.is_meta or type(like) not in (Tensor, torch.nn.Parameter):
        # a tensor without data, or a subclass of a mode that tracks tensors
        return like.new_zeros((), dtype=dtype).expand(shape)
    zero = _zeros.get((like.device, dtype))
    if zero is None:
        zero = _zeros[like.device, dtype] = like.new_zeros((), dtype=dtype)
    return zero.expand(shape)
