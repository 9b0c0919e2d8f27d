"""The source code of the user's program: its calls, its assignments, and the functions around them.
Each file is read once, however many searches use it.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ...observe.origin import short_path
from .frames import CallFrame, parse_user_file
from .user_files import iterate_user_files

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef
Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


@dataclass(frozen=True, slots=True)
class _Index:
    """The nodes of a syntax tree.

    parents  id of a node -> the node that contains it
    calls    name of a function, method or class -> its calls
    """

    nodes: list[ast.AST] = field(default_factory=list)
    parents: dict[int, ast.AST] = field(default_factory=dict)
    calls: dict[str, list[ast.Call]] = field(default_factory=dict)
    assignments: list[ast.Assign] = field(default_factory=list)


@functools.cache
def _index_nodes(tree: ast.Module) -> _Index:
    index = _Index()
    for node in ast.walk(tree):
        index.nodes.append(node)
        for child in ast.iter_child_nodes(node):
            index.parents[id(child)] = node
        if isinstance(node, ast.Call):
            index.calls.setdefault(read_called_name(node), []).append(node)
        elif isinstance(node, ast.Assign):
            index.assignments.append(node)
    return index


def read_called_name(call: ast.Call) -> str:
    """Returns the name of a function or method without its owner."""
    function = call.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


class SourceFile:
    """A file of the user's code, and a frame of its module."""

    def __init__(self, file: str, tree: ast.Module, frame: CallFrame) -> None:
        self.file = file
        self.tree = tree
        self.frame = frame
        self._index = _index_nodes(tree)

    @property
    def nodes(self) -> list[ast.AST]:
        return self._index.nodes

    @property
    def assignments(self) -> list[ast.Assign]:
        return self._index.assignments

    def get_calls(self, name: str) -> list[ast.Call]:
        """Returns the calls of the functions, methods and classes of a name."""
        return self._index.calls.get(name, [])

    def location_of(self, node: ast.AST) -> str:
        return f"{short_path(self.file)}:{getattr(node, 'lineno', 0)}"

    def get_parent(self, node: ast.AST) -> ast.AST | None:
        return self._index.parents.get(id(node))

    def iterate_parents(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        """Yields the nodes that contain a node, the innermost first, each with the part of it that
        contains the node.
        """
        while (parent := self.get_parent(node)) is not None:
            yield parent, node
            node = parent

    def list_definitions(self, node: ast.AST) -> tuple[Definition, ...]:
        """Returns the functions and classes that contain a node, the outermost first."""
        parents = [parent for parent, _ in self.iterate_parents(node)]
        return tuple(parent for parent in reversed(parents) if isinstance(parent, Definition))

    def find_enclosing_function(self, node: ast.AST) -> Function | None:
        """Returns the innermost function that contains a node."""
        for parent, _ in self.iterate_parents(node):
            if isinstance(parent, Function):
                return parent
        return None


def read_source_file(frame: CallFrame) -> SourceFile | None:
    """Returns the file that contains the code of a frame, or None for files of libraries."""
    tree = parse_user_file(frame.file)
    return None if tree is None else SourceFile(frame.file, tree, frame)


class ProgramSource:
    """The files of the user's program: those of the running functions, and those that they import."""

    def __init__(self, frames: Sequence[CallFrame]) -> None:
        self.files = [SourceFile(*item) for item in iterate_user_files(frames)]

    def list_calls(self, name: str) -> list[tuple[SourceFile, ast.Call]]:
        """Returns the calls of the functions, methods and classes of a name."""
        return [(source, call) for source in self.files for call in source.get_calls(name)]

    def list_assignments(self) -> list[tuple[SourceFile, ast.Assign]]:
        return [(source, node) for source in self.files for node in source.assignments]

    def find_only_call(self, name: str) -> tuple[SourceFile, ast.Call] | None:
        calls = self.list_calls(name)
        return calls[0] if len(calls) == 1 else None

    def list_function_calls(
        self, function: Function, definitions: Sequence[Definition]
    ) -> list[tuple[SourceFile, ast.Call]]:
        """Returns the calls of a function. An object's `__init__` is called by its class, and the
        forward of an autograd.Function by `CLASS.apply`.

        definitions  the functions and classes that contain the function, the outermost first
        """
        owner = definitions[-1] if definitions else None
        class_name = owner.name if isinstance(owner, ast.ClassDef) else ""
        if function.name == "__init__":
            return self.list_calls(class_name)
        parameters = function.args.args
        if function.name == "forward" and parameters and parameters[0].arg == "ctx":
            calls = self.list_calls("apply")
            return [call for call in calls if _applies_class(call[1], class_name)]
        return self.list_calls(function.name)


def _applies_class(call: ast.Call, class_name: str) -> bool:
    return ast.unparse(call.func).endswith(f"{class_name}.apply")
