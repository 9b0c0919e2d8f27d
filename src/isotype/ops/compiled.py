"""An op's C++ kernels on a CPU: built when first needed. Where that fails, plain PyTorch runs, and the manifest says so.

A row-wise formula in plain PyTorch reads and writes wide tensors at every step; a fused kernel reads and writes each narrow tensor once.
"""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .build import BuildError, cpu_compiler, library

__all__ = ["CppKernels", "as_rows", "cpu_compiler", "fallbacks", "missing"]

# the kernels' numbers for their dtypes: fp64 has none, and runs as plain PyTorch
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

_fallbacks: dict[str, str] = {}


def fallbacks() -> dict[str, str]:
    """Op -> why it runs as plain PyTorch on this CPU: a line each in the manifest."""
    return dict(_fallbacks)


class CppKernels:
    """The functions of `kernels.cpp` beside the module `file`; each is declared as a string of its arguments' kinds.

    p  a tensor, or None for a null pointer     a  an array or address     d  a dtype     i  an int     f  a float
    Every function takes the number of threads last, which is torch's.

    in_graphs  whether compiled graphs call them too, where a compiler had built them before. The row-wise formulas are left to PyTorch's
               compiler, which fuses them with what stands beside them.
    """

    def __init__(self, file: str, *, in_graphs: bool = False, **functions: str) -> None:
        self.in_graphs, self.built = in_graphs, False
        self.source = Path(file).parent / "kernels.cpp"
        self.op = self.source.parent.name
        self.functions = functions
        # positions of what is no number yet: asked for at every call, 16 times a layer
        self.pointers = {name: [i for i, kind in enumerate(kinds) if kind == "p"] for name, kinds in functions.items()}
        self.dtypes = {name: [i for i, kind in enumerate(kinds) if kind == "d"] for name, kinds in functions.items()}
        self.library: ctypes.CDLL | None = None
        self.calls: dict[str, Any] = {}

    def take(self, *tensors: Tensor) -> bool:
        """Whether the kernels take these tensors: on a CPU, of dtypes that the kernels have, and the kernels are built."""
        if torch.compiler.is_compiling():
            return self.in_graphs and self.built and all(t.device.type == "cpu" and t.dtype in DTYPES for t in tensors)
        return self.take_now(*tensors)

    def take_now(self, *tensors: Tensor) -> bool:
        """`take`, outside compiled graphs."""
        for t in tensors:
            if not t.is_cpu or t.dtype not in DTYPES:
                return False
        return self.library is not None or self.loaded()

    def loaded(self) -> bool:
        if self.library is None and self.op not in _fallbacks:
            try:
                self.library = library(self.source)
            except (BuildError, OSError) as error:
                _fallbacks[self.op] = str(error)
                return False
            kinds = {"p": ctypes.c_void_p, "a": ctypes.c_void_p, "d": ctypes.c_int64, "i": ctypes.c_int64, "f": ctypes.c_float}
            for name, arguments in self.functions.items():
                function = getattr(self.library, name)
                function.argtypes, function.restype = [*(kinds[kind] for kind in arguments), ctypes.c_int], None
                self.calls[name] = function
            self.built = True
        return self.library is not None

    def __call__(self, name: str, *arguments: Any) -> None:
        plain = list(arguments)
        for i in self.pointers[name]:
            if plain[i] is not None:
                plain[i] = plain[i].data_ptr()
        for i in self.dtypes[name]:
            plain[i] = DTYPES[plain[i]]
        self.calls[name](*plain, torch.get_num_threads())


def missing(*ops: str) -> str:
    """Why an op of these has no C++ kernels on this machine, or "". Builds, side by side, what was never built on it: 2 to 5 s."""
    kernels: list[CppKernels] = [import_module(f"{__package__}.{op}.cpp").KERNELS for op in ops]
    with ThreadPoolExecutor() as pool:
        list(pool.map(CppKernels.loaded, kernels))
    return next((_fallbacks[op] for op in ops if op in _fallbacks), "")


def as_rows(*tensors: Tensor) -> list[Tensor]:
    """Tensors of one shape as [rows, columns] whose columns are adjacent: one long row where all are contiguous."""
    if all(t.is_contiguous() for t in tensors):
        return [t.view(1, -1) for t in tensors]
    flat = [t.reshape(-1, t.shape[-1]) for t in tensors]
    return [t if t.stride(-1) == 1 else t.contiguous() for t in flat]
