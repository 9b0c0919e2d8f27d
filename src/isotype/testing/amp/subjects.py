"""The function that is checked, and how the command line names it: FILE.py:NAME."""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ...doctor.loading import in_one_line, in_words, member, module_of, required
from ...errors import UsageError
from ...finding import Place
from .samples import PARAM, parameter_names


class Subject:
    """Makes, for every run, a callable and the parameters it owns, in the dtypes asked for."""

    def __init__(self, target: Any) -> None:
        self.target = target
        owner = getattr(target, "__self__", None)
        applied = owner if getattr(target, "__name__", "") == "apply" else target
        is_function = inspect.isclass(applied) and issubclass(applied, torch.autograd.Function)
        self.function_class: type[torch.autograd.Function] | None = applied if is_function else None
        self.module = target if isinstance(target, nn.Module) else owner if isinstance(owner, nn.Module) else None
        if self.function_class is None and not callable(target):
            raise UsageError(f"ampcheck cannot call a {type(target).__name__}", fix="pass an autograd.Function, an nn.Module or a callable")
        self.label = self._label()

    def _label(self) -> str:
        if self.function_class is not None:
            return self.function_class.__qualname__
        if self.module is not None:
            return type(self.module).__qualname__
        target = self.target.func if isinstance(self.target, functools.partial) else self.target
        return str(getattr(target, "__qualname__", type(target).__qualname__)).removeprefix("build.<locals>.")

    @property
    def place(self) -> Place:
        """Where the target is defined, as far as `inspect` can find it."""
        target = self.function_class or (type(self.module) if self.module is not None else self.target)
        try:
            file = inspect.getsourcefile(target)
            line: int | None = inspect.getsourcelines(target)[1]
        except (TypeError, OSError):
            code = getattr(target, "__code__", None)
            file, line = (code.co_filename, code.co_firstlineno) if code else (None, None)
        return Place(file=file, line=line, symbol=self.label)

    @property
    def argument_names(self) -> list[str]:
        if self.function_class is not None:
            return parameter_names(self.function_class.forward, skip=0 if self.sets_up_context else 1)
        written = getattr(self.target, "_init_fn", self.target)  # of an operator made with torch.library.custom_op
        return parameter_names(self.target.forward if isinstance(self.target, nn.Module) else written)

    @property
    def sets_up_context(self) -> bool:
        assert self.function_class is not None
        return self.function_class.setup_context is not torch.autograd.Function.setup_context

    @property
    def groups(self) -> tuple[str, ...]:
        """`param` when it owns parameters of its own."""
        return (PARAM,) if self.module is not None and any(p.is_floating_point() for p in self.module.parameters()) else ()

    def owned_dtypes(self) -> frozenset[torch.dtype]:
        """Dtypes of its own floating parameters, as built."""
        return frozenset(p.dtype for p in self.module.parameters() if p.is_floating_point()) if self.module is not None else frozenset()

    def ready(
        self, dtypes: Mapping[str, torch.dtype] | None, *, exact: torch.dtype | None = None, frozen: str | None = None
    ) -> tuple[Callable[..., Any], dict[str, Tensor]]:
        """A callable for one run and the parameters it owns, by name; a module is copied, so that no run sees another's."""
        if self.function_class is not None:
            function = self.function_class
            return lambda *args, **kwargs: function.apply(*args, **kwargs), {}  # looked up when called: `twin` exchanges it
        if self.module is None:
            return self.target, {}
        module = copy.deepcopy(self.module)
        if dtypes is not None and PARAM in dtypes:
            module = module.to(dtypes[PARAM])
        if exact is not None:
            module = module.to(exact)
        module.zero_grad(set_to_none=True)
        named: dict[str, Tensor] = {n: p for n, p in module.named_parameters() if p.is_floating_point()}
        if frozen in named:
            named[frozen].requires_grad_(False)
        run: Callable[..., Any] = module if isinstance(self.target, nn.Module) else MethodType(self.target.__func__, module)
        return run, named

    def holds_parameters_of(self, module: nn.Module) -> bool:
        """Whether a plain callable holds on to parameters of this very module."""
        own = {id(p) for p in module.parameters()}
        return any(id(t) in own for t in self._held())

    def captured_dtypes(self) -> set[torch.dtype]:
        """Dtypes of the floating tensors a plain callable holds on to (closure, default or partial arguments, globals it names)."""
        return {t.dtype for t in self._held() if t.is_floating_point()}

    def _held(self) -> Iterator[Tensor]:
        return iter(()) if self.function_class is not None or self.module is not None else _captured(self.target, depth=3)


def _captured(target: Any, depth: int) -> Iterator[Tensor]:
    if isinstance(target, Tensor):
        yield target
    elif isinstance(target, nn.Module):
        yield from target.parameters()
        yield from target.buffers()
    elif isinstance(target, (list, tuple)):
        for item in target:
            yield from _captured(item, depth)
    elif isinstance(target, Mapping):
        yield from _captured(list(target.values()), depth)
    elif isinstance(target, functools.partial):
        yield from _captured([target.func, target.args, target.keywords], depth)
    elif inspect.ismethod(target) and not inspect.isclass(target.__self__):
        yield from _captured([target.__func__, list(getattr(target.__self__, "__dict__", {}).values())], depth)
    elif inspect.isfunction(target) and depth:
        names = target.__code__.co_names
        held = list(target.__defaults__ or ())
        with suppress(ValueError):  # a variable that is not bound yet
            held += inspect.getclosurevars(target).nonlocals.values()
        held += [target.__globals__[n] for n in names if n in target.__globals__]
        for item in held:
            if isinstance(item, (Tensor, nn.Module, list, tuple, functools.partial)) or inspect.isfunction(item) or inspect.ismethod(item):
                yield from _captured(item, depth - 1)


_OPTIONS = ("reference", "params", "contract")


@dataclass(frozen=True)
class Target:
    """What to check: the function, its inputs, and its `reference`, `params` and `contract` where given."""

    function: Any
    inputs: Any
    options: Mapping[str, Any]


def load_target(text: str) -> Target:
    """`NAME` is a `build()`: it returns `(callable, inputs)`, or `(callable, inputs, options)`.

    options  `reference`, `params` or `contract`

    Raises  UsageError for a file or a name that does not fit, in one line
    """
    where, colon, name = text.rpartition(":")
    if not colon or not name.replace(".", "").isidentifier():
        where, name = text, "build"
    with in_one_line(where):
        module = module_of(where)
    build = member(module, name, where)
    if not inspect.isfunction(build) or required(build):
        raise UsageError(f"{name} needs inputs", fix=f"a build() in {where} that returns ({name}, inputs)")
    try:
        result = build()
    except Exception as error:
        raise UsageError(f"{where}:{name}() raised {in_words(error)}") from error
    if not isinstance(result, tuple) or len(result) not in (2, 3) or not callable(result[0]):
        wanted = "return (callable, inputs), where inputs is a tuple of arguments"
        raise UsageError(f"{where}:{name}() returned {type(result).__name__}", fix=wanted)
    options = dict(result[2]) if len(result) == 3 else {}
    unknown = sorted(set(options) - set(_OPTIONS))
    if unknown:
        raise UsageError(f"{where}:{name}() returned the option {unknown[0]!r}", fix=f"known options: {', '.join(_OPTIONS)}")
    return Target(result[0], result[1], options)


def triton_interpreted_without_gpu() -> AbstractContextManager[None]:
    """Within it Triton kernels, if any were imported, run in the repaired interpreter where there is no GPU."""
    if torch.cuda.is_available() or "triton" not in sys.modules:
        return nullcontext()
    from ..interpreter import interpreted

    return interpreted()
