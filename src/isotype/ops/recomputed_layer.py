"""What a recomputed layer leaves out: results that backward does not need, or that were kept.

A layer under checkpointing runs twice: for its output, and again inside backward for what its
gradients need. Ops ask here which run it is. Nothing is left out where a hook reads what a layer
gives: it would read values that were never computed. Nor in a compiled graph, which is the same for
both runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# the layer that runs now, innermost last
layers_running: list[RecomputedLayer] = []


def _identity(x: Any) -> Any:
    return x


class RecomputedLayer:
    """One call of one layer. `run` it first for the forward, then for every recompute.

    attention_results  of the attentions in the forward, in order, where they are kept: output and logsumexp,
             8 KiB and 128 bytes a token with 32 heads of 128 in bf16; `offload` takes each away and
             `restore` brings it back
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
        self.has_run = self.is_hooked = False
        # products whose output can be left out, by the autograd node that each made; the position
        # of the one that is not needed again
        self.product_nodes = list[int]()
        self.unused_product = -1

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        self.recomputing = self.has_run
        self.has_run = True
        self.next_result = 0
        self.product_count = 0
        layers_running.append(self)
        try:
            output = function(*args)
        finally:
            layers_running.pop()
        if not self.recomputing:
            node = None if self.is_hooked else _output_product_node(output)
            self.unused_product = max(
                (
                    i
                    for i, product_node in enumerate(self.product_nodes)
                    if node is not None and product_node == id(node)
                ),
                default=-1,
            )
            self.product_nodes = []
        return output


def current_layer() -> RecomputedLayer | None:
    """The layer that runs now; None outside recomputed layers and in a compiled graph."""
    if not layers_running or torch.compiler.is_compiling():
        return None
    return layers_running[-1]


def is_recomputed() -> bool:
    """Whether what runs now is a layer's forward that will be run again: what it saves for backward
    is dropped.
    """
    layer = current_layer()
    return layer is not None and not layer.recomputing


def is_output_unused(node: Any) -> bool:
    """Asked once by each product whose output can be left out: whether this is a recompute in which
    nobody will look at it.

    node  the autograd function's own context, which becomes the output's `grad_fn`
    """
    layer = current_layer()
    if layer is None:
        return False
    position = layer.product_count
    layer.product_count = layer.product_count + 1
    if layer.recomputing:
        return position == layer.unused_product
    layer.product_nodes.append(id(node))
    return False


def mark_layer_hooked() -> None:
    """Tells the layer that runs now that a hook reads a result inside it."""
    layer = current_layer()
    if layer is not None:
        layer.is_hooked = True


def compute_or_restore_attention(compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """`compute()`, or what it gave in the forward that is recomputed now."""
    layer = current_layer()
    if layer is None or not layer.keep_attention:
        return compute()
    if not layer.recomputing:
        results = compute()
        # aliases: autograd writes the graph onto the very tensors that a function returns
        layer.attention_results.append(tuple(layer.offload(t.detach()) for t in results))
        return results
    # a recompute calls what the forward called, in its order
    offloaded = layer.attention_results[layer.next_result]
    layer.next_result = layer.next_result + 1
    return tuple(layer.restore(t).detach() for t in offloaded)


# views of a term, which save nothing
_VIEWS = ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0")


def _output_product_node(output: Any) -> Any:
    """The node of the product that the layer's output, a sum, has as one of its terms, as it came:
    a sum saves nothing for backward.

    Gemma's form, a norm of the MLP's output, is none: the norm saves its input.
    """
    first, *other_outputs = output if isinstance(output, tuple) else (output,)
    if any(isinstance(t, Tensor) and t.requires_grad for t in other_outputs):
        # something else is made of what the layer computes
        return None
    node = first.grad_fn if isinstance(first, Tensor) else None
    if node is None or type(node).__name__ != "AddBackward0":
        return None
    products = [
        term
        for term in map(_skip_views, node.next_functions)
        if type(term).__name__ in _SKIPPABLE_PRODUCTS
    ]
    return products[0] if len(products) == 1 else None


_SKIPPABLE_PRODUCTS = ("LoraMlpBackward", "LoraLinearBackward", "ExpertsBackward")


def _skip_views(edge: Any) -> Any:
    node = edge[0]
    while type(node).__name__ in _VIEWS:
        node = node.next_functions[0][0]
    return node


# one zero of each device and dtype
_zeros: dict[tuple[torch.device, torch.dtype], Tensor] = {}


def placeholder_tensor(shape: tuple[int, ...], like: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor of this shape whose values nobody reads, in the memory of one element: its metadata
    is what checkpointing compares.

    That element is made once: filling it is a launch, 416 in a step of 32 layers.
    """
    if like.is_meta or type(like) not in (Tensor, torch.nn.Parameter):
        # without data, or of a mode that keeps account of its tensors
        return like.new_zeros((), dtype=dtype).expand(shape)
    zero = _zeros.get((like.device, dtype))
    if zero is None:
        zero = _zeros[like.device, dtype] = like.new_zeros((), dtype=dtype)
    return zero.expand(shape)
