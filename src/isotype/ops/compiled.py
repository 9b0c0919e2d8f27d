"""Formulas that a C++ compiler fuses on a CPU: compiled when first needed, plain PyTorch where that fails, and never silent about which.

A row-wise formula in plain PyTorch reads and writes memory at every step, wide; compiled, it reads and writes each tensor once, narrow.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextvars import ContextVar
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

# Below this many elements a call's own cost is larger than what fusing saves, and compiling (seconds) would not pay: decoding, tests.
SMALLEST = 2**17

_fallbacks: dict[str, str] = {}

# Runs a formula in place of the compiler: the memory plan's, which counts a formula's results and not its steps.
instead: ContextVar[Callable[..., Any] | None] = ContextVar("isotype_ops_instead_of_the_compiler", default=None)


@cache
def cpu_compiler() -> str | None:
    """The C++ compiler that torch.compile would call, or None."""
    return shutil.which(os.environ.get("CXX", "")) or next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None)


def fallbacks() -> dict[str, str]:
    """Formula -> why it runs as plain PyTorch on this CPU: a line each in the manifest."""
    return dict(_fallbacks)


class Fused:
    """`Fused(formula)(*tensors, **constants)`: the formula, compiled once for each set of dtypes, ranks and constants."""

    def __init__(self, formula: Callable[..., Any]) -> None:
        self.formula, self.name = formula, f"{formula.__module__.split('.')[-2]}.{formula.__name__}"
        self.made: dict[Any, Callable[..., Any]] = {}

    def __call__(self, *tensors: Tensor | None, **constants: Any) -> Any:
        first = next(t for t in tensors if t is not None)
        planned = instead.get()
        if planned is not None and first.numel() >= SMALLEST and first.dtype != torch.float64:
            return planned(self.formula, *tensors, **constants)
        # inside someone else's graph the formula fuses with its neighbours; compiled fp64 has nothing to win
        if torch.compiler.is_compiling() or first.device.type != "cpu" or first.numel() < SMALLEST or first.dtype == torch.float64:
            return self.formula(*tensors, **constants)
        if self.name in _fallbacks or not self.usable():
            return self.formula(*tensors, **constants)
        key = (
            tuple(None if t is None else (t.dtype, t.dim(), t.is_contiguous()) for t in tensors),
            tuple(sorted(constants.items(), key=str)),
        )
        if key not in self.made:
            self.made[key] = self.compiled(constants)
        try:
            # detached, so that one compilation serves leaves and activations
            return self.made[key](*(None if t is None else t.detach() for t in tensors))
        except Exception as error:
            # whatever the compiler raised, the formula is right without it
            _fallbacks[self.name] = f"torch.compile failed: {type(error).__name__}: {str(error).splitlines()[0][:120]}"
            return self.formula(*tensors, **constants)

    def usable(self) -> bool:
        if cpu_compiler() is None:
            _fallbacks[self.name] = "no C++ compiler (g++ or clang++) was found"
            return False
        return True

    def compiled(self, constants: dict[str, Any]) -> Callable[..., Any]:
        plain = self.formula
        assert isinstance(plain, FunctionType)
        # a copy of the code object: Dynamo counts recompilations by code object, and each key is compiled on purpose
        copy = FunctionType(plain.__code__.replace(), plain.__globals__, plain.__name__, plain.__defaults__, plain.__closure__)
        copy.__kwdefaults__ = {**(plain.__kwdefaults__ or {}), **constants}
        return torch.compile(copy, fullgraph=True, dynamic=True)
