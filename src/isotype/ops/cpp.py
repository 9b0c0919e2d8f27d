"""Calls an op's C++ kernels on a CPU. If the build of the kernels fails, plain PyTorch runs
instead, and the manifest (the list of what `optimize` replaced) says so.

A formula such as a norm consists of several operations. In plain PyTorch, each operation reads and
writes whole fp32 tensors. A fused kernel reads and writes each bf16 tensor only once.
"""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import trust
from .builds import cpu_compiler, library_stem, load_or_build_library
from .kernel_folder import BuildError

# the kernels' numbers of dtypes. fp64 has no number, since it runs in plain PyTorch
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

# op -> the reason why its kernels do not run: they were not built, or they are wrong here
_fallback_reasons: dict[str, str] = {}
_wrong_kernels: dict[str, str] = {}
# op -> its kernels
_kernels: dict[str, CppKernels] = {}


def fallback_reasons() -> dict[str, str]:
    """Returns the ops that run in plain PyTorch on this CPU, each with the reason. The manifest
    (the list of what `optimize` replaced) shows each reason.
    """
    return dict(_fallback_reasons)


def wrong_kernels() -> dict[str, str]:
    """Returns the ops whose kernels give wrong results on this CPU. Each op is mapped to a text
    that describes its error.
    """
    return dict(_wrong_kernels)


class CppKernels:
    """Calls the functions of the C++ source that is in the same folder as the module `file`. Each
    function is declared as a string with one letter per argument:

    p  a tensor, or None for a null pointer
    a  an array or address
    d  a dtype
    i  an int
    f  a float

    The last argument of every C++ function is the number of threads that torch uses.

    in_graphs  whether compiled graphs call the kernels too, if these are already built. It is False
               for row-wise formulas such as norms, since PyTorch's compiler fuses them with the
               operations before and after them.
    """

    def __init__(
        self, file: str, *, source: str = "cpu.cpp", in_graphs: bool = False, **functions: str
    ) -> None:
        self.in_graphs = in_graphs
        self.is_built = False
        self.source = Path(file).with_name(source)
        self.op = self.source.parent.name
        _kernels[self.op] = self
        self.functions = functions
        # positions of the arguments that a call must convert to numbers. They are not computed for
        # each call, since a layer makes 16 calls
        self.pointers = {
            name: [i for i, kind in enumerate(kinds) if kind == "p"]
            for name, kinds in functions.items()
        }
        self.dtypes = {
            name: [i for i, kind in enumerate(kinds) if kind == "d"]
            for name, kinds in functions.items()
        }
        self.library: ctypes.CDLL | None = None
        self.calls: dict[str, Any] = {}
        self.is_being_checked = False
        self._has_bf16_instructions: bool | None = None

    def has_bf16_instructions(self) -> bool:
        """Whether this processor has instructions for bf16. The library's function `native` detects
        this. Returns False if no library can be built.
        """
        if not self.load():
            return False
        if self._has_bf16_instructions is None:
            # not a tensor, since a tensor has no data while memory is planned
            answer = ctypes.c_int64()
            self("native", ctypes.addressof(answer))
            self._has_bf16_instructions = bool(answer.value)
        return self._has_bf16_instructions

    def load(self) -> bool:
        """Builds the library or loads it, and checks its kernels if they were not checked on this
        machine. Returns whether the kernels can be used.
        """
        if self.library is not None or self.is_being_checked:
            return True
        if self.op in _fallback_reasons:
            return False
        try:
            library = load_or_build_library(self.source)
        except (BuildError, OSError) as error:
            _fallback_reasons[self.op] = str(error)
            return False
        self._declare_functions(library)
        self.is_being_checked = True
        try:
            reason = trust.find_disagreement(
                self.op,
                [library_stem(self.source, cpu_compiler() or "")],
                torch.device("cpu"),
                list(DTYPES),
            )
        finally:
            self.is_being_checked = False
        if reason:
            _wrong_kernels[self.op] = reason
            _fallback_reasons[self.op] = reason
            trust.warn_of_wrong_kernel(self.op, "cpu", reason)
            return False
        self.library = library
        self.is_built = True
        return True

    def _declare_functions(self, library: ctypes.CDLL) -> None:
        kinds = {
            "p": ctypes.c_void_p,
            "a": ctypes.c_void_p,
            "d": ctypes.c_int64,
            "i": ctypes.c_int64,
            "f": ctypes.c_float,
        }
        for name, arguments in self.functions.items():
            function = getattr(library, name)
            function.argtypes = [*(kinds[kind] for kind in arguments), ctypes.c_int]
            function.restype = None
            self.calls[name] = function

    def address(self, name: str) -> int:
        """Returns the address of a function, for kernels of another op that call it."""
        address = ctypes.cast(self.calls[name], ctypes.c_void_p).value
        assert address is not None
        return address

    def __call__(self, name: str, *arguments: Any) -> None:
        values = list(arguments)
        for i in self.pointers[name]:
            if values[i] is not None:
                values[i] = values[i].data_ptr()
        for i in self.dtypes[name]:
            values[i] = DTYPES[values[i]]
        self.calls[name](*values, torch.get_num_threads())


def missing_kernels_reason(*ops: str) -> str:
    """Returns the reason why one of these ops has no C++ kernels on this machine, or "" if all have
    them. Libraries that do not exist yet are built in parallel, which takes 2 to 5 s. Kernels with
    wrong results are not among these reasons: only the ops of these kernels then run in plain
    PyTorch.
    """
    waiting = [
        _kernels[op].source
        for op in ops
        if _kernels[op].library is None and op not in _fallback_reasons
    ]
    with ThreadPoolExecutor() as pool:
        for build in [pool.submit(load_or_build_library, source) for source in waiting]:
            with suppress(BuildError, OSError):  # `load` meets the error again
                build.result()
    # one after the other, because the check of an op may use the kernels of another op
    for op in ops:
        _kernels[op].load()
    reasons = _fallback_reasons.items()
    return next((reason for op, reason in reasons if op in ops and op not in _wrong_kernels), "")


def view_as_rows(*tensors: Tensor) -> list[Tensor]:
    """Returns views [rows, columns] of tensors that have the same shape. In each view, the values
    of a row are adjacent in memory. If all tensors are contiguous, each view is a single long row.
    """
    are_contiguous = True
    for t in tensors:
        are_contiguous = are_contiguous and t.is_contiguous()
    views: list[Tensor] = []
    for t in tensors:
        rows = t.view(1, -1) if are_contiguous else t.reshape(-1, t.shape[-1])
        views.append(rows if rows.stride(-1) == 1 else rows.contiguous())
    return views
