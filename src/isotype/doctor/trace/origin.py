"""An `Origin` describes what gave a tensor its dtype, and refers to the origin before it. If an op
keeps the dtype, its result gets the origin of its operand. So the origins of a tensor form a chain
that ends at the line that decided the dtype.

An origin is stored as an attribute of its tensor. The origin is also stored on the tensor's
storage. The reason is that autograd returns saved tensors as new Python objects, which share only
the storage with the original. torch.save and pickle do not write origins, because they would then
also write every object to which an origin refers.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any
from unittest import mock

import torch

from ...dtypes import format_dtype
from ...observe.operators import Operator
from ...observe.origin import Site

_FOLLOWING_CAST = re.compile(
    r"\.to\([^()]*(?:\w\.dtype|_dtype|\bdtype\s*=\s*\w+\.dtype)|\.type_as\("
)
# the chain of a state that is cast back and forth in every step would grow without a limit
MAX_CHAIN = 8

UNWATCHED_NOTE = "or made by a step like those before it, which was not watched"
# kind of an origin -> its description
_KIND_TEMPLATES = {
    "parameter": "parameter {what}",
    "buffer": "buffer {what}",
    "input": "came from outside the trace ({what})",
    "created": "created by {what}",
    "cast": "cast by {what}",
    "autocast": "cast by autocast for {what}",
    "promotion": "{what} promoted mixed operands",
    "op": "returned by {what}",
    "engine": "cast by autograd: {what}",
}


@dataclass(slots=True, eq=False)
class Origin:
    """Describes why a tensor has its dtype.

    creator   the name of the parameter, or the op
    module    the path of the module that was running
    backward  the autograd node, if the op ran in backward
    upstream  the origin of the operand of a cast, or of the operand that forced a promotion
    writer    the op and the module that wrote this operand last
    promotion  the recorded promotion that made the tensor wide, if there is one
    """

    dtype: torch.dtype
    kind: str
    creator: str
    module: str = ""
    site: Site | None = None
    backward: str = ""
    upstream: Origin | None = None
    writer: str = ""
    depth: int = 0
    promotion: Any = None

    def __post_init__(self) -> None:
        if self.upstream is not None:
            if self.upstream.depth >= MAX_CHAIN:
                *_, self.upstream = self.upstream.chain()
            self.depth = self.upstream.depth + 1

    def __deepcopy__(self, memo: Any) -> Origin:
        return self  # a copy of a tensor has the same origin

    def chain(self) -> Iterator[Origin]:
        """Yields this origin, then the origin before it, and so on back to the first one."""
        origin: Origin | None = self
        while origin is not None:
            yield origin
            origin = origin.upstream

    def deciding_origin(self) -> Origin:
        """Returns the origin that decided the dtype. The search goes back step by step. It skips
        promotions, ops that kept the dtype, and casts that autocast inserted.

        If the search ends at a cast to the dtype of another tensor, such as `.to(x.dtype)`, the
        method returns the earliest origin in the chain that gave a tensor this dtype.
        """
        decision = self._nearest_decision()
        while decision.kind == "cast" and decision.follows_tensor and decision.upstream is not None:
            dtype_changes = [
                origin
                for origin in decision.upstream.chain()
                if origin.dtype == decision.dtype and origin.kind != "input"
            ]
            if not dtype_changes:
                break
            decision = dtype_changes[-1]._nearest_decision()
        return decision

    def _nearest_decision(self) -> Origin:
        for origin in self.chain():
            if origin.kind not in ("promotion", "op", "autocast") or origin.upstream is None:
                return origin
        return self

    @property
    def follows_tensor(self) -> bool:
        """True if a cast takes the dtype of another tensor, as in `.to(x.dtype)` or `.type_as(x)`."""
        return self.site is not None and bool(_FOLLOWING_CAST.search(self.site.text or ""))

    def describe(self) -> str:
        """Returns a description of the origin without its location."""
        return f"{format_dtype(self.dtype)}: {_KIND_TEMPLATES[self.kind].format(what=self.creator)}"

    def location(self) -> str:
        """Returns the module path, the file and the line, if they are known."""
        parts = [
            self.module and f"in {self.module}",
            str(self.site) if self.site else "",
            self.backward and f"backward of {self.backward}",
        ]
        return ", ".join(part for part in parts if part)

    def explain(self) -> list[str]:
        """Returns lines of text about the first five origins of the chain. Each line contains the
        description of an origin, its location and its source code.
        """
        lines = []
        for number, origin in enumerate(islice(self.chain(), 5)):
            line = origin.describe()
            if number:
                line = f"<- {line}"
            if location := origin.location():
                line += f"   {location}"
            lines.append(line)
            if origin.site is not None and origin.site.text:
                lines.append(f"     {origin.site.text}")
        return lines


def live_objects(base: type) -> list[Any]:
    """Returns the objects of this class and its subclasses that the garbage collector knows.

    Each type is compared once. For a million objects, which a process with many libraries has,
    this takes 0.22 CPU seconds; a comparison of each object took 0.47.
    """
    objects = gc.get_objects()
    types = {kind for kind in set(map(type, objects)) if issubclass(kind, base)}
    return [candidate for candidate in objects if type(candidate) in types]


ORIGIN_ATTRIBUTE = "_isotype_origin"  # attribute of a tensor with the reason for its dtype


class Provenance:
    """Determines the origins of tensors. An origin is stored on its tensor and is freed together
    with the tensor, so memory does not grow.
    """

    def __init__(self, context: Any) -> None:
        self._context = context

    def activate(self) -> AbstractContextManager[Any]:
        """Returns a context manager. Inside this context, torch.save and pickle do not write
        origins.
        """
        original: Callable[[Any], Any] = torch._utils._get_obj_state

        def state_without_origin(value: Any) -> Any:
            state = original(value)
            if type(state) is dict and ORIGIN_ATTRIBUTE in state:
                return {
                    key: value for key, value in state.items() if key != ORIGIN_ATTRIBUTE
                } or None
            return state

        return mock.patch.object(torch._utils, "_get_obj_state", state_without_origin)

    @staticmethod
    def clear_origins() -> None:
        """Removes the origins from all tensors at the end of the trace."""
        for tensor in live_objects(torch.Tensor):
            tensor.__dict__.pop(ORIGIN_ATTRIBUTE, None)

    def set(
        self, tensor: torch.Tensor, origin: Origin, writer: tuple[str, str] | None = None
    ) -> None:
        """Stores the origin of a tensor.

        writer  the op that wrote the values of the tensor last, and the path of its module
        """
        tensor.__dict__[ORIGIN_ATTRIBUTE] = (origin, writer)
        # fake, sparse and functional tensors have no storage
        with suppress(RuntimeError, NotImplementedError):
            tensor.untyped_storage().__dict__[ORIGIN_ATTRIBUTE] = origin

    def get(self, tensor: torch.Tensor) -> Origin:
        """Returns the origin of a tensor. If no origin was recorded, the origin is inferred."""
        entry: tuple[Origin, Any] | None = tensor.__dict__.get(ORIGIN_ATTRIBUTE)
        if entry is not None and entry[0].dtype == tensor.dtype:
            return entry[0]
        try:
            origin: Origin | None = tensor.untyped_storage().__dict__.get(ORIGIN_ATTRIBUTE)
        except (RuntimeError, NotImplementedError):
            origin = None
        if origin is None or origin.dtype != tensor.dtype:
            origin = self._context.infer_origin(tensor)
        return origin

    def get_recorded(self, tensor: torch.Tensor) -> Origin | None:
        """Returns the recorded origin of a tensor, or None if no origin was recorded."""
        entry = tensor.__dict__.get(ORIGIN_ATTRIBUTE)
        return entry[0] if entry is not None and entry[0].dtype == tensor.dtype else None

    def last_writer(self, tensor: torch.Tensor) -> str:
        """Returns the op that wrote the values of the tensor last, such as `mul in layers.0`."""
        entry = tensor.__dict__.get(ORIGIN_ATTRIBUTE)
        if entry is None or entry[1] is None:
            return ""
        op, module = entry[1]
        return f"{op} in {module}" if module else op

    def record(self, op: Operator, inputs: list[torch.Tensor], out: torch.Tensor) -> None:
        """Sets the origin of a floating-point result of an op. If the op keeps the dtype, the
        result gets the origin of the operand. Otherwise the result gets a new origin.
        """
        context = self._context
        if op.is_view and inputs:
            entry = inputs[0].__dict__.get(ORIGIN_ATTRIBUTE)
            if entry is not None and entry[0].dtype == out.dtype:
                out.__dict__[ORIGIN_ATTRIBUTE] = entry
            elif inputs[0].dtype == out.dtype:
                out.__dict__[ORIGIN_ATTRIBUTE] = (self.get(inputs[0]), None)
            else:
                out.__dict__[ORIGIN_ATTRIBUTE] = (self._new_origin(op, inputs, out), None)
            return
        module = context.names.module_path(context.stack[-1].module) if context.stack else ""
        dtype = out.dtype
        same_dtype = None
        has_narrower = False  # whether an operand was widened to the result's dtype
        for tensor in inputs:
            if tensor.dtype == dtype:
                same_dtype = same_dtype if same_dtype is not None else tensor
            elif tensor.dtype.itemsize < dtype.itemsize:
                has_narrower = True
        if op.is_lift:
            if context.provenance.get_recorded(out) is None:
                self.set(out, self._new_origin(op, [], out))
            return
        if same_dtype is not None and not has_narrower:
            if out is not same_dtype:
                self.set(out, self.get(same_dtype), (op.name, module))
            return
        if out is same_dtype or (inputs and out is inputs[0]):
            return  # an in-place op does not change the dtype
        self.set(out, self._new_origin(op, inputs, out), (op.name, module))

    def _new_origin(self, op: Operator, inputs: list[torch.Tensor], out: torch.Tensor) -> Origin:
        context = self._context
        site, module, node = context.locate_op()
        call_name = context.call_name()
        widest = next((t for t in inputs if t.dtype == out.dtype), None)
        fields: dict[str, Any] = {"module": module, "site": site, "backward": node}
        if not inputs:
            creator = f"torch.{call_name}" if call_name else op.name
            if op.is_to_call or not op.is_factory:
                creator = f".{call_name}()" if call_name else op.name
                creator += " of whole numbers"
            elif context.uses_default_dtype(site, out.dtype, op):
                creator += (
                    " without dtype= (the default dtype is"
                    f" {format_dtype(torch.get_default_dtype())})"
                )
            return Origin(out.dtype, "created", creator, **fields)
        source = widest if widest is not None and len(inputs) > 1 else inputs[0]
        fields["upstream"] = self.get(source)
        fields["writer"] = self.last_writer(source)
        creator = call_name or op.name
        if source is widest and len(inputs) > 1:
            origin = Origin(out.dtype, "promotion", creator, **fields)
            context.on_promotion(
                op, origin, source, next(t for t in inputs if t.dtype != out.dtype), out
            )
            return origin
        if not op.is_to_call:
            return Origin(out.dtype, "op", creator, **fields)
        if context.is_engine_cast():
            kind = "engine"
        elif context.is_autocast_cast():
            kind = "autocast"
        else:
            kind = "cast"
        if kind == "engine":
            creator = f"{node} returned {format_dtype(source.dtype)} for a {format_dtype(out.dtype)} tensor"
        elif kind == "cast" and call_name:
            creator = f".{call_name}()"
        origin = Origin(out.dtype, kind, creator, **fields)
        context.on_cast(origin, source, out)
        return origin
