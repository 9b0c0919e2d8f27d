"""Runs one accused function: in fp32 as a control, then with the dtypes that the finding supposes; what differs is due to the dtypes."""

from __future__ import annotations

import ast
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy  # noqa: F401  (loaded before the process is confined: torch asks for it later)
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ....dtypes import to_torch
from ..dataflow.functions import FunctionClass, function_classes
from ..files import read
from ..source import Function, SourceFile, last_name
from .cut import Cut
from .inputs import Arguments, Configuration, Scheme, number, schemes, tensors_in
from .job import LOSSES, Job, Verdict

_OF_DTYPES = re.compile(r"dtype|scalar type|BFloat16|Half|\bFloat\b|same type", re.IGNORECASE)
_FACTORIES = ("zeros", "zeros_like", "empty", "empty_like", "full", "full_like", "new_zeros", "new_empty", "new_full")


class NotRun(Exception):
    """Why the function could not be executed."""


@dataclass
class _Run:
    """Outputs and gradients of one run, or what it raised; executed: whether the accused line was."""

    results: list[Tensor]
    error: BaseException | None = None
    executed: bool = False


def verdict_on(job: Job) -> Verdict:
    """Never raises: what cannot be executed is `not run`."""
    torch.set_num_threads(1)
    sys.dont_write_bytecode = True
    try:
        with _everything_on_the_cpu():
            return _verdict(job)
    except NotRun as why:
        return Verdict("not run", str(why))
    except Exception as error:  # strangers' code may do anything
        return Verdict("not run", f"{type(error).__name__}: {error}")


def _verdict(job: Job) -> Verdict:
    file = SourceFile(job.file, read(Path(job.file)))
    target = _Target(file, job)
    held: Verdict | None = None
    why = "no shapes were found with which it runs in fp32"
    for scheme in schemes(long=job.code in LOSSES):
        try:
            call = target.callable(scheme)
        except Exception as error:  # a constructor that wants other arguments
            why = f"{type(error).__name__}: {error}"
            continue
        control = call(torch.float32)
        if control.error is not None:
            why = f"in fp32 {_short(control.error)}"
            continue
        verdict = _losses(job, scheme, call, control) if job.code in LOSSES else _refusals(job, target, call)
        if verdict.outcome in ("failed", "lost"):
            return verdict
        held = verdict if verdict.outcome == "held" else held
    return held or Verdict("not run", why)


def _refusals(job: Job, target: _Target, call: Callable[..., _Run]) -> Verdict:
    run = call(None)
    if run.error is None:
        text = f"executed with {job.scenario} on a CPU: nothing failed"
        return Verdict("held", text) if run.executed else Verdict("not run", "the accused line was not executed")
    line = target.line_of(run.error)
    if line is None or not _OF_DTYPES.search(str(run.error)):
        return Verdict("not run", f"with {job.scenario} {_short(run.error)}")
    return Verdict("failed", f"executed with {job.scenario} on a CPU: {_short(run.error)} (line {line}); in fp32 it runs")


def _losses(job: Job, scheme: Scheme, call: Callable[..., _Run], control: _Run) -> Verdict:
    run = call(None)
    if run.error is not None or len(run.results) != len(control.results):
        return Verdict("not run", f"with {job.scenario} {_short(run.error) if run.error else 'it gives other results'}")
    if not run.executed:
        return Verdict("not run", "the accused line was not executed")
    wider = _with_a_wide_buffer(job, scheme) if job.code == "LT004" else None
    if job.code == "LT004" and wider is None:
        return Verdict("not run", "what is added to is not allocated on the accused line")
    for i, (got, truth) in enumerate(zip(run.results, control.results)):
        if got.shape != truth.shape or not truth.numel():
            continue
        error, excused = _error(got, truth), _error(truth.to(got.dtype), truth)
        if wider is not None:
            better = _error(wider.results[i], truth) if wider.error is None and len(wider.results) > i else error
            if error > 2 * better and error > 3 * excused:
                text = f"a result is off by {error:.2g} of its norm, and by {better:.2g} where the buffer is fp32"
                return Verdict("lost", f"executed with {job.scenario} on a CPU: {text}")
        elif error > 8 * max(excused, 1e-4) and error > 0.02:
            text = f"a result is off by {error:.2g} of its norm, where rounding it once costs {excused:.2g}"
            return Verdict("lost", f"executed with {job.scenario} on a CPU: {text}")
    return Verdict("held", f"executed with {job.scenario} on a CPU: no result is off by more than its rounding explains")


def _with_a_wide_buffer(job: Job, scheme: Scheme) -> _Run | None:
    file = SourceFile(job.file, read(Path(job.file)))
    widening = _Widening(job.line)
    widening.visit(file.tree)
    return _Target(file, job).callable(scheme)(None) if widening.made else None


def _error(got: Tensor, truth: Tensor) -> float:
    norm = truth.double().norm()
    return float((got.double() - truth.double()).norm() / norm) if norm > 0 else 0.0


def _short(error: BaseException | None) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:150] if text else ''}"


class _Target:
    """What to call for an accused line: an autograd.Function, a function, or a method of a module that is built."""

    def __init__(self, file: SourceFile, job: Job) -> None:
        self.file, self.line, self.scenario = file, job.line, job.scenario
        around = [n for n in ast.walk(file.tree) if isinstance(n, (Function, ast.ClassDef)) and n.lineno <= job.line <= (n.end_lineno or 0)]
        around.sort(key=lambda n: n.lineno)
        if not around:
            raise NotRun("it stands in no function")
        self.top = around[0]
        self.method = around[1] if len(around) > 1 and isinstance(around[1], Function) and isinstance(around[0], ast.ClassDef) else None
        self.pair: FunctionClass | None = next((f for f in function_classes(file) if f.cls is self.top), None)
        self.value = Cut(file).get(self.top.name)
        if isinstance(self.top, ast.ClassDef) and self.pair is None and (self.method is None or self.method.name == "__init__"):
            raise NotRun("it stands in a class, and in no method that can be called")

    def callable(self, scheme: Scheme) -> Callable[..., _Run]:
        """A function of a dtype (None: those of the scenario) that runs it once."""
        if self.pair is not None:
            assert self.pair.forward is not None
            skip = 1 if self.pair.setup_context is None else 0
            given = Arguments(self.file, self.pair.forward, skip, self.scenario, scheme)
            return lambda dtype: self._run(self.value.apply, given, dtype, None)
        if isinstance(self.top, ast.ClassDef):
            assert self.method is not None
            static = any(getattr(d, "id", "") == "staticmethod" for d in self.method.decorator_list)
            given = Arguments(self.file, self.method, 0 if static else 1, self.scenario, scheme)
            build = _builder(self.value, self.top)
            build()
            name = self.method.name
            return lambda dtype: self._run(None, given, dtype, (build, name))
        given = Arguments(self.file, self.top, 0, self.scenario, scheme)
        return lambda dtype: self._run(self.value, given, dtype, None)

    def _run(self, function: Any, given: Arguments, dtype: torch.dtype | None, method: Any) -> _Run:
        torch.manual_seed(0)
        args, kwargs = given.make(dtype)
        owned: list[Tensor] = []
        if method is not None:
            owner = method[0]()
            if isinstance(owner, nn.Module):
                owner.to(dtype or to_torch(self.scenario.weights if self.scenario.autocast else self.scenario.inputs))
                owned = list(owner.parameters())
            function = owner if isinstance(owner, nn.Module) and method[1] == "forward" else getattr(owner, method[1])
        autocast = to_torch(self.scenario.autocast) if dtype is None and self.scenario.autocast else None
        run = _Run([])
        with _noting(run, self.file.path, self.line):
            try:
                with torch.autocast("cpu", dtype=autocast) if autocast is not None else nullcontext():
                    outputs = tensors_in(function(*args, **kwargs))
                run.results = [t.detach().clone() for t in outputs]
                differentiable = [t for t in outputs if t.requires_grad]
                if differentiable:
                    generator = torch.Generator().manual_seed(7)
                    grads = [torch.randn(t.shape, generator=generator).to(torch.bfloat16).to(t.dtype) for t in differentiable]
                    torch.autograd.backward(differentiable, grads)
                    leaves = [v for v in (*args, *kwargs.values(), *owned) if isinstance(v, Tensor)]
                    run.results += [t.grad for t in leaves if t.grad is not None]
            except Exception as error:  # what is being looked for
                run.error = error
        return run

    def line_of(self, error: BaseException) -> int | None:
        """The last line of the accused function or class in the traceback."""
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == self.file.path]
        inside = [n for n in lines if n is not None and self.top.lineno <= n <= (self.top.end_lineno or 0)]
        return inside[-1] if inside else None


def _builder(cls: Any, node: ast.ClassDef) -> Callable[[], Any]:
    """Builds an instance from guessed numbers, the same each time."""
    init = next((m for m in node.body if isinstance(m, ast.FunctionDef) and m.name == "__init__"), None)
    positional = init.args.args[1:] if init is not None else []
    required = positional[: len(positional) - len(init.args.defaults)] if init is not None else []
    wanted = [a.arg for a in required] + [a.arg for a, d in zip(init.args.kwonlyargs, init.args.kw_defaults) if d is None] if init else []

    def build() -> Any:
        torch.manual_seed(0)
        values = {n: Configuration() if re.search(r"conf|args|params|opt", n) else number(n) for n in wanted}
        return cls(**values)

    return build


# -- what surrounds a run -------------------------------------------------------------------------------------------------


@contextmanager
def _noting(run: _Run, path: str, line: int) -> Iterator[None]:
    """Notes whether the accused line is executed."""

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename != path:
            return None
        if frame.f_lineno == line:
            run.executed = True
        return trace

    former = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(former)


class _Widening(ast.NodeTransformer):
    """Gives the buffers that are allocated on one line `dtype=torch.float32`: what the fix would make of them."""

    def __init__(self, line: int) -> None:
        self.line, self.made = line, 0

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        if node.lineno == self.line and last_name(node.func) in _FACTORIES:
            wide = ast.Attribute(ast.Name("torch", ast.Load()), "float32", ast.Load())
            node.keywords = [k for k in node.keywords if k.arg != "dtype"] + [ast.keyword("dtype", wide)]
            ast.fix_missing_locations(ast.copy_location(node, node))
            self.made += 1
        return node


class _OnTheCpu(TorchFunctionMode):
    """Every device that is asked for is the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs and kwargs["device"] is not None and "meta" not in str(kwargs["device"]):
            kwargs["device"] = "cpu"
        if getattr(func, "__name__", "") == "cuda":
            return args[0]
        return func(*args, **kwargs)


@contextmanager
def _everything_on_the_cpu() -> Iterator[None]:
    """Autocast regions and decorators of autograd.Functions mean the CPU, whatever device they name: those of a GPU have no effect here."""
    amp = torch.amp.autocast_mode
    region, forward, backward = amp.autocast, torch.amp.custom_fwd, torch.amp.custom_bwd
    enabled, dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
    if not hasattr(region, "cut_by_isotype"):

        class OnTheCpu(region):  # type: ignore[misc, valid-type]  # whichever class torch has there now
            cut_by_isotype = True

            def __init__(self, device_type: Any = "cpu", dtype: Any = None, enabled: bool = True, cache_enabled: Any = None) -> None:
                if isinstance(device_type, bool):  # torch.cuda.amp.autocast(False)
                    device_type, enabled = "cpu", device_type
                super().__init__("cpu", dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)

        def for_the_cpu(decorator: Any) -> Any:
            def decorate(function: Any = None, *, device_type: str = "cpu", **options: Any) -> Any:
                if function is None:
                    return lambda f: decorator(f, device_type="cpu", **options)
                return decorator(function, device_type="cpu", **options)

            return decorate

        for module in (torch, torch.amp, amp, torch.cuda.amp, torch.cuda.amp.autocast_mode):
            for name, value in (("autocast", OnTheCpu), ("custom_fwd", for_the_cpu(forward)), ("custom_bwd", for_the_cpu(backward))):
                if hasattr(module, name):
                    setattr(module, name, value)

        def enabled_on_the_cpu(device_type: str | None = None) -> bool:
            return enabled("cpu")

        torch.is_autocast_enabled = enabled_on_the_cpu

        def dtype_on_the_cpu(device_type: str | None = None) -> torch.dtype:
            return dtype("cpu")

        torch.get_autocast_dtype = dtype_on_the_cpu
        torch.get_autocast_gpu_dtype = lambda: dtype("cpu")
    with _OnTheCpu():
        yield
