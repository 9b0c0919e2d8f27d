"""A signature for a kernel that comes without one, from how its parameters are used and from the
launches written beside it.

A parameter that ends up as the base of an address is a pointer; one that is compared with indices
or multiplies them is an integer; what is left is a float scalar. In the launches of the kernel's
own file, a buffer made with a dtype of its own (`torch.empty(..., dtype=torch.float32)`) has it
whatever the caller passes. It stays a guess, and findings say so.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...dtypes import parse
from .observe import call_name
from .signature import (
    Combination,
    Reach,
    Unwrapped,
    distinct,
    is_float_pointer,
    is_kernel,
    place_of,
    unwrap,
)

_POINTER_WORD = {
    "int64": "*i64", "int32": "*i32", "int16": "*i16", "int8": "*i8", "uint8": "*u8", "bool": "*i1", "fp64": "*fp64", "fp32": "*fp32",
    "bf16": "*bf16", "fp16": "*fp16",
}  # fmt: skip
_MAKERS = (
    "empty", "zeros", "ones", "full", "empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "arange", "to",
    "float", "tensor",
)  # fmt: skip


def fixed_dtypes(function: Any) -> dict[str, str]:
    """Pointer parameter -> `*fp32`, where a launch in the kernel's own file fixes the dtype."""
    tree = _tree(function)
    fixed = dict[str, str]()
    for scope in ast.walk(tree) if tree is not None else ():
        if not isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        made = _made_in(scope)
        for call in ast.walk(scope):
            if (
                isinstance(call, ast.Call)
                and isinstance(call.func, ast.Subscript)
                and _is(call.func.value, function.__name__)
            ):
                starred = any(isinstance(a, ast.Starred) for a in call.args)
                passed = dict(zip(function.arg_names, () if starred else call.args))
                passed |= {k.arg: k.value for k in call.keywords if k.arg in function.arg_names}
                for name, value in passed.items():
                    word = (
                        made.get(value.id) if isinstance(value, ast.Name) else None
                    ) or _fixed_dtype(value)
                    if word is not None:
                        fixed.setdefault(name, word)
    return fixed


def _is(node: ast.AST, name: str) -> bool:
    return (isinstance(node, ast.Name) and node.id == name) or (
        isinstance(node, ast.Attribute) and node.attr == name
    )


def _tree(function: Any) -> ast.AST | None:
    try:
        with open(place_of(function)[0], encoding="utf-8") as file:
            return ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):
        return None


def _made_in(scope: ast.AST) -> dict[str, str | None]:
    """Local tensors and the dtype the function itself gives them; None where two assignments
    disagree.
    """
    made: dict[str, str | None] = {}
    for node in ast.walk(scope):
        if (
            isinstance(node, ast.Assign)
            and len(node.targets) == 1
            and isinstance(node.targets[0], ast.Name)
        ):
            name = node.targets[0].id
            word = _fixed_dtype(node.value)
            made[name] = word if name not in made or made[name] == word else None
    return made


def _fixed_dtype(value: ast.AST) -> str | None:
    if (
        not isinstance(value, ast.Call)
        or not isinstance(value.func, ast.Attribute)
        or value.func.attr not in _MAKERS
    ):
        return None
    if value.func.attr == "float" and not value.args:
        return "*fp32"
    candidates = [k.value for k in value.keywords if k.arg == "dtype"] + (
        list(value.args) if value.func.attr == "to" else []
    )
    for one in candidates:
        if isinstance(one, ast.Attribute) and _is(one.value, "torch"):
            try:
                return _POINTER_WORD.get(parse(one.attr))
            except ValueError:
                return None
    if (
        not candidates
        and value.func.attr in ("empty", "zeros", "ones")
        and _is(value.func.value, "torch")
    ):
        return "*fp32"  # torch's default dtype
    if value.func.attr == "arange" and not candidates:
        return "*i64"
    return None


_MEMORY = (
    "load",
    "store",
    "atomic_add",
    "atomic_max",
    "atomic_min",
    "atomic_xchg",
    "atomic_cas",
    "atomic_and",
    "atomic_or",
    "atomic_xor",
)
_INDEX_NAME = re.compile(
    r"(^(y_true|labels?|targets?|tokens?|experts?)|(^|_)(idx|index|indices|ids|cu_seqlens|seqlens|lengths|positions))(_ptr)?$"
)
_DTYPE_METHODS = ("to", "cast", "zeros", "full")


@dataclass
class Use:
    """How one function's parameters are used."""

    pointers: set[str] = field(default_factory=set)
    integer_pointers: set[str] = field(default_factory=set)
    integers: set[str] = field(default_factory=set)
    tests: set[str] = field(default_factory=set)  # used as a bare condition
    sizes: set[str] = field(default_factory=set)  # of an arange or a shape
    dtypes: set[str] = field(default_factory=set)  # used where a dtype stands


class _Reader(ast.NodeVisitor):
    """One pass over a kernel's source."""

    def __init__(self, function: Any, depth: int = 0) -> None:
        self.use = Use()
        self.depth = depth
        self.scope = dict(function.__globals__)
        self.parameters = list(function.arg_names)
        self.tree = function.parse()
        self.values: dict[str, list[ast.expr]] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        self.values.setdefault(target.id, []).append(node.value)
                    elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                        for one, value in zip(target.elts, node.value.elts):
                            if isinstance(one, ast.Name):
                                self.values.setdefault(one.id, []).append(value)
            elif (
                isinstance(node, (ast.AugAssign, ast.AnnAssign))
                and isinstance(node.target, ast.Name)
                and node.value is not None
            ):
                self.values.setdefault(node.target.id, []).append(node.value)
        self.visit(self.tree)
        self.use.integer_pointers &= self.use.pointers
        self.use.integers -= self.use.pointers

    def base(self, node: ast.AST | None, seen: frozenset[str] = frozenset()) -> str | None:
        """The parameter an address starts from."""
        if isinstance(node, ast.Name):
            if node.id in self.values and node.id not in seen:
                for value in self.values[node.id]:
                    if (found := self.base(value, seen | {node.id})) is not None:
                        return found
            return node.id if node.id in self.parameters else None
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
            return self.base(node.left, seen) or self.base(node.right, seen)
        if isinstance(node, ast.Call):
            if (
                isinstance(node.func, ast.Attribute)
                and node.func.attr in ("to", "cast")
                and not _of_module(node.func)
            ):
                return self.base(node.func.value, seen)
            if node.args and call_name(node) in (
                "multiple_of",
                "max_contiguous",
                "cast",
                "make_block_ptr",
                "advance",
            ):
                return self.base(node.args[0], seen)
            return None
        if isinstance(node, ast.Subscript):
            return self.base(node.value, seen)
        if isinstance(node, ast.IfExp):
            return self.base(node.body, seen) or self.base(node.orelse, seen)
        return None

    def behind(self, node: ast.AST, depth: int = 0) -> set[str]:
        """Parameters in an expression, through local names, without what is loaded from memory."""
        found: set[str] = set()
        if isinstance(node, ast.Call) and call_name(node) == "load":
            return found
        if isinstance(node, ast.Name):
            if node.id in self.values and depth < 4:
                for value in self.values[node.id]:
                    found |= self.behind(value, depth + 1)
            elif node.id in self.parameters:
                found.add(node.id)
        for child in ast.iter_child_nodes(node):
            found |= self.behind(child, depth)
        return found

    def loaded(self, node: ast.AST, depth: int = 0) -> set[str]:
        """Pointers from which values in an expression were loaded."""
        found: set[str] = set()
        for one in ast.walk(node):
            if call_name(one) == "load":
                assert isinstance(one, ast.Call)
                found |= {b for b in (self.base(one.args[0] if one.args else None),) if b}
            elif isinstance(one, ast.Name) and depth < 4:
                for value in self.values.get(one.id, []):
                    found |= self.loaded(value, depth + 1) if not _widens(value) else set()
        return found

    def visit_Call(self, node: ast.Call) -> None:
        name = call_name(node)
        if name in _MEMORY and (node.args or node.keywords):
            address = node.args[0] if node.args else node.keywords[0].value
            if (pointer := self.base(address)) is not None:
                self.use.pointers.add(pointer)
                offsets = self.behind(address) - {pointer}
                self.use.integers |= offsets
                self.use.integer_pointers |= self.loaded(address)
            for keyword in node.keywords:
                if keyword.arg == "mask":
                    self.use.integers |= self.behind(keyword.value)
        elif name in ("range", "arange", "static_range", "cdiv"):
            self.use.integers |= {p for a in node.args for p in self.behind(a)}
            self.use.integer_pointers |= {p for a in node.args for p in self.loaded(a)}
            if name == "arange":
                self.use.sizes |= {p for a in node.args for p in self.behind(a)}
        elif name in _DTYPE_METHODS:
            for value in [
                *(node.args[-1:] if node.args else []),
                *(k.value for k in node.keywords if k.arg == "dtype"),
            ]:
                if isinstance(value, ast.Name) and value.id in self.parameters:
                    self.use.dtypes.add(value.id)
            if name in ("zeros", "full") and node.args:
                self.use.sizes |= self.behind(node.args[0])
        else:
            self._called_function(node)
        self.generic_visit(node)

    def _called_function(self, node: ast.Call) -> None:
        callee = self.scope.get(node.func.id) if isinstance(node.func, ast.Name) else None
        if callee is None or self.depth > 3 or not is_kernel(callee):
            return
        function = unwrap(callee).function
        inner = _Reader(function, self.depth + 1).use
        passed = dict(zip(function.arg_names, node.args)) | {
            k.arg: k.value for k in node.keywords if k.arg
        }
        for name, value in passed.items():
            if name in inner.pointers and (pointer := self.base(value)) is not None:
                self.use.pointers.add(pointer)
                if name in inner.integer_pointers:
                    self.use.integer_pointers.add(pointer)
                self.use.integers |= self.behind(value) - {pointer}
            elif isinstance(value, ast.Name) and value.id in self.parameters:
                for group in ("integers", "tests", "sizes", "dtypes"):
                    if name in getattr(inner, group):
                        getattr(self.use, group).add(value.id)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if isinstance(node.op, (ast.FloorDiv, ast.Mod)):
            self.use.integers |= self.behind(node.left) | self.behind(node.right)
            self.use.integer_pointers |= self.loaded(node.left) | self.loaded(node.right)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        sides = (node.left, *node.comparators)
        if any(
            isinstance(one, ast.Constant) and type(one.value) is int and one.value < 0
            for one in sides
        ):
            self.use.integer_pointers |= {p for side in sides for p in self.loaded(side)}
        self.generic_visit(node)

    def visit_If(self, node: ast.If | ast.IfExp) -> None:
        self.use.tests |= {
            one.id
            for one in ast.walk(node.test)
            if isinstance(one, ast.Name) and one.id in self.parameters
        }
        self.generic_visit(node)

    visit_IfExp = visit_If


def _of_module(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("tl", "triton", "language")


def _widens(value: ast.AST) -> bool:
    return (
        isinstance(value, ast.Call)
        and call_name(value) in ("to", "cast")
        and "float" in ast.unparse(value)
    )


def inferred_combinations(whole: Unwrapped, constexprs: Mapping[str, Any]) -> list[Combination]:
    """All float pointers alike in fp32, bf16 and fp16, with flags on and off; pointers whose dtype
    the launch sites fix keep it.
    """
    function = whole.function
    use = _Reader(function).use
    fixed = fixed_dtypes(function)
    found: list[Combination] = []
    for flags in (True, False):
        guessed = {p.name: _guess(p, use, flags) for p in function.params if p.is_constexpr}
        free_ones = {
            n: v
            for n, v in guessed.items()
            if n not in whole.configs[0].constexprs and n not in whole.heuristics
        }
        decided = whole.with_defaults(free_ones | dict(constexprs))
        values = {n: decided.get(n, v) for n, v in guessed.items()} | dict(constexprs)
        types = {p.name: _type(p, use, fixed, values) for p in function.params}
        values = {n: v for n, v in values.items() if types.get(n) == "constexpr"}
        free = [n for n, word in types.items() if n not in fixed and is_float_pointer(word)]
        for word in ("fp32", "bf16", "fp16"):
            if flags or not any(isinstance(v, bool) for v in values.values()):
                label = word
            else:
                label = f"{word}, flags off"
            alike = {**types, **dict.fromkeys(free, f"*{word}")}
            found.append(
                Combination(
                    label, alike, values, {}, dict(whole.configs[0].options), Reach.INFERRED
                )
            )
    return distinct(found)


def _guess(parameter: Any, use: Use, flags: bool) -> Any:
    """A value for a constexpr: what its uses allow, in a size that compiles fast and satisfies
    tl.dot.
    """
    import triton.language as tl

    name = parameter.name
    lower = name.lower()
    if name in use.dtypes and not parameter.has_default:
        return tl.float32
    if (
        parameter.has_default
        and parameter.default is not None
        and not isinstance(parameter.default, bool)
    ):
        return parameter.default
    if (
        name in use.sizes
        or any(w in lower for w in ("block", "tile", "size", "dim", "_bk", "_bv", "_bt"))
        or lower in ("bk", "bv", "bt", "bc", "bs", "bd", "m", "n", "k", "d")
    ):
        return 64
    if name in use.tests or lower.startswith(("has_", "use_", "is_", "with_", "do_")):
        return flags
    if (
        any(w in lower for w in ("eps", "scale", "softcap", "alpha", "beta"))
        and name not in use.integers
    ):
        return 1e-5 if "eps" in lower else 1.0
    return {"num_warps": 4, "num_stages": 2}.get(lower, 16)


def _type(parameter: Any, use: Use, fixed: Mapping[str, str], values: Mapping[str, Any]) -> str:
    name = parameter.name
    if parameter.is_constexpr or name in values:
        return "constexpr"
    annotated = getattr(parameter, "annotation_type", "") or ""
    if annotated:
        return annotated
    if name in fixed:
        return fixed[name]
    lower = name.lower()
    if name in use.pointers or (lower.endswith("_ptr") and name not in use.integers):
        whole = name in use.integer_pointers or bool(_INDEX_NAME.search(lower))
        return "*i64" if whole else "*fp32"
    if name in use.integers or any(
        w in lower for w in ("stride", "n_rows", "n_cols", "num_", "seqlen")
    ):
        return "i32"
    return "i32" if name in use.tests else "fp32"


def returns_a_value(function: Any) -> bool:
    """Whether it is no kernel by itself: functions that return a value are called from kernels, and
    seen with them.
    """
    values = [node.value for node in ast.walk(function.parse()) if isinstance(node, ast.Return)]
    return any(
        value is not None and not (isinstance(value, ast.Constant) and value.value is None)
        for value in values
    )
