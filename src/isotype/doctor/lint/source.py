"""One parsed file, as rules see it: its tree, an index of the nodes by type, their parents, and what each imported name means."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any, TypeVar

Function = ast.FunctionDef | ast.AsyncFunctionDef
N = TypeVar("N", bound=ast.AST)
# ruff: noqa: SIM905
_LEAVES = frozenset("ctx op ops id attr arg name module level kind type_comment is_async simple conversion type_ignores".split())


class _Children(dict[type, tuple[str, ...]]):
    """Node type -> the fields that hold nodes; operators and contexts are no nodes of their own here."""

    def __missing__(self, kind: type[ast.AST]) -> tuple[str, ...]:
        self[kind] = tuple(name for name in kind._fields if name not in _LEAVES)
        return self[kind]


_CHILDREN = _Children()
_SCOPES = {ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda}


class SourceFile:
    """path: as the user gave it; text: decoded; tree: the module.

    Raises  SyntaxError (ValueError for null bytes) when Python cannot parse it.
    """

    def __init__(self, path: str, text: str) -> None:
        self.path, self.text = path, text
        self.tree = ast.parse(text, filename=path)
        self.parents: dict[ast.AST, ast.AST] = {}
        self.memo: dict[str, Any] = {}  # what several rules need and one of them has worked out
        self._snippets: dict[ast.AST, str] = {}
        self._own: dict[ast.AST, list[ast.AST]] = {}
        self._by_type: dict[type[ast.AST], list[ast.AST]] = {}
        self._index()

    def _index(self) -> None:
        """One walk, breadth first: types, parents, and which scope each node belongs to."""
        queue: list[tuple[ast.AST, ast.AST]] = [(self.tree, self.tree)]
        parents, by_type, own = self.parents, self._by_type, self._own
        for node, scope in queue:  # grows while it is read
            kind = type(node)
            by_type.setdefault(kind, []).append(node)
            inner = node if kind in _SCOPES else scope
            children = own.setdefault(inner, [])
            for name in _CHILDREN[kind]:
                value = getattr(node, name, None)
                if value is None:
                    continue
                for item in value if type(value) is list else (value,):
                    if isinstance(item, ast.AST):
                        parents[item] = node
                        children.append(item)
                        queue.append((item, inner))

    def nodes(self, kind: type[N]) -> Iterator[N]:
        """Every node of exactly this type, outer before inner."""
        yield from self._by_type.get(kind, ())  # type: ignore[misc]  # each node was filed under its own type

    def functions(self) -> Iterator[Function]:
        yield from self.nodes(ast.FunctionDef)
        yield from self.nodes(ast.AsyncFunctionDef)

    @cached_property
    def imports(self) -> dict[str, str]:
        """Local name -> dotted name: `import torch.nn.functional as F` gives F -> torch.nn.functional. Relative imports keep their dots."""
        known: dict[str, str] = {}
        for node in self.nodes(ast.Import):
            for alias in node.names:
                known[alias.asname or alias.name.split(".")[0]] = alias.name if alias.asname else alias.name.split(".")[0]
        for source in self.nodes(ast.ImportFrom):
            for alias in source.names:
                known[alias.asname or alias.name] = f"{'.' * source.level}{source.module or ''}.{alias.name}"
        return known

    def dotted(self, node: ast.AST | None) -> str:
        """`F.linear` -> `torch.nn.functional.linear`; "" for what is not a plain dotted name. Names of no import are left as written."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ""
        head = self.imports.get(node.id, node.id)
        return ".".join([head, *reversed(parts)])

    def function_of(self, node: ast.AST) -> Function | None:
        """The innermost function around `node`."""
        current = self.parents.get(node)
        while current is not None and not isinstance(current, Function):
            current = self.parents.get(current)
        return current

    @cached_property
    def _of_tests(self) -> bool:
        """A file named as test runners look for them, or that imports one."""
        name = re.split(r"[/\\]", self.path)[-1]
        named = name.startswith("test_") or name.endswith("_test.py") or name == "conftest.py"
        return named or any(m.split(".")[0] in ("pytest", "unittest") for m in self.imports.values())

    def in_a_test(self, node: ast.AST) -> bool:
        """Whether it stands in a function called `test_...`, inside one, or beside some: a file of tests."""
        if self._of_tests:
            return True
        function = self.function_of(node)
        while function is not None:
            if function.name.startswith("test_"):
                return True
            function = self.function_of(function)
        return False

    def symbol(self, node: ast.AST) -> str | None:
        """`Class.method` around a node, or None at module level."""
        names = []
        current: ast.AST | None = node
        while current is not None:
            if isinstance(current, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names.append(current.name)
            current = self.parents.get(current)
        return ".".join(reversed(names)) or None

    def snippet(self, node: ast.AST, limit: int = 60) -> str:
        """The node's own source on one line, shortened."""
        if node not in self._snippets:
            self._snippets[node] = " ".join(ast.unparse(node).split())
        text = self._snippets[node]
        return text if len(text) <= limit else text[: limit - 3] + "..."

    def own(self, scope: ast.AST) -> list[ast.AST]:
        """The nodes of a function, class or module, outer before inner, without those of functions and classes defined inside it."""
        return self._own.get(scope, [])


def keyword(call: ast.Call, *names: str) -> ast.expr | None:
    """The value of the first of these keyword arguments that the call has."""
    for item in call.keywords:
        if item.arg in names:
            return item.value
    return None


def bindings(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """What an assignment binds: `a, b = c, d` gives (a, c) and (b, d); nothing for what is no assignment."""
    for target in node.targets if isinstance(node, ast.Assign) else ():
        assert isinstance(node, ast.Assign)
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple) and len(target.elts) == len(node.value.elts):
            yield from zip(target.elts, node.value.elts)
        else:
            yield target, node.value


def last_name(node: ast.AST) -> str:
    """`a.b.c` -> c; `c` -> c; a call answers for its function; anything else is ""."""
    if isinstance(node, ast.Call):
        return last_name(node.func)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function or block without those of functions and classes defined inside it."""
    stack = list(ast.iter_child_nodes(function))
    while stack:
        node = stack.pop()
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            stack.extend(ast.iter_child_nodes(node))
