"""What an expression can be while only dtypes are followed."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, NamedTuple

from ....dtypes import is_float


class Made(StrEnum):
    """What decided a tensor's dtype."""

    INPUT = "input"
    PARAMETER = "parameter"
    GRADIENT = "gradient"
    AUTOCAST = "autocast"
    LITERAL = "literal"  # a dtype written in the code
    DEFAULT = "default"  # a factory without dtype=
    FOLLOWS = "follows"  # another tensor's dtype, or a dtype handed in


@dataclass(frozen=True, slots=True)
class Tensor:
    """dtype None: not followed.

    why        what decided the dtype, in words, for the reader of a finding
    node       where that happened
    zero_dim   True and False are certain: a tensor without dimensions does not promote one that has them
    positional made from arange or position ids; lowered: where it was rounded to a low precision after that
    frequency  made from an arange over features, as inverse frequencies are: what it is multiplied with inherits its rounding
    buffer     where it was allocated, for a tensor made by zeros_like and the like
    on_cpu     made without `device=`, or only of such: autocast of another device leaves it alone
    """

    dtype: str | None
    made: Made = Made.INPUT
    why: str = ""
    node: ast.AST | None = None
    zero_dim: bool | None = False
    positional: bool = False
    lowered: ast.AST | None = None
    buffer: ast.AST | None = None
    on_cpu: bool = False
    frequency: bool = False

    @property
    def floating(self) -> bool:
        return self.dtype is not None and is_float(self.dtype)

    @property
    def low(self) -> bool:
        return self.dtype in ("bf16", "fp16")

    def but(self, **changes: Any) -> Tensor:
        return replace(self, **changes)

    def __str__(self) -> str:
        return f"{self.dtype} ({self.why})" if self.why else str(self.dtype)


UNFOLLOWED = Tensor(None)
Labelled = tuple[str, Any]  # source text and value


class _Unknown:
    def __repr__(self) -> str:
        return "Unknown"


UNKNOWN = _Unknown()  # may be anything


@dataclass(frozen=True, slots=True)
class Scalar:
    """A Python value that is no tensor; `value` is UNKNOWN when only that much is known."""

    value: Any = UNKNOWN


NONE = Scalar(None)


@dataclass(frozen=True, slots=True)
class Dtype:
    """A dtype as a value. literal: written in the code, rather than taken from a tensor or an argument."""

    word: str | None
    why: str = ""
    literal: bool = False


@dataclass(slots=True)
class Items:
    """A tuple, list, or anything iterated over. known: exactly these; otherwise any number like `each`, at least one where `filled`.

    A list that something was appended to has both: `known` is what a loop of two rounds left in it.
    """

    known: list[Any] | None = None
    each: Any = UNKNOWN
    filled: bool = False

    def element(self) -> Any:
        if self.known is None:
            return self.each
        first = self.known[0] if self.known else UNKNOWN
        if all(v == first for v in self.known):
            return first
        rows = [v.known for v in self.known if isinstance(v, Items) and v.known is not None]
        if len({len(row) for row in rows}) == 1 and len(rows) == len(self.known):  # of pairs, each half by itself
            return Items(known=[Items(known=list(column)).element() for column in zip(*rows)])
        return UNKNOWN


@dataclass(slots=True)
class Mapping:
    """A dict. open: it may have other keys than these."""

    entries: dict[Any, Any] = field(default_factory=dict)
    open: bool = False


@dataclass(frozen=True, slots=True)
class Module:
    """A dotted name that is no value of this file: `torch.nn.functional`."""

    dotted: str


@dataclass(frozen=True, slots=True)
class Method:
    """`x.view` before it is called."""

    of: Any
    name: str


@dataclass(slots=True, eq=False)
class Partial:
    """`functools.partial(function, ...)`; nodes: the sources of `args`."""

    function: Any
    args: list[Any]
    kwargs: dict[str, Any]
    nodes: list[ast.expr]


@dataclass(slots=True, eq=False)
class Closure:
    """A function or lambda of the files being read, with the names it can see."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    file: Any
    env: Env
    bound: Any = None  # `self`


@dataclass(slots=True, eq=False)
class Context:
    """`ctx` of an autograd.Function."""

    saved: Any = UNKNOWN
    attributes: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Instance:
    """`self`: its attributes as `__init__` sets them, and as the method has assigned them since."""

    cls: ast.ClassDef | None
    attributes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Layer:
    """A submodule whose class is known.

    kind  linear: a product with its weights; keep: dtype in, dtype out; embedding: its weights' dtype; norm
    """

    kind: str
    weight: Tensor


class Env:
    """Names and values, with those of the enclosing function behind them."""

    __slots__ = ("names", "outer")

    def __init__(self, outer: Env | None = None) -> None:
        self.names: dict[str, Any] = {}
        self.outer = outer

    def get(self, name: str) -> Any:
        env: Env | None = self
        while env is not None:
            if name in env.names:
                return env.names[name]
            env = env.outer
        return None

    def holder(self, name: str) -> Env | None:
        """The scope that the name belongs to."""
        env: Env | None = self
        while env is not None and name not in env.names:
            env = env.outer
        return env


class Loop(NamedTuple):
    """A loop being run; bound: the names of `env` that had values when it began."""

    node: ast.AST
    bound: set[str]
    env: Env
