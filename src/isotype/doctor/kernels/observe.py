"""Runs Triton's front end on one combination of argument types, and records the dtype of every
expression in the kernel. From these dtypes, the module finds the step that gave a value its dtype.

Triton compiles a kernel by visiting its syntax tree, and each visit of an expression returns a
typed value. One compilation is enough to record all these types. A failure can then be explained
from the types in the tree, not only from the text of the error. The explanation may be, for
example, a load through a pointer, a scalar that promoted a block, or a cast. Types are Triton's
scalar names: `fp32`, `int32`, `*bf16`. `FailureSite` describes where a compilation failed, and
`Fault` describes the mistake.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import io
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from ...finding import Severity
from .compile_inputs import FLOATS, Combination, target_name


@dataclass
class Binding:
    """An assignment `name = expression`, with the dtype of the value."""

    name: str
    dtype: str
    node: ast.AST | None
    value: ast.AST | None = None  # the right side; for `x += y`, the `x + y` that Triton creates


@dataclass(eq=False)
class Frame:
    """One `@triton.jit` function, as Triton compiled it for one set of argument types.

    tree            the syntax tree of the function
    dtypes, shapes  the dtype and the shape of the value of each expression
    bindings        the assignments, in the order in which they were compiled
    parameters      parameter -> Triton's type name
    """

    name: str
    file: str
    first_line: int
    tree: ast.AST | None = None
    dtypes: dict[ast.AST, str] = field(default_factory=dict)
    constants: set[ast.AST] = field(default_factory=set)  # expressions known when compiling
    shapes: dict[ast.AST, tuple[int, ...]] = field(default_factory=dict)
    bindings: list[Binding] = field(default_factory=list)
    parameters: dict[str, str] = field(default_factory=dict)
    # the nodes of `tree`, because Triton creates further nodes, such as `x = x + y` for `x += y`
    source_nodes: frozenset[ast.AST] = frozenset()
    statements: list[ast.stmt] = field(default_factory=list)
    assigned_value: ast.AST | None = None  # the right side of the last assignment visited
    scope: dict[str, Any] = field(default_factory=dict)

    def line(self, node: ast.AST | None) -> int:
        return self.first_line + getattr(node, "lineno", 1) - 1

    def nodes(self) -> Iterator[ast.AST]:
        """Yields every node of the function's syntax tree. Yields nothing if Triton did not compile
        the function.
        """
        if self.tree is not None:
            return ast.walk(self.tree)
        return iter(())

    @property
    def is_triton_library(self) -> bool:
        """Whether the function belongs to Triton's library (`tl.sum`, `tl.softmax`)."""
        return f"{os.sep}triton{os.sep}language{os.sep}" in self.file


@dataclass
class Observation:
    """The result of one compilation.

    target          the GPU for which the kernel was compiled
    frames          the functions that Triton compiled, the kernel first
    failures        for each frame, the node at which its compilation stopped; the innermost frame
                    first
    error, message  the exception of the compiler, and its message; None and "" if it compiled
    ttir            the text of the compiled module with its locations, if it was asked for
    """

    combination: Combination
    target: str
    frames: list[Frame] = field(default_factory=list)
    failures: list[tuple[Frame, ast.AST]] = field(default_factory=list)
    error: BaseException | None = None
    message: str = ""
    ttir: str = ""

    @property
    def failed(self) -> bool:
        return self.error is not None


def _get_attribute(value: Any, name: str) -> Any:
    """Returns an attribute of a value, or None if the value has no such attribute. Up to version
    3.6, Triton's tuples raise ValueError for a missing attribute.
    """
    try:
        return getattr(value, name, None)
    except ValueError:
        return None


def value_dtype(value: Any) -> str | None:
    """Returns the dtype of a value, such as `fp32`, `int32` or `*bf16`. Returns None for values
    without a type, such as modules, functions and None.
    """
    kind = _get_attribute(value, "type")
    scalar = _get_attribute(kind, "scalar") or kind
    text = str(scalar) if scalar is not None else None
    if text is None or text.startswith(("constexpr", "<class")):
        inner = _get_attribute(value, "value")
        if inner is not None:
            return f"constexpr {type(inner).__name__}"
        return None
    if text.startswith("pointer<"):
        return "*" + text.removeprefix("pointer<").removesuffix(">").split(",")[0].strip("> ")
    return {"int1": "bool"}.get(text, text)


def _value_shape(value: Any) -> tuple[int, ...]:
    sizes = [getattr(size, "value", size) for size in _get_attribute(value, "shape") or ()]
    # the sizes of a tensor descriptor are run-time values, which are left out
    return tuple(size for size in sizes if isinstance(size, int))


def _root_error(error: BaseException) -> BaseException:
    """Returns the innermost of Triton's nested CompilationErrors, which is the original error."""
    visited: set[int] = set()
    while id(error) not in visited:
        visited.add(id(error))
        inner = error.__cause__
        if (
            inner is None
            and type(error).__name__ == "CompilationError"
            and not getattr(error, "error_message", None)
        ):
            inner = error.__context__
        if inner is None:
            return error
        error = inner
    return error


def _error_message(error: BaseException) -> str:
    """Returns the message of a failure, without the source code that Triton prints before it."""
    text = str(getattr(error, "error_message", None) or error)
    with contextlib.suppress(SyntaxError, ValueError):
        # for Python's assertions Triton stores the repr: AssertionError('initial value ...')
        call = ast.parse(text.strip(), mode="eval").body
        if isinstance(call, ast.Call) and call.args and isinstance(call.args[0], ast.Constant):
            text = str(call.args[0].value)
    return " ".join(text.split()) or type(error).__name__


@functools.lru_cache(maxsize=64)
def _parse(source: str) -> ast.Module:
    return ast.parse(source)


@functools.lru_cache(maxsize=64)
def _list_nodes(tree: ast.AST) -> frozenset[ast.AST]:
    return frozenset(ast.walk(tree))


def parse_function(function: Any) -> ast.Module:
    """Parses a `@triton.jit` function. Triton parses it again for each combination of argument
    types, which takes a third of the time of a check.
    """
    return _parse(function.src)


@contextlib.contextmanager
def _record_visits(observation: Observation) -> Iterator[None]:
    """Wraps `visit` and `set_value` of Triton's code generator during one compilation, to record
    the types of the visited nodes.
    """
    from triton.compiler.code_generator import CodeGenerator
    from triton.runtime.jit import JITFunction

    visit = CodeGenerator.visit
    set_value = CodeGenerator.set_value
    frames: dict[int, tuple[Any, Frame]] = {}  # holds the generator, so that its id is not reused

    def get_frame(generator: Any) -> Frame:
        entry = frames.get(id(generator))
        if entry is None:
            function = generator.jit_fn
            frame = Frame(
                function.__name__,
                str(generator.file_name),
                generator.begin_line + 1,
                scope=function.__globals__,
            )
            observation.frames.append(frame)
            entry = frames[id(generator)] = generator, frame
        return entry[1]

    def visit_and_record(generator: Any, node: Any) -> Any:
        frame = get_frame(generator)
        if frame.tree is None and isinstance(node, ast.Module):
            frame.tree = node
            frame.source_nodes = _list_nodes(node)
        if isinstance(node, ast.stmt):
            if node in frame.source_nodes:
                frame.statements.append(node)
            frame.assigned_value = getattr(node, "value", None)
        try:
            value = visit(generator, node)
        except Exception:
            if node is not None and all(
                failure is not frame for failure, _ in observation.failures
            ):
                observation.failures.append((frame, node))
            raise
        if isinstance(node, ast.expr) and (dtype := value_dtype(value)) is not None:
            frame.dtypes[node] = dtype
            if dtype.startswith("constexpr"):
                frame.constants.add(node)
            else:
                frame.shapes[node] = _value_shape(value)
        return value

    def set_and_record(generator: Any, name: str, value: Any) -> None:
        frame = get_frame(generator)
        if (dtype := value_dtype(value)) is not None:
            node = generator.cur_node
            if isinstance(node, (ast.FunctionDef, ast.arguments, ast.arg)) or node is None:
                frame.parameters.setdefault(name, dtype)
            # the statement that is being visited, because `set_value` receives only a name
            frame.bindings.append(
                Binding(
                    name,
                    dtype,
                    frame.statements[-1] if frame.statements else node,
                    frame.assigned_value,
                )
            )
        set_value(generator, name, value)

    with (
        mock.patch.multiple(CodeGenerator, visit=visit_and_record, set_value=set_and_record),
        mock.patch.object(JITFunction, "parse", parse_function),
    ):
        yield


def observe(
    kernel: Any, combination: Combination, target: Any, *, keeps_ttir: bool = False
) -> Observation:
    """Runs Triton's front end (syntax tree to TTIR) on one combination for one target. The front
    end is enough to find dtype errors, because it raises all of them. One run takes 10 to 60 ms.
    """
    from triton._C.libtriton import ir
    from triton.compiler import ASTSource
    from triton.compiler.compiler import make_backend

    observation = Observation(combination, target_name(target))
    try:
        backend = make_backend(target)
        options = backend.parse_options(dict(combination.options))
        source = ASTSource(
            kernel,
            dict(combination.types),
            dict(combination.constexprs),
            dict(combination.attributes),
        )
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        arguments = {
            "target": target,
            "options": options,
            "codegen_fns": backend.get_codegen_implementation(options),
            "module_map": backend.get_module_map(),
            "context": context,
        }
        parameters = inspect.signature(source.make_ir).parameters  # Triton 3.4 takes no target
        # Triton prints the whole module if it does not verify
        with _record_visits(observation), contextlib.redirect_stdout(io.StringIO()):
            module = source.make_ir(**{name: arguments[name] for name in parameters})
        if keeps_ttir:
            observation.ttir = str(module)
    except Exception as error:
        observation.error = _root_error(error)
        observation.message = _error_message(observation.error)
    return observation


LOW_PRECISION = ("bf16", "fp16")


@dataclass(frozen=True)
class Origin:
    """The step that gave a value its dtype.

    kind  load, scalar (a float scalar promoted a block), promotion (one block promoted another),
          cast, call, parameter or constant
    text  a description such as `loaded through x_ptr (*bf16)`
    """

    kind: str
    text: str
    line: int
    source: str
    name: str | None = None  # the scalar, pointer or parameter that decided the dtype
    # whether it is a load of a single number per program, such as the maximum of a row, and not of
    # a block
    is_row_statistic: bool = False


def is_assignment_to(statement: ast.AST | None, name: str) -> bool:
    if isinstance(statement, ast.Assign):
        targets: list[ast.expr] = statement.targets
    elif isinstance(statement, (ast.AugAssign, ast.AnnAssign)):
        targets = [statement.target]
    else:
        return False
    return any(
        isinstance(n, ast.Name) and n.id == name for target in targets for n in ast.walk(target)
    )


def find_names(node: ast.AST) -> list[str]:
    return list(dict.fromkeys(n.id for n in ast.walk(node) if isinstance(n, ast.Name)))


def variable_name(node: ast.AST) -> str:
    """Returns the variable in an expression, for example `x` in `-x`, `x[:, None]` or `x.to(...)`.
    For any other expression, returns the source code of the expression.
    """
    while True:
        if isinstance(node, ast.Name):
            return node.id
        if isinstance(node, ast.UnaryOp):
            node = node.operand
        elif isinstance(node, ast.Subscript):
            node = node.value
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and not _is_module_call(node)
        ):
            node = node.func.value
        elif (
            isinstance(node, ast.Call)
            and node.args
            and call_name(node) in ("trans", "load", "reshape", "permute", "view")
        ):
            node = node.args[0]
        elif isinstance(node, ast.BinOp):
            node = node.left if find_names(node.left) else node.right
        else:
            return ast.unparse(node)


def _is_module_call(node: ast.Call) -> bool:
    return (
        isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id in ("tl", "libdevice", "math", "triton", "language")
    )


def call_name(node: ast.AST) -> str:
    """Returns the name of the called function, for example `dot` for `tl.dot(...)`. Returns "" if
    the node is not a call.
    """
    if not isinstance(node, ast.Call):
        return ""
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    if isinstance(node.func, ast.Name):
        return node.func.id
    return ""


def find_origin(
    frame: Frame, node: ast.AST, *, last_line: int | None = None, _depth: int = 0
) -> Origin | None:
    """Finds the step in this function that gave `node` its dtype, such as a load or a cast. Returns
    None if the step cannot be determined.

    last_line  assignments after this line are ignored, because a name may be assigned again later
    """
    if _depth > 12:
        return None
    if isinstance(node, ast.Name):
        line = last_line if last_line is not None else getattr(node, "lineno", 10**9)
        dtype = frame.dtypes.get(node)
        for binding in reversed(frame.bindings):
            statement = binding.node
            if (
                binding.name == node.id
                and is_assignment_to(statement, node.id)
                and getattr(statement, "lineno", 0) <= line
            ):
                if dtype is not None and binding.dtype != dtype:
                    continue
                value = binding.value
                if value is None or (isinstance(value, ast.Name) and value.id == node.id):
                    continue
                value_origin = find_origin(
                    frame,
                    value,
                    last_line=getattr(statement, "lineno", line) - 1,
                    _depth=_depth + 1,
                )
                return value_origin or Origin(
                    "value", f"`{ast.unparse(value)}`", frame.line(statement), ast.unparse(value)
                )
        if node.id in frame.parameters:
            return Origin(
                "parameter",
                f"parameter {node.id} ({frame.parameters[node.id]})",
                frame.first_line,
                node.id,
                node.id,
            )
        return None
    if isinstance(node, ast.BinOp):
        return _binary_origin(frame, node, last_line, _depth)
    if isinstance(node, (ast.UnaryOp, ast.Subscript)):
        return find_origin(
            frame,
            node.operand if isinstance(node, ast.UnaryOp) else node.value,
            last_line=last_line,
            _depth=_depth + 1,
        )
    if isinstance(node, ast.IfExp):
        return find_origin(frame, node.body, last_line=last_line, _depth=_depth + 1)
    if isinstance(node, ast.Constant):
        return Origin(
            "constant", f"the constant {ast.unparse(node)}", frame.line(node), ast.unparse(node)
        )
    if isinstance(node, ast.Call):
        return _call_origin(frame, node, last_line, _depth)
    return None


def _describe_operand(node: ast.AST) -> str:
    if call_name(node) == "load":
        return f"what is loaded through {variable_name(node)}"
    return variable_name(node)


def _binary_origin(
    frame: Frame, node: ast.BinOp, last_line: int | None, depth: int
) -> Origin | None:
    left = node.left
    right = node.right
    result = frame.dtypes.get(node, "?")
    sides = {side: frame.dtypes.get(side) for side in (left, right)}
    for operand, partner in ((left, right), (right, left)):
        operand_dtype = sides[operand]
        partner_dtype = sides[partner]
        if partner_dtype == result and operand_dtype != result and operand_dtype in FLOATS:
            is_scalar = not frame.shapes.get(partner) and bool(frame.shapes.get(operand))
            kind = "scalar" if is_scalar else "promotion"
            if is_scalar:
                reason = f"the {partner_dtype} scalar {ast.unparse(partner)}"
            else:
                reason = f"{ast.unparse(partner)}, which is {partner_dtype}"
            text = (
                f"`{ast.unparse(node)}` promotes {_describe_operand(operand)} from {operand_dtype} to {result}: it"
                f" meets {reason}"
            )
            return Origin(kind, text, frame.line(node), ast.unparse(node), variable_name(partner))
    for side in (left, right):
        if sides[side] == result and not isinstance(side, ast.Constant):
            return find_origin(frame, side, last_line=last_line, _depth=depth + 1)
    return None


def _call_origin(frame: Frame, node: ast.Call, last_line: int | None, depth: int) -> Origin | None:
    line = frame.line(node)
    name = call_name(node)
    result = frame.dtypes.get(node, "?")
    text = ast.unparse(node)
    if name == "load" and node.args:
        pointer = frame.dtypes.get(node.args[0], "")
        parameter = next(
            (
                name
                for name in find_names(node.args[0])
                if frame.parameters.get(name, "").startswith("*")
            ),
            None,
        )
        pointer_name = parameter or variable_name(node.args[0])
        description = f"loaded through {pointer_name} ({pointer or result}) without a cast"
        return Origin("load", description, line, text, pointer_name, not frame.shapes.get(node))
    if name in ("to", "cast"):
        return Origin("cast", f"cast by `{text}`", line, text)
    if name in ("zeros", "full"):
        return Origin("cast", f"made as {result} by `{text}`", line, text)
    if name != "dot":
        for argument in [*node.args, *(keyword.value for keyword in node.keywords)]:
            if frame.dtypes.get(argument) != result:
                continue
            origin = find_origin(frame, argument, last_line=last_line, _depth=depth + 1)
            if origin is not None:
                return origin
    return Origin("call", f"the result of `{text}`", line, text)


@dataclass(frozen=True)
class Fault:
    """A fault of a kernel. One Finding reports the fault for all combinations in which it
    occurs."""

    code: str
    file: str
    line: int
    kernel: str
    variable: str
    message: str
    cause: str
    fix: str
    dtypes: tuple[str, str] | tuple[str] | tuple[()] = ()
    facts: tuple[tuple[str, str], ...] = field(default=())
    is_dtype: bool = True  # whether the failure is about dtypes
    is_independent: bool = False  # whether the failure occurs with all arguments of the kernel
    is_row_statistic: bool = (
        False  # whether the value at fault is a single loaded number per program
    )
    severity: Severity | None = None  # None: it depends on how reachable the combination is


@dataclass(frozen=True)
class FailureSite:
    """The place where a compilation failed. It consists of the innermost function of the user's
    code, the node, and the message.
    """

    frame: Frame
    node: ast.AST
    message: str
    kernel: str

    def make_fault(
        self,
        code: str,
        variable: str,
        message: str,
        *,
        cause: str,
        fix: str,
        line: int | None = None,
        **fields: Any,
    ) -> Fault:
        fault_line = self.frame.line(self.node) if line is None else line
        return Fault(
            code, self.frame.file, fault_line, self.kernel, variable, message, cause, fix, **fields
        )

    def format_location(self, origin: Origin | None) -> str:
        """Returns the location of an origin in the form ` (case.py:12)`, or "" if the origin has no
        location.
        """
        if origin:
            return f" ({self.frame.file.rsplit('/', 1)[-1]}:{origin.line})"
        return ""


def scalar_dtype(text: str) -> str:
    """Returns the dtype of a block type, for example `fp32` for `fp32[constexpr[256]]` (Triton 3.9)
    and for `<[256], fp32>` (older versions).
    """
    name = re.sub(r"^<\[.*\], *(.+)>$", r"\1", text.strip()).partition("[")[0]
    return {"int1": "bool"}.get(name, name)


def describe_origin(site: FailureSite, origin: Origin | None) -> tuple[tuple[str, str], ...]:
    if origin is not None:
        return (("comes from", f"{origin.text}{site.format_location(origin)}"),)
    return ()
