"""A function or class cut out of its file: the statements that it needs are executed, imports of other packages are stood in for.

Statements keep their file and line, so that a traceback names the accused line. Names that come from another file of the same package
are cut out of that file in turn. Decorators and base classes that are stood in for do nothing.
"""

from __future__ import annotations

import ast
import builtins
import importlib
from typing import Any

from ..dataflow.modules import _file_of
from ..source import SourceFile

REAL = frozenset(
    [
        "torch",
        "math",
        "functools",
        "itertools",
        "typing",
        "typing_extensions",
        "dataclasses",
        "enum",
        "collections",
        "abc",
        "contextlib",
        "operator",
        "inspect",
        "copy",
        "warnings",
        "numbers",
        "string",
        "re",
        "logging",
        "__future__",
        "types",
        "weakref",
        "numpy",
        "einops",
    ]
)
MAX_FILES = 12


def _import_real(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
    """What `import` inside a function does: modules that are not in REAL are not there."""
    if level or name.partition(".")[0] not in REAL:
        raise ImportError(f"{name} is not imported here")
    return builtins.__import__(name, globals, locals, fromlist, level)


_BUILTINS = vars(builtins) | {"__import__": _import_real}


class StandIn:
    """Something of another package: has every attribute, is called as a decorator, and is no tensor."""

    def __init__(self, name: str) -> None:
        self.__dict__["_name"] = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return StandIn(f"{self._name}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        decorates = len(args) == 1 and not kwargs and (isinstance(args[0], type) or callable(args[0]))
        return args[0] if decorates and not isinstance(args[0], StandIn) else StandIn(f"{self._name}()")

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        from torch import nn

        others = [b for b in bases if isinstance(b, type) and issubclass(b, nn.Module)]
        like_a_module = any(word in self._name.rpartition(".")[2] for word in ("Model", "Module", "Layer", "Attention", "Embedding", "MLP"))
        return (nn.Module,) if like_a_module and not others else ()

    def __bool__(self) -> bool:
        return False  # `if is_flash_attn_available():`

    def __getitem__(self, item: Any) -> Any:
        return self

    def __or__(self, other: Any) -> Any:
        return Any

    __ror__ = __or__

    def __iter__(self) -> Any:
        raise TypeError(f"{self._name} is not here")


class Cut:
    """The namespace of one file, filled as far as was asked for."""

    def __init__(self, file: SourceFile, others: dict[str, Cut] | None = None) -> None:
        self.file = file
        self.others = {} if others is None else others
        self.others[file.path] = self
        self.names: dict[str, Any] = {"__name__": "cut_by_isotype", "__builtins__": _BUILTINS, "__file__": file.path}
        self._binders: dict[str, ast.stmt] = {}
        for statement in file.tree.body:
            for name in _bound(statement):
                self._binders.setdefault(name, statement)
        self._executed: set[ast.stmt] = set()

    def get(self, name: str) -> Any:
        """The value of a name of this file, with all that it needs."""
        self._need(name)
        return self.names[name]

    def _need(self, name: str) -> None:
        statement = self._binders.get(name)
        if statement is None or statement in self._executed:
            return
        self._executed.add(statement)
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            self._import(statement)
            return
        for inner in ast.walk(statement):
            if isinstance(inner, (ast.Import, ast.ImportFrom)) and not isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
                self._import(inner)
            elif isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Load):
                self._need(inner.id)
        if isinstance(statement, (ast.If, ast.Try)):
            self._branches(statement)
            return
        module = ast.Module([statement], [])
        exec(compile(ast.fix_missing_locations(module), self.file.path, "exec"), self.names)

    def _branches(self, statement: ast.stmt) -> None:
        """`try: import x; HAS_X = True; except ImportError: ...` and `if`: assignments and definitions of the last way that works."""
        for inner in ast.walk(statement):
            if isinstance(inner, (ast.Assign, ast.FunctionDef, ast.ClassDef, ast.AnnAssign)) and self.file.function_of(inner) is None:
                for name in (n.id for n in ast.walk(inner) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)):
                    self._need(name)
                module = ast.fix_missing_locations(ast.Module([inner], []))
                try:
                    exec(compile(module, self.file.path, "exec"), self.names)
                except Exception:  # what does not work here leaves its names to another branch
                    continue

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            if isinstance(node, ast.Import):
                name = alias.asname or alias.name.partition(".")[0]
                self.names[name] = _module(alias.name if alias.asname else alias.name.partition(".")[0])
                if not alias.asname and "." in alias.name:
                    _module(alias.name)
                continue
            name, source = alias.asname or alias.name, "." * node.level + (node.module or "")
            if node.level == 0 and source.partition(".")[0] in REAL:
                module = _module(source)
                value = getattr(module, alias.name, None)
                self.names[name] = value if value is not None else _module(f"{source}.{alias.name}")
                continue
            self.names[name] = self._from_another_file(source, alias.name)

    def _from_another_file(self, module: str, name: str) -> Any:
        other = _file_of(self.file, module) if len(self.others) < MAX_FILES else None
        if other is None:
            return StandIn(f"{module}.{name}")
        cut = self.others.get(other.path) or Cut(other, self.others)
        try:
            return cut.get(name)
        except Exception:  # whatever that file needs and is not here
            return StandIn(f"{module}.{name}")


def _module(name: str) -> Any:
    if name.partition(".")[0] not in REAL:
        return StandIn(name)
    try:
        return importlib.import_module(name)
    except ImportError:
        return StandIn(name)


def _bound(statement: ast.stmt) -> list[str]:
    """The names that a statement of the module binds."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [statement.name]
    if isinstance(statement, ast.Import):
        return [a.asname or a.name.partition(".")[0] for a in statement.names]
    if isinstance(statement, ast.ImportFrom):
        return [a.asname or a.name for a in statement.names]
    if isinstance(statement, (ast.If, ast.Try)):
        inner = [s for s in ast.iter_child_nodes(statement) if isinstance(s, ast.stmt)]
        inner += [s for handler in getattr(statement, "handlers", []) for s in handler.body]
        return [name for s in inner for name in _bound(s)]
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target] if isinstance(statement, ast.AnnAssign) else []
    return [n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)]
