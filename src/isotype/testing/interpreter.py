"""Runs Triton kernels on a CPU with correct numbers: Triton's interpreter with repairs, for kernels with the usual decorator.

    with interpreted():
        silu_mul_forward[grid](gate, up, out, n, BLOCK=128)      # CPU tensors

It needs neither TRITON_INTERPRET=1 nor a particular order of imports. Launches of ordinary JIT functions are diverted to the interpreter;
afterwards everything is put back, and kernels compile as ever. Triton 3.9's own interpreter truncates fp32 to bf16 and adds, multiplies and
sums bf16 as raw bits.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import triton
import triton.language as tl
from triton.runtime import autotuner, jit
from triton.runtime import interpreter as stock

from ..errors import UsageError
from .interpreter_repairs import SUPPORTED, repairs, stubs, version_supported

_active = threading.local()
_MISSING = object()


@contextmanager
def interpreted() -> Iterator[None]:
    """Within this block Triton kernels run on the CPU, in the repaired interpreter; may be nested.

    Raises  UsageError for a Triton outside the versions whose interpreter is known
    """
    if getattr(_active, "depth", 0):
        yield
        return
    if not version_supported():
        raise UsageError(f"the interpreter's repair knows Triton {SUPPORTED}, not {triton.__version__}")
    with ExitStack() as undo:
        for owner, attribute, replacement in [*repairs(), *_diversions()]:
            _set(undo, owner, attribute, replacement)
        for stub, replacement in stubs():
            before = (stub.__code__, stub.__defaults__)
            stub.__code__, stub.__defaults__ = replacement.__code__, replacement.__defaults__
            undo.callback(_set_code, stub, *before)
        _active.depth = 1
        undo.callback(setattr, _active, "depth", 0)
        yield


def _set(undo: ExitStack, owner: Any, attribute: str, value: Any) -> None:
    before = vars(owner).get(attribute, _MISSING)
    setattr(owner, attribute, value)
    undo.callback(delattr, owner, attribute) if before is _MISSING else undo.callback(setattr, owner, attribute, before)


def _set_code(stub: Any, code: Any, defaults: Any) -> None:
    stub.__code__, stub.__defaults__ = code, defaults


def _diversions() -> Iterator[tuple[Any, str, Any]]:
    call = jit.JITFunction.__call__

    def run(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Any:
        if warmup:
            return None
        return _run(self.fn, args, grid, kwargs, getattr(self, "pre_run_hooks", []))

    def interpreted_run(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Any:
        return None if warmup else _run(self.fn, args, grid, kwargs, self.pre_run_hooks)

    def device_function(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not getattr(_active, "launches", 0):
            return call(self, *args, **kwargs)
        return _rewritten(self.fn)(*args, **kwargs)

    def first_configuration(self: Any, *args: Any, config: Any, **meta: Any) -> list[float]:
        """Nothing is measured on a CPU: all configurations tie, and the first is taken."""
        return [0.0, 0.0, 0.0]

    yield jit.JITFunction, "run", run
    yield jit.JITFunction, "__call__", device_function
    yield stock.InterpretedFunction, "run", interpreted_run
    yield stock.InterpretedFunction, "__call__", device_function
    yield autotuner.Autotuner, "_bench", first_configuration


def _rewritten(function: Any) -> Any:
    known = stock.InterpretedFunction.rewritten_fn
    if function not in known:
        known[function] = stock.FunctionRewriter(function).rewrite_ast()
    return known[function]


def _bound(member: Any) -> Any:
    return lambda self, *args, **kwargs: member(self, *args, **kwargs)


def _run(function: Any, args: tuple[Any, ...], grid: Any, kwargs: dict[str, Any], hooks: list[Any]) -> None:
    """One launch. The language is patched once for all device functions that the kernel calls, and always restored afterwards."""
    names = list(stock.inspect.signature(function).parameters)
    interpreting = triton.knobs.runtime.interpret
    _active.launches = getattr(_active, "launches", 0) + 1
    triton.knobs.runtime.interpret = True
    with ExitStack() as undo:
        undo.callback(setattr, triton.knobs.runtime, "interpret", interpreting)
        undo.callback(setattr, _active, "launches", _active.launches - 1)
        for owner, attribute, replacement in _language():
            _set(undo, owner, attribute, replacement)
        # the executor patches once more for every launch, by inspection: 10 ms, and only the modules that the kernel's file names
        _set(undo, stock, "_patch_lang", lambda _: stock._LangPatchScope())
        stock.GridExecutor(_rewritten(function), names, grid, hooks)(*args, **kwargs)


@functools.cache
def _language() -> list[tuple[Any, str, Any]]:
    """What the interpreter puts in place of the language: found once, since finding it takes ten times longer than a small kernel."""
    scope = stock._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    try:
        changed = [(owner, attribute, vars(owner)[attribute]) for owner, attribute, _ in scope._changes]
    finally:
        scope.restore()
    # x.sum(1): a JIT function stored on the class is not bound to the instance
    members = [(name, member) for name, member in vars(tl.tensor).items() if isinstance(member, jit.JITFunction)]
    # Triton before 3.9 asks NumPy for the int of an array of one element, which NumPy 2.5 refuses
    index = (tl.tensor, "__index__", lambda self: int(self.handle.data.reshape(())))
    return [*changed, index, *((tl.tensor, name, _bound(member)) for name, member in members)]
