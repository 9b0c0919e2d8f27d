"""Finds the files of the user's program: those of the running functions, and those of the modules
that they import. A function in an imported file may have returned before the error.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from .frames import CallFrame, make_file_frame, make_module_frame, parse_user_file

_MAX_FILES = 100  # files whose source code one explanation reads
_OUR_PACKAGE = __name__.partition(".")[0]


def iterate_user_files(
    frames: Sequence[CallFrame],
) -> Iterator[tuple[str, ast.Module, CallFrame]]:
    """Yields each file of the user's program, its syntax tree, and a frame of its module. The files
    with a running function come first.
    """
    pending: dict[str, CallFrame] = {}
    for frame in frames:
        module_frame = make_module_frame(frame) if frame.is_user_code else None
        if module_frame is not None:
            pending[frame.file] = module_frame
    visited: set[str] = set()
    while pending and len(visited) < _MAX_FILES:
        file = next(iter(pending))
        module_frame = pending.pop(file)
        visited.add(file)
        tree = parse_user_file(file)
        if tree is None:
            continue
        yield file, tree, module_frame
        for module in _iterate_imported_modules(tree, module_frame.global_variables):
            imported = getattr(module, "__file__", None)
            if imported is None or imported in visited or imported in pending:
                continue
            if parse_user_file(imported) is not None:
                pending[imported] = make_file_frame(imported, vars(module))


def _iterate_imported_modules(
    tree: ast.Module, global_variables: Mapping[str, Any]
) -> Iterator[ModuleType]:
    """Yields the loaded modules that the imports of a file name, without those of Isotype."""
    package = global_variables.get("__package__") or ""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = _absolute_name(node, package)
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        for name in names:
            module = sys.modules.get(name)
            if module is not None and name.partition(".")[0] != _OUR_PACKAGE:
                yield module


def _absolute_name(node: ast.ImportFrom, package: str) -> str:
    """Returns the name of the module of `from MODULE import ...`, also if it begins with dots."""
    if not node.level:
        return node.module or ""
    parts = package.split(".")
    base = parts[: len(parts) - node.level + 1]
    return ".".join([*base, node.module] if node.module else base)
