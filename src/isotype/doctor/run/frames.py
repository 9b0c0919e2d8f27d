"""The frames of a traceback. Each frame has its local variables with their values at the failure,
and the expression that it was evaluating.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from types import CodeType, TracebackType
from typing import Any

from ...observe.origin import is_library_file, short_path

# the syntax tree of the code of one frame
Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.Module
# (first line, last line, first column, last column), as in `co_positions`
Position = tuple[int | None, int | None, int | None, int | None]

_END_OF_CODE = 10**9  # a line after the last line of every file

# functions of torch that only pass their arguments on to another function
_FORWARDING_FUNCTIONS = frozenset(
    (
        "_wrapped_call_impl",
        "_call_impl",
        "decorate_autocast",
        "decorate_context",
        "inner",
        "apply",
    )
)


@dataclass(frozen=True, slots=True, eq=False)
class CallFrame:
    """One frame of a traceback.

    line       the line that was running
    position   the first and last line, and the first and last column, of the running expression
    variables  the local variables; in a module its global variables
    """

    code: CodeType
    line: int
    position: Position
    variables: Mapping[str, Any]
    global_variables: Mapping[str, Any]

    @property
    def file(self) -> str:
        return self.code.co_filename

    @property
    def function(self) -> str:
        return self.code.co_name

    @property
    def is_user_code(self) -> bool:
        return not is_library_file(self.file)

    @property
    def is_compiled_entry(self) -> bool:
        """True for the code that `torch.compile` makes of a function. It has the function's name
        and file, but no lines of its own.
        """
        statement = self.statement
        return statement is not None and statement is self.scope

    @property
    def is_forwarding(self) -> bool:
        """True if the function only passes its arguments to another function, as
        `Module._call_impl` does.
        """
        return self.function in _FORWARDING_FUNCTIONS and f"{os.sep}torch{os.sep}" in self.file

    @property
    def location(self) -> str:
        return f"{short_path(self.file)}:{self.line}"

    def location_of(self, node: ast.AST) -> str:
        line = getattr(node, "lineno", self.line)
        return f"{short_path(self.file)}:{line}"

    @property
    def scope(self) -> Scope | None:
        """Returns the syntax tree of the function, or of the module."""
        return _find_scope(self.code)

    @property
    def expression(self) -> ast.AST | None:
        """Returns the syntax tree of the expression that failed. If the interpreter does not know
        the expression, returns the tree of the whole statement.
        """
        # the code of a comprehension is not that of a function
        scope = self.scope or _parse_file(self.file)
        if scope is None:
            return None
        matches = [node for node in ast.walk(scope) if _position_of(node) == self.position]
        expressions = [node for node in matches if isinstance(node, ast.expr)]
        if expressions:
            return expressions[0]
        return matches[0] if matches else self.statement

    @property
    def statement(self) -> ast.stmt | None:
        """Returns the innermost statement that contains the line that was running."""
        scope = self.scope
        if scope is None:
            return None
        statements = [
            node
            for node in ast.walk(scope)
            if isinstance(node, ast.stmt) and _contains_line(node, self.line)
        ]
        return min(statements, key=_line_count, default=None)

    @property
    def text(self) -> str:
        """Returns the source code of the statement, on one line."""
        statement = self.statement
        if statement is None:
            return linecache.getline(self.file, self.line).strip()
        if isinstance(statement, (ast.With, ast.For, ast.While, ast.If, ast.FunctionDef)):
            return linecache.getline(self.file, statement.lineno).strip()
        return source_text(statement)

    def has_variable(self, name: str) -> bool:
        return name in self.variables or name in self.global_variables

    def get_variable(self, name: str) -> Any:
        if name in self.variables:
            return self.variables[name]
        return self.global_variables[name]


def collect_frames(error: BaseException) -> list[CallFrame]:
    """Returns the frames of an exception's traceback. The outermost frame comes first."""
    frames = []
    link = error.__traceback__
    while link is not None:
        frame = link.tb_frame
        frames.append(
            CallFrame(
                frame.f_code, link.tb_lineno, _position(link), frame.f_locals, frame.f_globals
            )
        )
        link = link.tb_next
    return frames


def make_returned_frame(
    function: Any, variables: Mapping[str, Any], *, in_libraries: bool = False
) -> CallFrame | None:
    """Returns a frame for a function of the user's code that has already returned. Its local
    variables no longer exist, so the frame contains `variables` instead, with the variables of the
    function's closure. Returns None for functions of libraries, unless `in_libraries` is set, and
    for other objects.
    """
    while isinstance(function, functools.partial):
        function = function.func
    owner = getattr(function, "__self__", None)
    function = inspect.unwrap(getattr(function, "__func__", function))
    code = getattr(function, "__code__", None)
    if code is None or (is_library_file(code.co_filename) and not in_libraries):
        return None
    if _find_scope(code) is None:
        return None
    values: dict[str, Any] = {}
    for name, cell in zip(code.co_freevars, function.__closure__ or ()):
        try:
            values[name] = cell.cell_contents
        except ValueError:
            continue  # the variable has no value yet
    if owner is not None and code.co_varnames:
        values[code.co_varnames[0]] = owner
    values |= variables
    position = (None, None, None, None)
    return CallFrame(code, _END_OF_CODE, position, values, function.__globals__)


def make_called_frame(
    code: CodeType, instruction: int, global_variables: Mapping[str, Any] | None = None
) -> CallFrame:
    """Returns a frame of a call that has ended, without its local variables."""
    empty = (None, None, None, None)
    position = next(islice(code.co_positions(), instruction // 2, None), empty)
    line = position[0] or code.co_firstlineno
    return CallFrame(code, line, position, {}, global_variables or {})


def make_module_frame(frame: CallFrame) -> CallFrame | None:
    """Returns a frame for the module that contains the code of another frame."""
    if _parse_file(frame.file) is None:
        return None
    return make_file_frame(frame.file, frame.global_variables)


def make_file_frame(file: str, global_variables: Mapping[str, Any]) -> CallFrame:
    """Returns a frame for a module that has been imported, at the end of its file."""
    code = compile("", file, "exec")
    position = (None, None, None, None)
    return CallFrame(code, _END_OF_CODE, position, global_variables, global_variables)


def source_text(node: ast.AST) -> str:
    """Returns the source code of a node on one line."""
    return " ".join(ast.unparse(node).split())


def iterate_causes(error: BaseException) -> Iterator[BaseException]:
    """Yields the exception that was raised first, and then the exceptions that it caused."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    yield from reversed(chain)


def _position(link: TracebackType) -> Position:
    positions = link.tb_frame.f_code.co_positions()
    empty = (None, None, None, None)
    return next(islice(positions, link.tb_lasti // 2, None), empty)


def _position_of(node: ast.AST) -> Position | None:
    if not hasattr(node, "lineno"):
        return None
    return (
        node.lineno,
        getattr(node, "end_lineno", None),
        getattr(node, "col_offset", None),
        getattr(node, "end_col_offset", None),
    )


def _contains_line(node: ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _line_count(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno


def parse_user_file(file: str) -> ast.Module | None:
    """Returns the syntax tree of a file of the user's code, or None for files of libraries."""
    return None if is_library_file(file) else _parse_file(file)


@functools.cache
def _parse_file(file: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return None


def _find_scope(code: CodeType) -> Scope | None:
    return _find_definition(code.co_filename, code.co_name, code.co_firstlineno)


@functools.cache
def _find_definition(file: str, name: str, first_line: int) -> Scope | None:
    tree = _parse_file(file)
    if tree is None or name == "<module>":
        return tree
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
            decorator_lines = [decorator.lineno for decorator in node.decorator_list]
            if first_line in (node.lineno, *decorator_lines):
                return node
        if isinstance(node, ast.Lambda) and name == "<lambda>" and node.lineno == first_line:
            return node
    return None
