"""Loads the objects that the command line names. The command line names a module (by its file or
its dotted name) and an object in this module.
"""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import IsotypeError, UsageError


def load_module(target: str, *, as_package_member: bool = False) -> ModuleType:
    """Imports the module with this path or dotted name. An exception in the code of the module is
    not caught.

    as_package_member  whether a file of a package is imported under its dotted name, so that
                       relative imports in the file work
    """
    path = Path(target)
    if path.suffix != ".py" and not path.is_file():
        return import_module(target)
    if not path.is_file():
        raise UsageError(f"{target}: no such file")
    path = path.resolve()
    package = [path.stem]
    root = path.parent
    while as_package_member and (root / "__init__.py").is_file():
        package.insert(0, root.name)
        root = root.parent
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    if len(package) > 1:
        return import_module(".".join(package).removesuffix(".__init__"))
    name = path.stem if path.stem not in sys.modules else f"_isotype_{path.stem}"
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{target}: not a Python file")
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def import_on_any_device(load: Callable[[], ModuleType]) -> ModuleType:
    """Imports a module. If this fails, the module is imported again with a simulated GPU, because
    it may select a driver or a device when it is imported. unsloth refuses to be imported without a
    GPU.
    """
    try:
        return load()
    except (IsotypeError, ModuleNotFoundError, SyntaxError):
        raise
    except Exception:
        if find_spec("triton") is None:
            raise
        from .kernels.compile_inputs import DEFAULT_TARGET, parse_target
        from .kernels.simulated_gpu import simulate_gpu

        with simulate_gpu(parse_target(DEFAULT_TARGET)):
            return load()


@contextmanager
def convert_import_errors(target: str) -> Iterator[None]:
    """Converts a failed import inside the block to a UsageError that names the error and its
    location.
    """
    try:
        yield
    except IsotypeError:
        raise
    except ModuleNotFoundError as error:
        missing = target.split(".")[0] == str(error.name).split(".")[0]
        if missing:
            reason = "no such file or module"
        else:
            reason = f"it imports {error.name}, which is not installed"
        raise UsageError(f"{target}: {reason}") from error
    except SyntaxError as error:
        raise UsageError(f"{error.filename or target}:{error.lineno}: {error.msg}") from error
    except Exception as error:
        raise UsageError(f"{target}: importing it raised {describe_exception(error)}") from error


def describe_exception(error: Exception) -> str:
    """Returns the file, line, type and text of an exception, on one line."""
    frames = traceback.extract_tb(error.__traceback__)
    location = f"{frames[-1].filename}:{frames[-1].lineno}: " if frames else ""
    return f"{location}{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def get_member(module: ModuleType, name: str, target: str) -> Any:
    """Returns the object that the module contains under the name `NAME` or `Class.method`.

    Raises  UsageError with a list of the module's functions, if the module has no such object
    """
    value: Any = module
    for part in name.split("."):
        value = getattr(value, part, None)
    if value is None:
        function_names = [
            member_name
            for member_name, member_value in vars(module).items()
            if callable(member_value)
            and member_name[0] != "_"
            and getattr(member_value, "__module__", "") == module.__name__
        ]
        fix = "define it: the file has no function"
        if function_names:
            fix = f"one of: {', '.join(function_names)}"
        raise UsageError(f"{target} has no {name!r}", fix=fix)
    return value


def required_parameters(function: Callable[..., Any]) -> list[str]:
    """Returns the parameters of a function that have no default."""
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
