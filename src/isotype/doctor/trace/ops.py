"""What the tracer must know of an ATen op, learnt once from its schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

CASTS = {"_to_copy", "to", "type_as"}
# an op on memory that is handed in from outside the dispatcher: its result is as good as created here
LIFTS = {"lift", "lift_fresh", "lift_fresh_copy"}
# matrix products and attention: where computing in a wider dtype costs
PRODUCTS = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "linear", "convolution"}
    | {f"_scaled_dot_product_{kind}" for kind in ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")}
)
REACHING = frozenset({"pow", "mul", "exp", "square", "sum", "linalg_vector_norm", "add", "cumsum"})
FLOATS = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2})
LOW = frozenset({torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2})


class Op:
    """One overload of an operator: its kind, and what is called before and after it.

    product a matrix product or attention: where a promotion costs
    multiplies a product or the backward of one
    reaches its result may be far larger than what it is given
    factory takes no tensor
    view    its result shares memory with its input
    before  called with (op, args, kwargs) first; what it returns goes to `after`
    after   called with (op, args, kwargs, result, token)
    """

    __slots__ = ("after", "before", "cast", "factory", "func", "lift", "multiplies", "name", "product", "reaches", "view")

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.func = func
        self.name: str = schema.name.partition("::")[2]
        self.lift = self.name in LIFTS
        self.product = self.name in PRODUCTS
        self.multiplies = self.product or (self.name.endswith("_backward") and ("attention" in self.name or "convolution" in self.name))
        self.view = bool(schema.returns) and schema.returns[0].alias_info is not None and not schema.is_mutable and not self.lift
        self.cast = self.name in CASTS
        self.reaches = self.product or self.name in REACHING
        self.factory = self.lift or not any("Tensor" in str(a.type) for a in schema.arguments)
        self.before: Any = None
        self.after: Any = None

    def operands(self, args: tuple, kwargs: dict | None) -> Iterator[tuple[str, torch.Tensor]]:
        """Label (the schema's own name) and tensor of every floating operand, those in lists with their index."""
        named = [(a.name, value) for a, value in zip(self.func._schema.arguments, args)] + list((kwargs or {}).items())
        yield from floating(named)


def floating(named: list[tuple[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The floating tensors among named values, one level into lists, tuples and dicts."""
    for label, value in named:
        if isinstance(value, torch.Tensor):
            if value.dtype in FLOATS:
                yield label, value
        elif isinstance(value, (list, tuple)):
            for index, item in enumerate(value):
                if isinstance(item, torch.Tensor) and item.dtype in FLOATS:
                    yield f"{label}[{index}]", item
        elif isinstance(value, dict):
            for key, item in value.items():
                if isinstance(item, torch.Tensor) and item.dtype in FLOATS:
                    yield f"{label}[{key!r}]", item


def dtype_of_tensors(args: tuple) -> list[torch.Tensor]:
    """The floating tensors of positional arguments, one level into lists: the fast form of `Op.operands`."""
    found = []
    for value in args:
        if isinstance(value, torch.Tensor):
            if value.dtype in FLOATS:
                found.append(value)
        elif type(value) in (list, tuple):
            found += [item for item in value if isinstance(item, torch.Tensor) and item.dtype in FLOATS]
    return found
