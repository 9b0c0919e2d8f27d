"""Infers the signatures of a kernel from the uses of its parameters and from the launches in its
file.

If the kernel uses a parameter as the base of an address, the parameter is a pointer. If the kernel
compares a parameter with indices or multiplies it with them, the parameter is an integer. All other
parameters are float scalars. If a launch in the file of the kernel passes a buffer with an explicit
dtype (`torch.empty(..., dtype=torch.float32)`), the parameter always has this dtype. The result is
only a guess, and the report says so.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...dtypes import parse
from .compile_inputs import (
    Combination,
    Reach,
    UnwrappedKernel,
    is_float_pointer,
    is_kernel,
    locate_kernel,
    remove_duplicates,
    unwrap_kernel,
)
from .observe import call_name, parse_function

# dtype of torch -> Triton's type name of a pointer
_POINTER_TYPES = {
    "int64": "*i64",
    "int32": "*i32",
    "int16": "*i16",
    "int8": "*i8",
    "uint8": "*u8",
    "bool": "*i1",
    "fp64": "*fp64",
    "fp32": "*fp32",
    "bf16": "*bf16",
    "fp16": "*fp16",
}
_CREATION_FUNCTIONS = (
    "empty",
    "zeros",
    "ones",
    "full",
    "empty_like",
    "zeros_like",
    "ones_like",
    "full_like",
    "new_empty",
    "new_zeros",
    "arange",
    "to",
    "float",
    "tensor",
)


def find_fixed_dtypes(function: Any) -> dict[str, str]:
    """Finds launches in the kernel's file that pass a tensor with an explicit dtype, as in
    `torch.empty(..., dtype=torch.float32)`. The parameter that gets this tensor always has the same
    dtype. Returns the type (such as `*fp32`) of each such parameter.
    """
    fixed_types = dict[str, str]()
    for call, local_dtypes in _find_launches(_read_source(function)):
        assert isinstance(call.func, ast.Subscript)
        if not _is_name(call.func.value, function.__name__):
            continue
        arguments: dict[str, ast.expr] = {}
        if not any(isinstance(argument, ast.Starred) for argument in call.args):
            arguments |= zip(function.arg_names, call.args)
        for keyword in call.keywords:
            if keyword.arg is not None and keyword.arg in function.arg_names:
                arguments[keyword.arg] = keyword.value
        for name, value in arguments.items():
            type_name = _created_dtype(value)
            if isinstance(value, ast.Name) and local_dtypes.get(value.id):
                type_name = local_dtypes[value.id]
            if type_name is not None:
                fixed_types.setdefault(name, type_name)
    return fixed_types


@functools.lru_cache(maxsize=16)
def _find_launches(source: str) -> list[tuple[ast.Call, dict[str, str | None]]]:
    """Returns the calls `kernel[grid](...)` in the functions of a file, each with the dtypes of the
    local variables. A file may hold many kernels, and is parsed only once.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return []
    launches = []
    for scope in ast.walk(tree):
        if not isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        calls = [
            node
            for node in ast.walk(scope)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
        ]
        if calls:
            local_dtypes = _created_dtypes(scope)
            launches += [(call, local_dtypes) for call in calls]
    return launches


def _is_name(node: ast.AST, name: str) -> bool:
    return (isinstance(node, ast.Name) and node.id == name) or (
        isinstance(node, ast.Attribute) and node.attr == name
    )


def _read_source(function: Any) -> str:
    try:
        with open(locate_kernel(function)[0], encoding="utf-8") as file:
            return file.read()
    except (OSError, ValueError):
        return ""


def _created_dtypes(scope: ast.AST) -> dict[str, str | None]:
    """For each local variable to which the function assigns a new tensor, returns the dtype of the
    tensor. The dtype is None if two assignments to the variable have different dtypes.
    """
    dtypes: dict[str, str | None] = {}
    for node in ast.walk(scope):
        if (
            isinstance(node, ast.Assign)
            and len(node.targets) == 1
            and isinstance(node.targets[0], ast.Name)
        ):
            name = node.targets[0].id
            type_name = _created_dtype(node.value)
            dtypes[name] = type_name if name not in dtypes or dtypes[name] == type_name else None
    return dtypes


def _created_dtype(value: ast.AST) -> str | None:
    if (
        not isinstance(value, ast.Call)
        or not isinstance(value.func, ast.Attribute)
        or value.func.attr not in _CREATION_FUNCTIONS
    ):
        return None
    if value.func.attr == "float" and not value.args:
        return "*fp32"
    candidates = [keyword.value for keyword in value.keywords if keyword.arg == "dtype"]
    if value.func.attr == "to":
        candidates += value.args
    for candidate in candidates:
        if isinstance(candidate, ast.Attribute) and _is_name(candidate.value, "torch"):
            try:
                return _POINTER_TYPES.get(parse(candidate.attr))
            except ValueError:
                return None
    if (
        not candidates
        and value.func.attr in ("empty", "zeros", "ones")
        and _is_name(value.func.value, "torch")
    ):
        return "*fp32"  # torch's default dtype
    if value.func.attr == "arange" and not candidates:
        return "*i64"
    return None


_MEMORY_CALLS = (
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
# options of loads, stores and tl.dot that are text -> a valid value
_TEXT_OPTIONS = {"input_precision": "ieee", "eviction_policy": "", "cache_modifier": ""}
_DTYPE_METHODS = ("to", "cast", "zeros", "full")


@dataclass
class ParameterUses:
    """Records how one function uses its parameters."""

    pointers: set[str] = field(default_factory=set)
    integer_pointers: set[str] = field(default_factory=set)
    locks: set[str] = field(default_factory=set)  # pointers whose value is compared and swapped
    integers: set[str] = field(default_factory=set)
    tests: set[str] = field(default_factory=set)  # used as a condition
    sizes: set[str] = field(default_factory=set)  # used as the size of an arange or a shape
    dtypes: set[str] = field(default_factory=set)  # used as a dtype
    # used as an option of a call, such as `input_precision=PRECISION`: parameter -> a valid value
    options: dict[str, str] = field(default_factory=dict)


class _UseReader(ast.NodeVisitor):
    """Reads the source of a kernel and records how the kernel uses its parameters."""

    def __init__(self, function: Any, depth: int = 0) -> None:
        self.uses = ParameterUses()
        self.depth = depth
        self.scope = dict(function.__globals__)
        self.parameters = list(function.arg_names)
        self.tree = parse_function(function)
        self.values: dict[str, list[ast.expr]] = {}  # variable -> the assigned values
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    self._record_assignment(target, node.value)
            elif isinstance(node, (ast.AugAssign, ast.AnnAssign)) and node.value is not None:
                self._record_assignment(node.target, node.value)
        self.visit(self.tree)
        self.uses.integer_pointers &= self.uses.pointers
        self.uses.integers -= self.uses.pointers

    def _record_assignment(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            self.values.setdefault(target.id, []).append(value)
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for element, item in zip(target.elts, value.elts):
                if isinstance(element, ast.Name):
                    self.values.setdefault(element.id, []).append(item)

    def base_parameter(
        self, node: ast.AST | None, visited: frozenset[str] = frozenset()
    ) -> str | None:
        """Returns the parameter to which an address expression adds its offsets."""
        if isinstance(node, ast.Name):
            if node.id in self.values and node.id not in visited:
                for value in self.values[node.id]:
                    if (parameter := self.base_parameter(value, visited | {node.id})) is not None:
                        return parameter
            return node.id if node.id in self.parameters else None
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
            return self.base_parameter(node.left, visited) or self.base_parameter(
                node.right, visited
            )
        if isinstance(node, ast.Call):
            if (
                isinstance(node.func, ast.Attribute)
                and node.func.attr in ("to", "cast")
                and not _is_language_call(node.func)
            ):
                return self.base_parameter(node.func.value, visited)
            if node.args and call_name(node) in (
                "multiple_of",
                "max_contiguous",
                "cast",
                "make_block_ptr",
                "advance",
            ):
                return self.base_parameter(node.args[0], visited)
            return None
        if isinstance(node, ast.Subscript):
            return self.base_parameter(node.value, visited)
        if isinstance(node, ast.IfExp):
            return self.base_parameter(node.body, visited) or self.base_parameter(
                node.orelse, visited
            )
        return None

    def find_parameters(self, node: ast.AST, depth: int = 0) -> set[str]:
        """Returns the parameters from which an expression is computed. Local variables are replaced
        by the values that are assigned to them. Values that are loaded from memory are ignored.
        """
        parameters: set[str] = set()
        if isinstance(node, ast.Call) and call_name(node) == "load":
            return parameters
        if isinstance(node, ast.Name):
            if node.id in self.values and depth < 4:
                for value in self.values[node.id]:
                    parameters |= self.find_parameters(value, depth + 1)
            elif node.id in self.parameters:
                parameters.add(node.id)
        for child in ast.iter_child_nodes(node):
            parameters |= self.find_parameters(child, depth)
        return parameters

    def find_loaded_pointers(self, node: ast.AST, depth: int = 0) -> set[str]:
        """Returns the pointers from which values in an expression are loaded."""
        pointers: set[str] = set()
        for child in ast.walk(node):
            if call_name(child) == "load":
                assert isinstance(child, ast.Call)
                address = child.args[0] if child.args else None
                if pointer := self.base_parameter(address):
                    pointers.add(pointer)
            elif isinstance(child, ast.Name) and depth < 4:
                for value in self.values.get(child.id, []):
                    if not _is_float_cast(value):
                        pointers |= self.find_loaded_pointers(value, depth + 1)
        return pointers

    def visit_Call(self, node: ast.Call) -> None:
        name = call_name(node)
        for keyword in node.keywords:
            if keyword.arg in _TEXT_OPTIONS and isinstance(keyword.value, ast.Name):
                self.uses.options[keyword.value.id] = _TEXT_OPTIONS[keyword.arg]
        if name in _MEMORY_CALLS and (node.args or node.keywords):
            address = node.args[0] if node.args else node.keywords[0].value
            if (pointer := self.base_parameter(address)) is not None:
                self.uses.pointers.add(pointer)
                if name == "atomic_cas":
                    self.uses.locks.add(pointer)
                offsets = self.find_parameters(address) - {pointer}
                self.uses.integers |= offsets
                self.uses.integer_pointers |= self.find_loaded_pointers(address)
            for keyword in node.keywords:
                if keyword.arg == "mask":
                    self.uses.integers |= self.find_parameters(keyword.value)
        elif name in ("range", "arange", "static_range", "cdiv"):
            for argument in node.args:
                parameters = self.find_parameters(argument)
                self.uses.integers |= parameters
                self.uses.integer_pointers |= self.find_loaded_pointers(argument)
                if name == "arange":
                    self.uses.sizes |= parameters
        elif name in _DTYPE_METHODS:
            dtypes = [keyword.value for keyword in node.keywords if keyword.arg == "dtype"]
            for value in [*node.args[-1:], *dtypes]:
                if isinstance(value, ast.Name) and value.id in self.parameters:
                    self.uses.dtypes.add(value.id)
            if name in ("zeros", "full") and node.args:
                self.uses.sizes |= self.find_parameters(node.args[0])
        else:
            self._read_called_function(node)
        self.generic_visit(node)

    def _read_called_function(self, node: ast.Call) -> None:
        """Records how a called `@triton.jit` function uses the parameters that are passed to it."""
        if not isinstance(node.func, ast.Name):
            return
        callee = self.scope.get(node.func.id)
        if callee is None or self.depth > 3 or not is_kernel(callee):
            return
        function = unwrap_kernel(callee).function
        inner = _UseReader(function, self.depth + 1).uses
        arguments: dict[str, ast.expr] = dict(zip(function.arg_names, node.args))
        for keyword in node.keywords:
            if keyword.arg:
                arguments[keyword.arg] = keyword.value
        for name, value in arguments.items():
            if name in inner.pointers and (pointer := self.base_parameter(value)) is not None:
                self.uses.pointers.add(pointer)
                if name in inner.integer_pointers:
                    self.uses.integer_pointers.add(pointer)
                if name in inner.locks:
                    self.uses.locks.add(pointer)
                self.uses.integers |= self.find_parameters(value) - {pointer}
            elif isinstance(value, ast.Name) and value.id in self.parameters:
                for group in ("integers", "tests", "sizes", "dtypes"):
                    if name in getattr(inner, group):
                        getattr(self.uses, group).add(value.id)
                if name in inner.options:
                    self.uses.options[value.id] = inner.options[name]

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if isinstance(node.op, (ast.FloorDiv, ast.Mod)):
            for operand in (node.left, node.right):
                self.uses.integers |= self.find_parameters(operand)
                self.uses.integer_pointers |= self.find_loaded_pointers(operand)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        sides = (node.left, *node.comparators)
        if any(
            isinstance(operand, ast.Constant) and type(operand.value) is int and operand.value < 0
            for operand in sides
        ):
            for operand in sides:
                self.uses.integer_pointers |= self.find_loaded_pointers(operand)
        self.generic_visit(node)

    def visit_If(self, node: ast.If | ast.IfExp) -> None:
        self.uses.tests |= {
            name.id
            for name in ast.walk(node.test)
            if isinstance(name, ast.Name) and name.id in self.parameters
        }
        self.generic_visit(node)

    visit_IfExp = visit_If


def _is_language_call(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("tl", "triton", "language")


def _is_float_cast(value: ast.AST) -> bool:
    return (
        isinstance(value, ast.Call)
        and call_name(value) in ("to", "cast")
        and "float" in ast.unparse(value)
    )


def infer_combinations(
    unwrapped: UnwrappedKernel,
    constexprs: Mapping[str, Any],
    dtypes: Sequence[str] = ("fp32", "bf16", "fp16"),
) -> list[Combination]:
    """Returns one combination for each of `dtypes`. All pointers have this dtype, except pointers
    to indices, and pointers for which every launch passes the same dtype. Each combination is
    returned twice, with the boolean flags switched on and switched off.
    """
    function = unwrapped.function
    uses = _UseReader(function).uses
    fixed_types = find_fixed_dtypes(function)
    combinations: list[Combination] = []
    for flags in (True, False):
        guesses = {
            p.name: _guess_constexpr(p, uses, flags) for p in function.params if p.is_constexpr
        }
        free_constexprs = {
            name: value
            for name, value in guesses.items()
            if name not in unwrapped.configs[0].constexprs and name not in unwrapped.heuristics
        }
        known_constexprs = unwrapped.with_defaults(free_constexprs | dict(constexprs))
        values = {
            name: known_constexprs.get(name, value) for name, value in guesses.items()
        } | dict(constexprs)
        types = {p.name: _infer_type(p, uses, fixed_types, values) for p in function.params}
        values = {name: value for name, value in values.items() if types.get(name) == "constexpr"}
        free_pointers = [
            name
            for name, dtype in types.items()
            if name not in fixed_types and is_float_pointer(dtype)
        ]
        for dtype in dtypes:
            if flags or not any(isinstance(value, bool) for value in values.values()):
                label = dtype
            else:
                label = f"{dtype}, flags off"
            pointer_types = {**types, **dict.fromkeys(free_pointers, f"*{dtype}")}
            combinations.append(
                Combination(
                    label,
                    pointer_types,
                    values,
                    {},
                    dict(unwrapped.configs[0].options),
                    Reach.INFERRED,
                    is_traced_by_compile=True,
                )
            )
    return remove_duplicates(combinations)


def _guess_constexpr(parameter: Any, uses: ParameterUses, flag_value: bool) -> Any:
    """Guesses the value of a constexpr from the way in which the kernel uses it. The guessed sizes
    are small enough to compile fast and large enough for tl.dot.
    """
    import triton.language as tl

    name = parameter.name
    lower = name.lower()
    if name in uses.dtypes and not parameter.has_default:
        return tl.float32
    if name in uses.options and not parameter.has_default:
        return uses.options[name]
    if (
        parameter.has_default
        and parameter.default is not None
        and not isinstance(parameter.default, bool)
    ):
        return parameter.default
    if (
        name in uses.sizes
        or any(w in lower for w in ("block", "tile", "size", "dim", "_bk", "_bv", "_bt"))
        or lower in ("bk", "bv", "bt", "bc", "bs", "bd", "m", "n", "k", "d")
    ):
        return 64
    if name in uses.tests or lower.startswith(("has_", "use_", "is_", "with_", "do_")):
        return flag_value
    if (
        any(w in lower for w in ("eps", "scale", "softcap", "alpha", "beta"))
        and name not in uses.integers
    ):
        return 1e-5 if "eps" in lower else 1.0
    return {"num_warps": 4, "num_stages": 2}.get(lower, 16)


def _infer_type(
    parameter: Any, uses: ParameterUses, fixed_types: Mapping[str, str], values: Mapping[str, Any]
) -> str:
    name = parameter.name
    if parameter.is_constexpr or name in values:
        return "constexpr"
    annotation = getattr(parameter, "annotation_type", "") or ""
    if annotation:
        return annotation
    if name in fixed_types:
        return fixed_types[name]
    lower = name.lower()
    if name in uses.locks:
        return "*i32"  # tl.atomic_cas takes int32 for its constants
    if name in uses.pointers or (lower.endswith("_ptr") and name not in uses.integers):
        is_integer = name in uses.integer_pointers or bool(_INDEX_NAME.search(lower))
        return "*i64" if is_integer else "*fp32"
    if name in uses.integers or any(
        w in lower for w in ("stride", "n_rows", "n_cols", "num_", "seqlen")
    ):
        return "i32"
    return "i32" if name in uses.tests else "fp32"


def returns_value(function: Any) -> bool:
    """True if the function returns a value. A function that returns a value is not a kernel. It is
    checked together with the kernels that call it.
    """
    values = [node.value for node in ast.walk(function.parse()) if isinstance(node, ast.Return)]
    return any(
        value is not None and not (isinstance(value, ast.Constant) and value.value is None)
        for value in values
    )
