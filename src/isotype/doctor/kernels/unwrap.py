"""A kernel out of its decorators: the `@triton.jit` function, autotuning configurations, heuristics."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...errors import UsageError

OPTION_NAMES = ("num_warps", "num_stages", "num_ctas", "maxnreg")


@dataclass(frozen=True)
class Configuration:
    """What one `triton.Config` fixes."""

    constexprs: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Unwrapped:
    function: Any
    configs: list[Configuration]
    heuristics: dict[str, Any]

    def with_defaults(self, constexprs: Mapping[str, Any]) -> dict[str, Any]:
        """The given constexprs, and the defaults of `tl.constexpr` parameters that were left out."""
        defaults = {p.name: p.default for p in self.function.params if p.is_constexpr and p.has_default}
        values = {**defaults, **self.configs[0].constexprs, **constexprs}
        for name, decide in self.heuristics.items():
            if name not in constexprs:
                try:
                    values[name] = decide(values)
                except Exception:
                    continue  # a heuristic that looks at tensors: without a launch there is nothing to look at
        return values


def is_kernel(value: Any) -> bool:
    """Whether it is a `@triton.jit` function, also inside other decorators."""
    from triton.runtime.jit import JITFunction, KernelInterface

    while isinstance(value, KernelInterface) and not isinstance(value, JITFunction):
        value = getattr(value, "fn", None)
    return isinstance(value, JITFunction)


def configuration(config: Any) -> Configuration:
    options = {n: getattr(config, n, None) for n in OPTION_NAMES}
    return Configuration(dict(config.kwargs), {n: v for n, v in options.items() if v is not None})


def unwrap(kernel: Any) -> Unwrapped:
    """Raises  UsageError when it is no kernel, or Triton's interpreter has taken its place."""
    from triton.runtime.jit import JITFunction, KernelInterface

    configs: list[Configuration] = []
    heuristics: dict[str, Any] = {}
    one = kernel
    while isinstance(one, KernelInterface) and not isinstance(one, JITFunction):
        configs = configs or [configuration(c) for c in getattr(one, "configs", [])]
        heuristics |= getattr(one, "values", {})
        one = getattr(one, "fn", None)
    if type(one).__name__ == "InterpretedFunction":
        raise UsageError(f"{getattr(one, '__name__', kernel)} runs in Triton's interpreter: unset TRITON_INTERPRET to compile it")
    if not isinstance(one, JITFunction):
        raise UsageError(f"{getattr(kernel, '__name__', kernel)!r} is no @triton.jit kernel")
    return Unwrapped(one, configs or [Configuration()], heuristics)


def place_of(function: Any) -> tuple[str, int]:
    """The file of a kernel and the line of its `def`, below the decorators."""
    source, first = inspect.getsourcelines(function.fn)
    below = next((i for i, text in enumerate(source) if text.lstrip().startswith("def ")), 0)
    return function.fn.__code__.co_filename, first + below
