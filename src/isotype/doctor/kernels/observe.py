"""Runs Triton's front end on one combination and keeps the dtype of every expression it visited.

Triton compiles a kernel by visiting its syntax tree; each visit of an expression returns a typed value. Recording these types gives
the whole kernel typed, for this signature, for the price of compiling it; a failure is then explained from the tree rather than from
the text of the message. Types come as Triton's scalar words: `fp32`, `int32`, `*bf16`.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .signature import Combination


@dataclass
class Binding:
    """A name given a value: `name = expression`, with the value's dtype at that moment."""

    name: str
    dtype: str
    node: ast.AST | None
    value: ast.AST | None = None  # the typed right side; of `x += y`, Triton's own `x + y`


@dataclass(eq=False)
class Frame:
    """One `@triton.jit` function as visited for one set of argument types."""

    name: str
    file: str
    first_line: int
    tree: ast.AST | None = None
    dtypes: dict[ast.AST, str] = field(default_factory=dict)
    constants: set[ast.AST] = field(default_factory=set)  # expressions known when compiling
    shapes: dict[ast.AST, tuple[int, ...]] = field(default_factory=dict)
    bindings: list[Binding] = field(default_factory=list)
    parameters: dict[str, str] = field(default_factory=dict)
    written: set[ast.AST] = field(default_factory=set)  # the nodes of `tree`: Triton adds its own, an `x = x + y` for an `x += y`
    statements: list[ast.stmt] = field(default_factory=list)
    assigned: ast.AST | None = None  # the right side of the last assignment visited
    scope: dict[str, Any] = field(default_factory=dict)

    def line(self, node: ast.AST | None) -> int:
        return self.first_line + getattr(node, "lineno", 1) - 1

    def nodes(self) -> Iterator[ast.AST]:
        """Every node of the tree; none where the function was not visited."""
        return ast.walk(self.tree) if self.tree is not None else iter(())

    @property
    def in_triton(self) -> bool:
        """Whether it belongs to Triton's own library (`tl.sum`, `tl.softmax`)."""
        return f"{os.sep}triton{os.sep}language{os.sep}" in self.file


@dataclass
class Observation:
    """What one compilation showed. `frames[0]` is the kernel; `failures` hold the node at which each frame stopped, innermost first."""

    combination: Combination
    target: str
    frames: list[Frame] = field(default_factory=list)
    failures: list[tuple[Frame, ast.AST]] = field(default_factory=list)
    error: BaseException | None = None
    message: str = ""
    ttir: str | None = None

    @property
    def failed(self) -> bool:
        return self.error is not None


def _of(value: Any, name: str) -> Any:
    """An attribute or None; Triton's own tuples raise ValueError for one they have not (up to 3.6)."""
    try:
        return getattr(value, name, None)
    except ValueError:
        return None


def dtype_word(value: Any) -> str | None:
    """`fp32`, `int32`, `*bf16`; None for values without a type (modules, functions, None)."""
    kind = _of(value, "type")
    scalar = _of(kind, "scalar") or kind
    word = str(scalar) if scalar is not None else None
    if word is None or word.startswith(("constexpr", "<class")):
        inner = _of(value, "value")
        return f"constexpr {type(inner).__name__}" if inner is not None else None
    if word.startswith("pointer<"):
        return "*" + word.removeprefix("pointer<").removesuffix(">").split(",")[0].strip("> ")
    return {"int1": "bool"}.get(word, word)


def _shape(value: Any) -> tuple[int, ...]:
    sizes = [getattr(n, "value", n) for n in _of(value, "shape") or ()]
    return tuple(n for n in sizes if isinstance(n, int))  # a tensor descriptor's sizes are run-time values


def _original(error: BaseException) -> BaseException:
    """The exception at the bottom of Triton's chain of CompilationErrors."""
    seen: set[int] = set()
    while id(error) not in seen:
        seen.add(id(error))
        inner = error.__cause__
        if inner is None and type(error).__name__ == "CompilationError" and not getattr(error, "error_message", None):
            inner = error.__context__
        if inner is None:
            return error
        error = inner
    return error


def _message(error: BaseException) -> str:
    """The last words of a failure, without the source excerpt that Triton puts before them."""
    text = str(getattr(error, "error_message", None) or error)
    # Triton keeps repr(exception) of Python's own assertions: AssertionError('initial value ...')
    if (match := _wrapped(text)) is not None:
        text = match
    return " ".join(text.split()) or type(error).__name__


def _wrapped(text: str) -> str | None:
    try:
        call = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        return None
    if isinstance(call, ast.Call) and call.args and isinstance(call.args[0], ast.Constant):
        return str(call.args[0].value)
    return None


@contextlib.contextmanager
def _recording(observation: Observation) -> Iterator[None]:
    """Wraps the code generator's `visit` and `set_value` for the length of one compilation."""
    from triton.compiler.code_generator import CodeGenerator

    visit, set_value = CodeGenerator.visit, CodeGenerator.set_value
    frames: dict[int, tuple[Any, Frame]] = {}  # the generator is kept, so that its id stays its own

    def frame_of(generator: Any) -> Frame:
        known = frames.get(id(generator))
        if known is None:
            function = generator.jit_fn
            frame = Frame(function.__name__, str(generator.file_name), generator.begin_line + 1, scope=function.__globals__)
            observation.frames.append(frame)
            known = frames[id(generator)] = generator, frame
        return known[1]

    def recorded_visit(generator: Any, node: Any) -> Any:
        frame = frame_of(generator)
        if frame.tree is None and isinstance(node, ast.Module):
            frame.tree = node
            frame.written = set(ast.walk(node))
        if isinstance(node, ast.stmt):
            if node in frame.written:
                frame.statements.append(node)
            frame.assigned = getattr(node, "value", None)
        try:
            value = visit(generator, node)
        except Exception:
            if node is not None and all(f is not frame for f, _ in observation.failures):
                observation.failures.append((frame, node))
            raise
        if isinstance(node, ast.expr) and (word := dtype_word(value)) is not None:
            frame.dtypes[node] = word
            if word.startswith("constexpr"):
                frame.constants.add(node)
            else:
                frame.shapes[node] = _shape(value)
        return value

    def recorded_set_value(generator: Any, name: str, value: Any) -> None:
        frame = frame_of(generator)
        if (word := dtype_word(value)) is not None:
            node = generator.cur_node
            if isinstance(node, (ast.FunctionDef, ast.arguments, ast.arg)) or node is None:
                frame.parameters.setdefault(name, word)
            frame.bindings.append(Binding(name, word, _statement(frame, node), frame.assigned))
        set_value(generator, name, value)

    CodeGenerator.visit, CodeGenerator.set_value = recorded_visit, recorded_set_value
    try:
        yield
    finally:
        CodeGenerator.visit, CodeGenerator.set_value = visit, set_value


def _statement(frame: Frame, node: ast.AST | None) -> ast.AST | None:
    """The assignment that is visited: `set_value` itself is given only a name."""
    return frame.statements[-1] if frame.statements else node


def observe(kernel: Any, combination: Combination, target: Any) -> Observation:
    """The front end (syntax tree to TTIR) of one combination for one target: every dtype error is raised here. 10 to 60 ms."""
    from triton._C.libtriton import ir
    from triton.compiler import ASTSource
    from triton.compiler.compiler import make_backend

    from .signature import target_name

    observation = Observation(combination, target_name(target))
    try:
        backend = make_backend(target)
        options = backend.parse_options(dict(combination.options))
        source = ASTSource(kernel, dict(combination.types), dict(combination.constexprs), dict(combination.attributes))
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        given = {
            "target": target,
            "options": options,
            "codegen_fns": backend.get_codegen_implementation(options),
            "module_map": backend.get_module_map(),
            "context": context,
        }
        wanted = inspect.signature(source.make_ir).parameters  # 3.4 takes no target
        with _recording(observation), contextlib.redirect_stdout(io.StringIO()):  # a module that does not verify is printed whole
            module = source.make_ir(**{name: given[name] for name in wanted})
        observation.ttir = str(module)
    except Exception as error:
        observation.error = _original(error)
        observation.message = _message(observation.error)
    return observation
