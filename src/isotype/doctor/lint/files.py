"""Which files a run looks at: those named, and the Python files under the folders named."""

from __future__ import annotations

import os
import tokenize
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path

from ...errors import UsageError

SKIPPED_FOLDERS = {"__pycache__", "node_modules", "build", "dist", "site-packages"}  # and every name that begins with a dot


def python_files(paths: Iterable[Path], exclude: Iterable[str] = (), root: Path | None = None) -> Iterator[Path]:
    """Sorted within each folder; `exclude` holds glob patterns matched against the path from `root`, its parts, and its folders.

    A path named on the command line is taken whatever `exclude` says about its own name.
    Raises  UsageError for a path that does not exist.
    """
    patterns = tuple(exclude)
    seen: set[Path] = set()
    for path in paths:
        if not path.exists():
            raise UsageError(f"{path}: no such file or folder")
        for file in [path] if path.is_file() else _under(path, patterns, root or Path.cwd()):
            if file not in seen:
                seen.add(file)
                yield file


def _under(folder: Path, patterns: tuple[str, ...], root: Path) -> Iterator[Path]:
    for here, folders, files in os.walk(folder):
        folders[:] = sorted(
            f for f in folders if not f.startswith(".") and f not in SKIPPED_FOLDERS and not _excluded(Path(here, f), patterns, root)
        )
        for file in (Path(here, name) for name in sorted(files) if name.endswith(".py")):
            if regular(file) and not _excluded(file, patterns, root):
                yield file


def regular(file: Path) -> bool:
    """No pipes or devices, whose reading never ends. A broken link is reported where it is read."""
    return file.is_file() or not file.exists()


def _excluded(path: Path, patterns: tuple[str, ...], root: Path) -> bool:
    if not patterns:
        return False
    relative = os.path.relpath(path.resolve(), root.resolve())
    return any(fnmatch(relative, p) or fnmatch(relative, p.rstrip("/") + "/*") or fnmatch(path.name, p) for p in patterns)


def read(path: Path) -> str:
    """The text of a Python file, in the encoding that it declares.

    Raises  SyntaxError or UnicodeDecodeError for what is not Python text.
    """
    with tokenize.open(path) as stream:
        return stream.read()
