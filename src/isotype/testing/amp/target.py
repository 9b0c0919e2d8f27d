"""`FILE.py:NAME` or `package.module:NAME`, loaded: what `isotype doctor conform` is given, and the inputs to check it with."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ...dtypes import TensorSpec, to_torch
from ...errors import UsageError

_OPTIONS = ("reference", "params", "contract")


@dataclass(frozen=True)
class Target:
    """What to check: the function, its inputs, and its `reference`, `params` and `contract` where given."""

    function: Any
    inputs: Any
    label: str | None
    options: Mapping[str, Any]


def load_target(text: str, inputs: str | None = None) -> Target:
    """`NAME` is a `build()`, or with `inputs` the function itself.

    `build()` returns `(callable, inputs)`, or `(callable, inputs, options)` with `reference`, `params` or `contract` among the options.


    Raises  UsageError for a file, a name or inputs that do not fit, in one line
    """
    where, colon, name = text.rpartition(":")
    if not colon or not name.replace(".", "").isidentifier():
        where, name = text, "build"
    module = _import(where)
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is None:
        public = [
            n for n, v in vars(module).items() if callable(v) and not n.startswith("_") and getattr(v, "__module__", "") == module.__name__
        ]
        raise UsageError(f"{where} has no {name}", fix=f"one of: {', '.join(public) or 'nothing callable is defined there'}")
    if inputs is not None:
        return Target(_instance(found, name), read_inputs(inputs), name, {})
    if inspect.isclass(found) or not inspect.isfunction(found) or _required(found):
        raise UsageError(
            f"{name} needs inputs",
            fix=f'--inputs "fp32[4 16], fp32[8 16]", or a build() in {where} that returns ({name}, inputs)',
        )
    return _built(found, f"{where}:{name}")


def _built(build: Any, where: str) -> Target:
    try:
        result = build()
    except Exception as error:
        raise UsageError(f"{where}() raised {_at(error)}{type(error).__name__}: {error}") from error
    if isinstance(result, Mapping) and {"function", "inputs"} <= set(result):
        result = (result["function"], result["inputs"], {k: v for k, v in result.items() if k not in ("function", "inputs")})
    if not isinstance(result, tuple) or len(result) not in (2, 3) or not callable(result[0]):
        raise UsageError(
            f"{where}() returned {type(result).__name__}", fix="return (callable, inputs), where inputs is a tuple of arguments"
        )
    options = dict(result[2]) if len(result) == 3 else {}
    unknown = sorted(set(options) - set(_OPTIONS))
    if unknown:
        raise UsageError(f"{where}() returned the option {unknown[0]!r}", fix=f"known options: {', '.join(_OPTIONS)}")
    return Target(result[0], result[1], None, options)


def _import(where: str) -> ModuleType:
    path = Path(where)
    if path.suffix != ".py":
        try:
            known = find_spec(where) is not None
        except (ImportError, ValueError):
            known = False
        if not known:
            raise UsageError(f"{where}: no such module", fix="give FILE.py:NAME or package.module:NAME")
        return _guarded(where, lambda: import_module(where))
    if not path.is_file():
        raise UsageError(f"{where}: no such file")
    spec = spec_from_file_location(path.stem, path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules[path.stem] = module
    loader = spec.loader

    def run() -> ModuleType:
        loader.exec_module(module)
        return module

    return _guarded(where, run)


def _guarded(where: str, load: Callable[[], ModuleType]) -> ModuleType:
    try:
        return load()
    except SyntaxError as error:
        raise UsageError(f"{error.filename or where}:{error.lineno}: {error.msg}") from error
    except Exception as error:
        raise UsageError(f"{where} cannot be imported: {_at(error)}{type(error).__name__}: {error}") from error


def _at(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}: " if frames else ""


def _required(function: Any) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in inspect.signature(function).parameters.values() if p.default is p.empty and p.kind in kinds]


def _instance(found: Any, name: str) -> Any:
    if inspect.isclass(found) and issubclass(found, nn.Module):
        try:
            return found()
        except TypeError as error:
            raise UsageError(
                f"{name}() cannot be made without arguments: {error}", fix="write a build() that returns (module, inputs)"
            ) from error
    return found


def read_inputs(text: str) -> tuple[Any, ...]:
    """`"fp32[4 16], bf16[8 16], int64[4] < 8, 0.5"`: tensors drawn from a fixed seed, and plain numbers.

    An integer tensor holds values below the number after `<` (2 without one). `name:` before a spec is allowed and ignored.
    """
    generator = torch.Generator().manual_seed(0)
    made: list[Any] = []
    for part in (p.strip() for p in text.split(",") if p.strip()):
        spec_text, _, bound = part.partition("<")
        spec_text = spec_text.split(":")[-1].strip()
        if "[" not in spec_text:
            made.append(_number(spec_text))
            continue
        try:
            spec = TensorSpec.parse(spec_text)
            shape = [int(d) for d in spec.dims]
            dtype = to_torch("int64" if spec.dtype == "int" else "fp32" if spec.dtype == "float" else spec.dtype)
        except ValueError as error:
            raise UsageError(f"--inputs {part!r}: {error}", fix='write a dtype and sizes, as in "fp32[4 16]"') from None
        if dtype.is_floating_point:
            made.append(torch.randn(shape, generator=generator).to(dtype).requires_grad_())
        else:
            made.append(torch.randint(0, int(bound or 2), shape, generator=generator).to(dtype))
    return tuple(made)


def _number(text: str) -> Any:
    if text in ("True", "False", "None"):
        return {"True": True, "False": False, "None": None}[text]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    raise UsageError(f"--inputs {text!r}: neither a tensor like fp32[4 16] nor a number")


def triton_interpreted_without_gpu() -> AbstractContextManager[None]:
    """Within it Triton kernels, if any were imported, run in the repaired interpreter where there is no GPU."""
    if torch.cuda.is_available() or "triton" not in sys.modules:
        return nullcontext()
    from ..interpreter import interpreted

    return interpreted()
