"""TARGET of the command line: a file, a module, a kernel, or a `build()`; loaded and checked."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from ...errors import IsotypeError, UsageError
from .calls import Calls, Recording, check_reached, check_wrapper, several, trap_launches
from .check import Report, check, check_combinations, given
from .infer import inferable
from .pretend import pretend_gpu
from .signature import DEFAULT, is_kernel, parse_target, require_triton, unwrap


def check_target(text: str, targets: Sequence[str] | None = None) -> Report:
    """Checks what `text` names.

    targets  architectures; None takes the module's TARGETS, or sm_90
    Raises   UsageError when it cannot be loaded, or holds no kernel
    """
    require_triton()
    chosen = list(targets) if targets else None
    for one in chosen or []:
        parse_target(one)
    place, _, name = text.partition(":")
    modules = load(place)
    module = modules[0]
    own = chosen or [str(t) for t in getattr(module, "TARGETS", [])] or [DEFAULT]
    report = Report()
    if name:
        _check_name(module, name, own, report)
        return report
    for each in modules:
        _check_module(each, own, report)
    if not report.kernels:
        raise UsageError(f"{text}: no @triton.jit kernel in it")
    return report


def load(place: str) -> list[ModuleType]:
    """The module behind a path or a dotted name; a package also brings its submodules. What its own code launches is not run.

    Raises  UsageError in one line: no such file, a syntax error, an import that fails.
    """
    try:
        with trap_launches():
            try:
                return _imported(place)
            except (IsotypeError, ModuleNotFoundError, SyntaxError):
                raise
            except Exception:
                # code that selects a driver or a device when it is imported: once more, with a simulated GPU
                with pretend_gpu(parse_target(DEFAULT)):
                    return _imported(place)
    except IsotypeError:
        raise
    except ModuleNotFoundError as error:
        missing = bool(error.name) and place.split(".")[0] == str(error.name).split(".")[0]
        raise UsageError(
            f"{place}: {'no such file or module' if missing else f'it imports {error.name}, which is not installed'}"
        ) from error
    except SyntaxError as error:
        raise UsageError(f"{error.filename or place}:{error.lineno}: {error.msg}") from error
    except Exception as error:
        raise UsageError(f"{place}: importing it raised {type(error).__name__}: {' '.join(str(error).split())[:300]}") from error


def _imported(place: str) -> list[ModuleType]:
    path = Path(place)
    if place.endswith(".py") or path.is_file():
        return [_load_file(path)]
    if path.is_dir():
        files = sorted(f for f in path.rglob("*.py") if "triton" in f.read_text(encoding="utf-8", errors="replace"))
        if not files:
            raise UsageError(f"{place}: no Python file in it names triton")
        return [_load_file(f) for f in files]
    module = importlib.import_module(place)
    return [module, *_submodules(module)]


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"{path}: no such file")
    path = path.resolve()
    package, root = [path.stem], path.parent
    while (root / "__init__.py").is_file():
        package.insert(0, root.name)
        root = root.parent
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    if len(package) > 1:
        return importlib.import_module(".".join(package).removesuffix(".__init__"))
    spec = importlib.util.spec_from_file_location(f"_isotype_kernels_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _submodules(module: ModuleType) -> Iterator[ModuleType]:
    for info in pkgutil.walk_packages(getattr(module, "__path__", []), f"{module.__name__}.", onerror=lambda name: None):
        try:
            found = importlib.import_module(info.name)
        except Exception:
            continue  # an optional part of a package that needs what is not installed; its other parts are checked
        yield found


def kernels_in(module: ModuleType) -> dict[str, Any]:
    """Name -> kernel, of those written in this module; functions that only kernels call are seen with them."""
    found = {n: v for n, v in vars(module).items() if is_kernel(v) and unwrap(v).function.__module__ == module.__name__}
    return {n: v for n, v in found.items() if not any(inferable(unwrap(v).function))}


def _check_module(module: ModuleType, targets: Sequence[str], report: Report) -> None:
    for name, kernel in kernels_in(module).items():
        try:
            report.add(check(kernel, targets=targets))
        except UsageError:
            raise
        except Exception as error:
            report.remarks.append(f"{name}: not checked, {type(error).__name__}: {' '.join(str(error).split())[:200]}")


def _check_name(module: ModuleType, name: str, targets: Sequence[str], report: Report) -> None:
    value: Any = module
    for part in name.split("."):
        if not hasattr(value, part):
            near = ", ".join(sorted(kernels_in(module))) or "no kernel"
            raise UsageError(f"{module.__name__.removeprefix('_isotype_kernels_')} has no {name!r} (it has {near})")
        value = getattr(value, part)
    if is_kernel(value):
        _check_one(module, value, None, targets, report)
    elif callable(value):
        _check_callable(module, name, value, targets, report)
    else:
        raise UsageError(f"{name} is a {type(value).__name__}: expected a kernel, a function that launches kernels, or build()")


def _check_one(module: ModuleType, kernel: Any, matrix: Any, targets: Sequence[str], report: Report) -> None:
    """A kernel with its module's MATRIX and CONSTEXPRS, or with inferred signatures."""
    whole = unwrap(kernel)
    signatures = (
        matrix
        if isinstance(matrix, Mapping) and matrix and all(isinstance(v, Mapping) for v in matrix.values())
        else getattr(module, "MATRIX", None)
    )
    if isinstance(signatures, Mapping) and all(set(s) <= set(whole.function.arg_names) for s in signatures.values()):
        constexprs = whole.with_defaults(getattr(module, "CONSTEXPRS", {}))
        bases = [given(whole.function, label, types, constexprs) for label, types in signatures.items()]
        report.add(check_combinations(whole.function, bases, targets))
        return
    report.add(check(kernel, constexprs=getattr(module, "CONSTEXPRS", None), targets=targets))


def _check_callable(module: ModuleType, name: str, function: Callable[..., Any], targets: Sequence[str], report: Report) -> None:
    if _required(function):
        raise UsageError(f"{name} needs inputs: name a function without arguments that returns ({name}, inputs)")
    result, calls = _call_once(name, function, targets)
    if isinstance(result, tuple) and result and is_kernel(result[0]):
        _check_one(module, result[0], result[1] if len(result) > 1 else None, targets, report)
    elif is_kernel(result):
        _check_one(module, result, None, targets, report)
    elif isinstance(result, tuple) and len(result) == 2 and callable(result[0]):
        for inputs in several(result[1]):
            report.add(check_wrapper(result[0], inputs, targets))
        if not report.kernels:
            raise UsageError(f"{name}: calling what it returned launched no Triton kernel" + _first(report.remarks))
    elif calls.launches:
        report.add(check_reached(calls, targets))
    else:
        raise UsageError(f"{name}() launched no Triton kernel, and returned no kernel" + _first(list(calls.refused.values())))


def _first(remarks: Sequence[str]) -> str:
    return f": {remarks[0]}" if remarks else ""


def _required(function: Callable[..., Any]) -> list[str]:
    if isinstance(function, type) and hasattr(function, "apply") and hasattr(function, "forward"):
        return list(inspect.signature(function.forward).parameters)[1:]
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ["?"]
    return [p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def _call_once(name: str, function: Callable[..., Any], targets: Sequence[str]) -> tuple[Any, Any]:
    """Calls the function itself and records its launches."""
    calls = Calls()
    target = parse_target(targets[0])
    result = None
    with Recording(calls, target, "as called"):
        try:
            result = function()
        except Exception as error:
            calls.refused["as called"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return result, calls
