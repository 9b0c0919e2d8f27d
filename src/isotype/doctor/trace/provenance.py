"""The origin of every tensor, kept on it and, for the copies that autograd unpacks, on its storage; and how an op makes one.

torch.save and pickle write none of it. Without this they would write everything that a tensor refers to.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from ...dtypes import name as dtype_name
from ...observe.operators import Operator
from .context import Context
from .origin import Origin

MARK = "_isotype_origin"


class Provenance:
    """Looks origins up and passes them on. Each is stored on its tensor and freed with it, so that memory does not grow."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._state: Callable[[Any], Any] = torch._utils._get_obj_state

    def start(self) -> None:
        inner = self._state

        def unmarked(thing: Any) -> Any:
            state = inner(thing)
            if type(state) is dict and MARK in state:
                return {key: value for key, value in state.items() if key != MARK} or None
            return state

        torch._utils._get_obj_state = unmarked

    def stop(self) -> None:
        torch._utils._get_obj_state = self._state

    @staticmethod
    def forget() -> None:
        """Removes all remaining marks at the end."""
        for thing in gc.get_objects():
            if issubclass(type(thing), torch.Tensor):
                thing.__dict__.pop(MARK, None)

    def set(self, tensor: torch.Tensor, origin: Origin, writer: tuple[str, str] | None = None) -> None:
        """writer: the op and the path of the module that wrote the values last."""
        tensor.__dict__[MARK] = (origin, writer)
        with suppress(RuntimeError, NotImplementedError):  # no memory of its own (fake, sparse, functional)
            tensor.untyped_storage().__dict__[MARK] = origin

    def get(self, tensor: torch.Tensor) -> Origin:
        """The tensor's origin; where none was recorded, an origin that states what is known."""
        mark: tuple[Origin, Any] | None = tensor.__dict__.get(MARK)
        if mark is not None and mark[0].dtype == tensor.dtype:
            return mark[0]
        try:
            found: Origin | None = tensor.untyped_storage().__dict__.get(MARK)
        except (RuntimeError, NotImplementedError):
            found = None
        if found is not None and found.dtype == tensor.dtype:
            return found
        return self._context.unrecorded(tensor)

    def known(self, tensor: torch.Tensor) -> Origin | None:
        """The recorded origin, or None."""
        mark = tensor.__dict__.get(MARK)
        return mark[0] if mark is not None and mark[0].dtype == tensor.dtype else None

    def writer(self, tensor: torch.Tensor) -> str:
        """`mul in layers.0`: the op that wrote the tensor's values last."""
        mark = tensor.__dict__.get(MARK)
        if mark is None or mark[1] is None:
            return ""
        op, module = mark[1]
        return f"{op} in {module}" if module else op

    def record(self, op: Operator, inputs: list[torch.Tensor], out: torch.Tensor) -> None:
        """Gives an op's floating result its origin: handed on when the dtype is kept, new when it changed."""
        context = self._context
        if op.view and inputs:
            mark = inputs[0].__dict__.get(MARK)
            if mark is not None and mark[0].dtype == out.dtype:
                out.__dict__[MARK] = mark
            else:
                out.__dict__[MARK] = (self.get(inputs[0]) if inputs[0].dtype == out.dtype else self._made(op, inputs, out), None)
            return
        module = context.names.of(context.stack[-1].module) if context.stack else ""
        dtype = out.dtype
        same = None
        narrower = False  # whether an operand was widened to the result's dtype
        for tensor in inputs:
            if tensor.dtype == dtype:
                same = same if same is not None else tensor
            elif tensor.dtype.itemsize < dtype.itemsize:
                narrower = True
        if op.lift:
            if context.provenance.known(out) is None:
                self.set(out, self._made(op, [], out))
            return
        if same is not None and not narrower:
            if out is not same:
                self.set(out, self.get(same), (op.name, module))
            return
        if out is same or (inputs and out is inputs[0]):
            return  # in place: the dtype stays what it was
        self.set(out, self._made(op, inputs, out), (op.name, module))

    def _made(self, op: Operator, inputs: list[torch.Tensor], out: torch.Tensor) -> Origin:
        context = self._context
        site, module, node = context.here()
        called = context.calling_name()
        wide = next((t for t in inputs if t.dtype == out.dtype), None)
        made: dict[str, Any] = {"module": module, "site": site, "backward": node}
        if not inputs:
            what = f"torch.{called}" if called else op.name
            if op.cast or not op.factory:
                what = f"{f'.{called}()' if called else op.name} of whole numbers"
            elif context.default_dtype_decides(site, out.dtype, op):
                what += f" without dtype= (the default dtype is {dtype_name(torch.get_default_dtype())})"
            return Origin(out.dtype, "created", what, **made)
        if wide is not None and len(inputs) > 1:
            made["via"], made["writer"] = self.get(wide), self.writer(wide)
            origin = Origin(out.dtype, "promotion", called or op.name, **made)
            context.promoted(op, origin, wide, next(t for t in inputs if t.dtype != out.dtype), out)
            return origin
        made["via"], made["writer"] = self.get(inputs[0]), self.writer(inputs[0])
        if not op.cast:
            return Origin(out.dtype, "op", called or op.name, **made)
        if context.cast_by_engine():
            origin = Origin(
                out.dtype, "engine", f"{node} returned {inputs[0].dtype} for a {out.dtype} tensor".replace("torch.", ""), **made
            )
        elif context.cast_by_autocast():
            origin = Origin(out.dtype, "autocast", called or op.name, **made)
        else:
            origin = Origin(out.dtype, "cast", f".{called}()" if called else op.name, **made)
        context.cast(op, origin, inputs[0], out)
        return origin
