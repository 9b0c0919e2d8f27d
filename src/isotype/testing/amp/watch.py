"""What hand-written backwards really received and returned, before the engine casts it in silence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction


@dataclass
class BackwardCall:
    """One call of a Function's backward.

    expected  for each input: the dtype to which autograd will cast its gradient, None where it requires none
    leaves    for each input: the leaf tensor it is, if it is one
    returned  what backward gave back, as dtypes
    context   its ctx, kept only when it raised (reading saved tensors a second time would disturb checkpointing)
    """

    function: type
    incoming: list[Tensor] = field(default_factory=list)
    context: Any = None
    expected: list[torch.dtype | None] = field(default_factory=list)
    leaves: list[Tensor | None] = field(default_factory=list)
    returned: list[torch.dtype | None] | None = None

    def saved(self) -> list[Tensor]:
        """What it had saved, after it raised."""
        try:
            return [t for t in self.context.saved_tensors if isinstance(t, Tensor)] if self.context is not None else []
        except RuntimeError:  # freed, or changed since
            return []


@contextmanager
def watching_backwards() -> Iterator[list[BackwardCall]]:
    """Within this block every hand-written backward that runs is recorded, whichever Function it belongs to."""
    calls: list[BackwardCall] = []
    originals = {n: BackwardCFunction.__dict__[n] for n in ("apply", "apply_boxed") if n in BackwardCFunction.__dict__}

    def spying(original: Any, boxed: bool) -> Any:
        def apply(ctx: Any, *grads: Any) -> Any:
            call = _met(ctx, grads[0] if boxed else grads)
            calls.append(call)
            try:
                result = original(ctx, *grads)
            except Exception:
                call.context = ctx
                raise
            given = result if isinstance(result, (tuple, list)) else (result,)
            call.returned = [g.dtype if isinstance(g, Tensor) else None for g in given]
            return result

        return apply

    for name, original in originals.items():
        setattr(BackwardCFunction, name, spying(original, name == "apply_boxed"))
    try:
        yield calls
    finally:
        for name, original in originals.items():
            setattr(BackwardCFunction, name, original)


def _met(ctx: Any, grads: Any) -> BackwardCall:
    call = BackwardCall(ctx._forward_cls, incoming=[g for g in grads if isinstance(g, Tensor)])
    for node, index in ctx.next_functions:
        if node is None:
            call.expected.append(None)
            call.leaves.append(None)
            continue
        leaf = getattr(node, "variable", None)
        call.leaves.append(leaf)
        call.expected.append(leaf.dtype if leaf is not None else node._input_metadata[index].dtype)
    return call


def function_classes(outputs: list[Tensor]) -> list[type]:
    """The hand-written Functions in the graph above these outputs, nearest first."""
    found: dict[type, None] = {}
    todo, seen = [t.grad_fn for t in outputs if t.grad_fn is not None], set()
    while todo:
        node = todo.pop(0)
        if node in seen:
            continue
        seen.add(node)
        if isinstance(node, BackwardCFunction):
            found.setdefault(node._forward_cls)
        todo += [above for above, _ in node.next_functions if above is not None]
    return list(found)
