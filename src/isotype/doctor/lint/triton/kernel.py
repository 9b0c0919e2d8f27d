"""What is known of a Triton kernel before and after its source is run on dtypes: its parameters, its values, and the events."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from typing import Literal

from ..source import SourceFile, last_name

# pointers with these names get tensors of the model's dtype; others (lse, a gate, a decay) are often made in fp32 by the launcher
_ACTIVATION = re.compile(
    r"(x|q|k|v|a|b|w|o|do|dy|dout|input|inp|in|logits?|hidden(_states)?|y|u|gate|up|weight|out|grad_?out(put)?|query|key|value|e|src|act|"
    r"activations?|scores?)_?(base|ptr)?"
)
Kind = Literal["branch", "loop", "dot", "dot_of_pointers", "accumulator", "atomic", "reread", "sum"]


@dataclass(frozen=True, slots=True)
class Value:
    """type: a dtype word, `int`, `bool`, `elem(NAME)`, or None when not followed; node: where it got that type; number: no block.

    perhaps  `elem(NAME)`, where one side of a compile-time branch leaves it so and another casts
    """

    type: str | None
    node: ast.expr | ast.stmt | None = None
    number: bool = False
    pointer: str | None = None  # the parameter, when this is an address
    perhaps: str | None = None

    @property
    def loaded(self) -> str | None:
        """The pointer whose element type this has."""
        return self.type[5:-1] if self.type and self.type.startswith("elem(") else None

    def __str__(self) -> str:
        return f"the element type of {self.loaded}" if self.loaded else str(self.type)


NOTHING = Value(None)


@dataclass(frozen=True, slots=True, eq=False)
class KernelEvent:
    kind: Kind
    node: ast.expr | ast.stmt
    name: str
    before: Value
    after: Value
    test: ast.expr | None = None
    flags: frozenset[str] = frozenset()  # names that decide, while compiling, against a branch that casts to fp32


@dataclass(slots=True, eq=False)
class Kernel:
    """A function under @triton.jit, and what was seen in it."""

    node: ast.FunctionDef
    constexprs: set[str]
    parameters: list[str]
    events: list[KernelEvent] = field(default_factory=list)
    casts: set[str] = field(default_factory=set)  # pointers of which a value is cast to fp32 somewhere in the kernel
    floats: set[str] = field(default_factory=set)  # pointers to whose element type something floating is cast
    addresses: set[str] = field(default_factory=set)  # parameters that loads, stores and descriptors start from


def is_jit(file: SourceFile, decorator: ast.expr) -> bool:
    dotted = file.dotted(decorator.func if isinstance(decorator, ast.Call) else decorator)
    return dotted in ("triton.jit", "triton.runtime.jit.jit") or dotted.endswith(".triton.jit")


def describe(node: ast.FunctionDef) -> Kernel:
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    constexprs = {a.arg for a in arguments if a.annotation is not None and "constexpr" in ast.unparse(a.annotation)}
    started = [call.args[0] for call in ast.walk(node) if isinstance(call, ast.Call) and call.args and _takes_address(last_name(call.func))]
    addresses = {inner.id for start in started for inner in ast.walk(start) if isinstance(inner, ast.Name)}
    return Kernel(node, constexprs, [a.arg for a in arguments], addresses=addresses)


def _takes_address(name: str) -> bool:
    return name in ("load", "store", "make_block_ptr", "make_tensor_descriptor") or name.startswith("atomic_")


def is_activation(pointer: str) -> bool:
    """Whether a pointer's name says that it holds activations or weights, in the model's dtype."""
    return _ACTIVATION.fullmatch(pointer.lower()) is not None
