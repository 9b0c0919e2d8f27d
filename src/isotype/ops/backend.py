"""How an op runs: in autocast's dtype, which it reads before it switches autocast off, and on one
of its paths.

The paths: Triton kernels on a GPU, C++ ones on a CPU, else plain PyTorch. An op has one derivative:
`torch.func`, forward-mode AD and `create_graph=True` are refused, and its reference, which is plain
PyTorch, has derivatives of any order.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec
from subprocess import SubprocessError
from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Function
from torch.utils._python_dispatch import _disable_current_modes

from ..environment import planned
from ..environment.planned import is_planned, planned_device_type
from ..errors import UsageError
from .cpp import DTYPES, CppKernels

# looked up once: three lookups take 2 us, ten times a layer
_UNSAFE_VIEW_OP = torch.ops.aten._unsafe_view.default


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype autocast would use on `x`'s device, or None where it is off."""
    device_type = x.device.type
    if device_type == "meta":
        # it has no autocast, and raises when it is asked
        if planned.is_planned(x.device):
            return planned.autocast_dtype()
        return None
    # torch.is_autocast_enabled() without an argument answers for CUDA only
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return None


def autocast_off(x: Tensor) -> AbstractContextManager[object]:
    """Switches autocast off on `x`'s device; costs nothing where it is already off."""
    device_type = x.device.type
    if device_type == "meta":
        if planned.is_planned(x.device):
            return planned.autocast_off()
        return nullcontext()
    if not torch.is_autocast_enabled(device_type):
        return nullcontext()
    # a graph knows torch's own; that one takes 5 us, and is entered six times a layer
    if torch.compiler.is_compiling():
        return torch.autocast(device_type, enabled=False)
    return _AutocastOff(device_type)


# Outside graphs and plans, for code that does not ask whether autocast is on (`autocast_dtype`
# still answers as outside): a context manager in C++, which PyTorch's own compiled graphs use too
disable_autocast = torch._C._DisableAutocast


class _AutocastOff:
    """Autocast of one kind of device, switched off within the block; it was on."""

    __slots__ = ("device_type",)

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type

    def __enter__(self) -> None:
        torch.set_autocast_enabled(self.device_type, False)

    def __exit__(self, *_: object) -> None:
        torch.set_autocast_enabled(self.device_type, True)


def arithmetic_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype of an op's arithmetic: fp32, or fp64 when any input is fp64."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def cast_output(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in `dtype`, and `x` itself where that is its own: how a result leaves an autograd
    function's forward.

    In a graph of torch 2.11 an output that comes from a `.to` that changes nothing, or goes into
    one, has no gradient: its share of every input's is zero, without an error.
    """
    return x if x.dtype == dtype else x.to(dtype)


def unsafe_view(x: Tensor, shape: Sequence[int]) -> Tensor:
    """`x` in another shape, on its own memory: how an autograd function's forward shapes its
    result.

    A view made there cannot be written to in place, as models do (OLMo clamps its queries); this is
    what `F.linear` itself returns.
    """
    reshaped: Tensor = _UNSAFE_VIEW_OP(x, list(shape))
    return reshaped


def empty_rows_like(x_BNSD: Tensor) -> Tensor:
    """In the order of x in memory: a projection's [B S N D], seen as [B N S D], needs no copy on
    its way back.
    """
    y_BNSD = torch.empty_like(x_BNSD)
    if y_BNSD.stride(-1) == 1:
        return y_BNSD
    return torch.empty_like(x_BNSD, memory_format=torch.contiguous_format)


def product_dtype(x: Tensor, *operands: Tensor) -> torch.dtype:
    """The dtype a matrix product of these tensors has, decided once: autocast's where it is on
    (fp64 is exempt), else the promoted one.
    """
    dtype = x.dtype
    for operand in operands:
        dtype = torch.promote_types(dtype, operand.dtype)
    autocast = autocast_dtype(x)
    return dtype if autocast is None or dtype == torch.float64 else autocast


# graph: plain PyTorch that is traced
Path = Literal["triton", "cpp", "plain", "graph"]
BACKENDS = ("triton", "cpp", "eager")

_forced: ContextVar[str | None] = ContextVar("isotype_ops_backend", default=None)
# the path that `using` asks for, or None
forced_path = _forced.get
# tensors whose memory a kernel may be given past PyTorch's dispatcher
PLAIN_TENSOR_TYPES = (Tensor, torch.nn.Parameter)


@contextmanager
def force_backend(backend: str) -> Iterator[None]:
    """Within this block every op takes its "triton", "cpp" or "eager" path, whatever the device:
    for tests and comparisons.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r}: expected {', '.join(BACKENDS)}")
    token = _forced.set(backend)
    try:
        yield
    finally:
        _forced.reset(token)


# what the probe found out about each device for good
_unavailable_reasons: dict[torch.device, str] = {}


def kernel_unavailable_reason(device: torch.device) -> str:
    """Why the ops' Triton kernels do not run on this CUDA device, or "". The first question
    compiles and launches a tiny kernel: a Triton that imports may lack a C compiler or a driver.

    A failure is kept if it will come again: a missing package or compiler. Any other, such as a
    lack of memory, is of this moment.
    """
    if device in _unavailable_reasons:
        return _unavailable_reasons[device]
    if find_spec("triton") is None:
        reason = "Triton is not installed"
        is_permanent = True
    elif torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        reason = "a CUDA graph is captured, in which no kernel can be tried out"
        is_permanent = False
    else:
        reason, is_permanent = _run_probe(device)
    if reason:
        _warn_once(f"{device}: {reason}")
    if is_permanent:
        _unavailable_reasons[device] = reason
    return reason


def _run_probe(device: torch.device) -> tuple[str, bool]:
    """(why no kernel runs or "", whether that is so for good)"""
    try:
        from .launch import probe

        # a mode would be asked to run the probe: a fake one computes nothing
        with _disable_current_modes():
            probe(device)
    # whatever fails (the compiler, the driver, a missing header), the kernels do not run
    except Exception as error:
        first_line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        is_permanent = isinstance(error, ImportError | OSError | SubprocessError) or type(
            error
        ).__module__.startswith("triton")
        return (
            f"Triton cannot run a kernel: {type(error).__name__}: {first_line}"[:200],
            is_permanent or "compiler" in first_line,
        )
    return "", True


@cache
def _warn_once(reason: str) -> None:
    print(f"isotype: ops run as plain PyTorch on {reason}", file=sys.stderr, flush=True)


def choose_path(
    kernels: CppKernels, *tensors: Tensor, out_dtype: torch.dtype | None = None
) -> Path:
    """How an op runs on these tensors; `out_dtype` is its result's where it is another. Asked once
    a call, also for its backward.

    fp64 runs as plain PyTorch, since the kernels compute in fp32. In a graph Inductor fuses the
    formula, which is plain PyTorch too.
    """
    if torch.compiler.is_dynamo_compiling():
        return "graph"
    x = tensors[0]
    forced = _forced.get()
    if forced is None and x.is_cpu:
        for t in tensors:
            if not t.is_cpu or t.dtype not in DTYPES:
                return "plain"
        if out_dtype is torch.float64:
            return "plain"
        if kernels.library is not None or kernels.loaded():
            return "cpp"
        return "plain"
    if out_dtype is torch.float64 or any(t.dtype is torch.float64 for t in tensors):
        return "plain"
    if forced == "triton" or (
        forced is None and x.is_cuda and not kernel_unavailable_reason(x.device)
    ):
        return "triton"
    return "cpp" if uses_cpp(kernels, *tensors) else "plain"


def uses_triton(x: Tensor) -> bool:
    """Whether the op's kernels run on `x`: not for fp64, as they compute in fp32, and not in a
    graph, where Inductor fuses the formula.
    """
    if torch.compiler.is_compiling():
        return False
    forced = _forced.get()
    if forced is not None:
        return forced == "triton"
    return x.is_cuda and x.dtype != torch.float64 and not kernel_unavailable_reason(x.device)


def uses_fused_kernel(x: Tensor) -> bool:
    """`uses_triton`, or a plan for a device where it will be so: for ops whose kernel is one
    library op with its own fake results.
    """
    return uses_triton(x) or (
        is_planned(x.device) and planned_device_type(x.device) != "cpu" and x.dtype != torch.float64
    )


@cache
def _device_has_fp32_output(operand: torch.dtype, device_type: str, index: int | None) -> bool:
    """Whether a product of bf16 or fp16 may return its fp32 sums (`out_dtype`): on CUDA, and for
    bf16 from compute capability 8.0 on.
    """
    if device_type != "cuda" or operand not in (torch.bfloat16, torch.float16):
        return False
    if operand == torch.float16 or not torch.cuda.is_available():
        # without a GPU this is asked for a plan, whose device is a recent one
        return True
    return torch.cuda.get_device_capability(index)[0] >= 8


def has_fp32_output(operand: torch.dtype, device: torch.device) -> bool:
    # Dynamo traces a cached function's body, and warns of the cache
    check = (
        _device_has_fp32_output.__wrapped__
        if torch.compiler.is_compiling()
        else _device_has_fp32_output
    )
    return check(operand, planned_device_type(device), device.index)


def can_count_rows(x: Tensor) -> bool:
    """Whether asking how many elements of `x` fulfil a condition costs nothing: on any device but a
    CPU the host would wait for it.
    """
    return planned_device_type(x.device) == "cpu"


def uses_cpp(kernels: CppKernels, *tensors: Tensor) -> bool:
    """Whether the op's C++ kernels run on these tensors: not for fp64, in a graph only some, and
    only where a compiler built them.
    """
    if torch.compiler.is_compiling():
        return (
            kernels.in_graphs
            and kernels.built
            and all(t.device.type == "cpu" and t.dtype in DTYPES for t in tensors)
        )
    x = tensors[0]
    forced = _forced.get()
    if forced not in (None, "cpp"):
        return False
    if not x.is_cpu and (isinstance(x, FakeTensor) or is_planned(x.device)):
        # a plan for another device: its kernels also allocate their results only
        return forced == "cpp" and all(t.dtype in DTYPES for t in tensors)
    for t in tensors:
        if not t.is_cpu or t.dtype not in DTYPES:
            return False
    return kernels.library is not None or kernels.loaded()


def direct_apply(function: type[Function]) -> Callable[..., Any]:
    """`applied` of this function, for calls that are neither under torch.func nor in a graph: no
    call in Python.
    """
    function_class: Any = function
    dispatcher: Any = super(Function, function_class)
    apply: Callable[..., Any] = dispatcher.apply
    return apply


def apply_function(function: type[Function], *args: Any) -> Any:
    """`function.apply(*args)`, for a function without `setup_context`.

    Outside torch.func and compiled graphs `apply` looks into every argument for a tensor that a
    transform has left behind, which PyTorch's dispatcher does again: 150 calls a decoder layer with
    adapters, of 20 arguments 28 us instead of 15.
    """
    if torch.compiler.is_dynamo_compiling() or torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    function_class: Any = function
    dispatcher: Any = super(Function, function_class)
    return dispatcher.apply(*args)


def refuse_second_derivative(op: str) -> None:
    """In a backward whose result has no graph of its own: refuses `create_graph=True`. PyTorch's
    `once_differentiable` refuses it only where a later `backward` meets its node;
    `torch.autograd.grad` takes the missing part for zero.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise UsageError(
            f"{op} has no second derivative (create_graph=True): its backward is fused",
            fix="isotype.restore(model), or the same in plain PyTorch",
        )
