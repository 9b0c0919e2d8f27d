"""What a recomputed layer need not compute: results that backward does not read, and results that were stored.

Under gradient checkpointing a layer runs twice: for its output, and again in backward for its gradients. Ops ask here which run it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# the layer that runs now, innermost last
_running: list[RecomputedLayer] = []


def _as_is(x: Any) -> Any:
    return x


class RecomputedLayer:
    """One call of one layer. `run` it first for the forward, then for every recompute.

    results      of the attentions in the forward, in order, where they are kept: output and logsumexp, 8 KiB and 128 bytes a token with
                 32 heads of 128 in bf16; `put` takes each away and `get` brings it back
    mlps         fused MLPs that the forward called
    last_unused  whether the layer ends in `residual + mlp(...)`, so that nothing in backward needs the one MLP's own output
    """

    def __init__(self, *, keep_attention: bool, put: Callable[[Tensor], Any] = _as_is, get: Callable[[Any], Tensor] = _as_is) -> None:
        self.keep_attention, self.results = keep_attention, list[tuple[Any, ...]]()
        self.put, self.get = put, get
        self.again = self.last_unused = False
        self.mlps = 0

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        self.recomputing, self.again, self.next = self.again, True, 0
        _running.append(self)
        try:
            output = function(*args)
        finally:
            _running.pop()
        if not self.recomputing:
            self.last_unused = self.mlps == 1 and _ends_in_an_mlp(output)
        return output


def is_recomputed() -> bool:
    """Whether what runs now is a layer's forward that will be run again: what it saves for backward is dropped."""
    return bool(_running) and not _running[-1].recomputing


def is_recomputing() -> bool:
    """Whether what runs now is a layer's forward inside backward."""
    return bool(_running) and _running[-1].recomputing


def count_mlp() -> None:
    if is_recomputed():
        _running[-1].mlps += 1


def output_is_unused() -> bool:
    """Whether this is a recompute in which nothing reads the output of the layer's last MLP."""
    return bool(_running) and _running[-1].recomputing and _running[-1].last_unused


def attention_results(compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """`compute()`, or what it gave in the forward that is recomputed now."""
    if not _running or not _running[-1].keep_attention:
        return compute()
    layer = _running[-1]
    if not layer.recomputing:
        made = compute()
        # aliases, because autograd attaches the graph to the tensor objects that a function returns
        layer.results.append(tuple(layer.put(t.detach()) for t in made))
        return made
    # a recompute calls what the forward called, in its order
    kept, layer.next = layer.results[layer.next], layer.next + 1
    return tuple(layer.get(t).detach() for t in kept)


def _ends_in_an_mlp(output: Any) -> bool:
    """Whether the layer's output is a sum one of whose terms is `lora_mlp`'s, as it came: a sum saves nothing for backward.

    Gemma's form, a norm of the MLP's output, is none: the norm saves its input.
    """
    first, *others = output if isinstance(output, tuple) else (output,)
    if any(isinstance(t, Tensor) and t.requires_grad for t in others):
        # something else is made of what the layer computes
        return False
    node = first.grad_fn if isinstance(first, Tensor) else None
    if node is None or type(node).__name__ != "AddBackward0":
        return False
    return any(type(term).__name__ == "LoraMlpBackward" for term, _ in node.next_functions if term is not None)


def unwritten(shape: tuple[int, ...], like: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor of this shape whose values are never read, in the memory of one element: checkpointing compares only its metadata."""
    return like.new_zeros((), dtype=dtype).expand(shape)
