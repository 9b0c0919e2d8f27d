"""What the command line names: the module of a file or a dotted name, and NAME in it."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import IsotypeError, UsageError


def module_of(place: str, *, as_part: bool = False) -> ModuleType:
    """The module behind a path or a dotted name. What the module raises is let through.

    as_part  imports a file of a package as the package does, so that it finds its neighbours
    """
    path = Path(place)
    if path.suffix != ".py" and not path.is_file():
        return import_module(place)
    if not path.is_file():
        raise UsageError(f"{place}: no such file")
    path = path.resolve()
    package = [path.stem]
    root = path.parent
    while as_part and (root / "__init__.py").is_file():
        package.insert(0, root.name)
        root = root.parent
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    if len(package) > 1:
        return import_module(".".join(package).removesuffix(".__init__"))
    name = path.stem if path.stem not in sys.modules else f"_isotype_{path.stem}"
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{place}: not a Python file")
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def in_one_line(place: str) -> Iterator[None]:
    """Within it a failed import becomes a UsageError: no such module, a syntax error, what the
    module raised and where.
    """
    try:
        yield
    except IsotypeError:
        raise
    except ModuleNotFoundError as error:
        missing = place.split(".")[0] == str(error.name).split(".")[0]
        if missing:
            why = "no such file or module"
        else:
            why = f"it imports {error.name}, which is not installed"
        raise UsageError(f"{place}: {why}") from error
    except SyntaxError as error:
        raise UsageError(f"{error.filename or place}:{error.lineno}: {error.msg}") from error
    except Exception as error:
        raise UsageError(f"{place}: importing it raised {in_words(error)}") from error


def in_words(error: Exception) -> str:
    """File and line, type and text of an exception, on one line."""
    frames = traceback.extract_tb(error.__traceback__)
    at = f"{frames[-1].filename}:{frames[-1].lineno}: " if frames else ""
    return f"{at}{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def member(module: ModuleType, name: str, place: str) -> Any:
    """What `NAME` or `Class.method` is.

    Raises  UsageError with what the module defines
    """
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is None:
        own = [
            n
            for n, v in vars(module).items()
            if callable(v) and n[0] != "_" and getattr(v, "__module__", "") == module.__name__
        ]
        raise UsageError(
            f"{place} has no {name!r}",
            fix=f"one of: {', '.join(own)}" if own else "define it: the file has no function",
        )
    return found


def required(function: Callable[..., Any]) -> list[str]:
    """The parameters without which it cannot be called."""
    kinds = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.KEYWORD_ONLY,
    )
    return [
        p.name
        for p in inspect.signature(function).parameters.values()
        if p.default is p.empty and p.kind in kinds
    ]
