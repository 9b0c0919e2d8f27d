"""Decides in which dtype an op computes and which implementation runs.

An op reads autocast's dtype and then switches autocast off. It runs Triton kernels on a GPU, C++
kernels on a CPU, and plain PyTorch in all other cases. An op supports first derivatives only. It
rejects `torch.func`, forward-mode AD and `create_graph=True`. The op's reference, in plain PyTorch,
has derivatives of any order.
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

from ..environment import planned_device
from ..environment.planned_device import is_planned, target_device_type
from ..errors import UsageError
from . import trust
from .cpp import DTYPES, CppKernels

# looked up once: the three attribute lookups take 2 us, and a layer would need them ten times
_UNSAFE_VIEW_OP = torch.ops.aten._unsafe_view.default


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Returns the dtype that autocast uses on `x`'s device, or None if autocast is off there."""
    device_type = x.device.type
    if device_type == "meta":
        # PyTorch raises an error for questions about autocast on the meta device
        if planned_device.is_planned(x.device):
            return planned_device.autocast_dtype()
        return None
    # torch.is_autocast_enabled() without an argument concerns CUDA only
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return None


def autocast_off(x: Tensor) -> AbstractContextManager[object]:
    """Switches autocast off on `x`'s device. This costs nothing if autocast is already off."""
    device_type = x.device.type
    if device_type == "meta":
        if planned_device.is_planned(x.device):
            return planned_device.autocast_off()
        return nullcontext()
    if not torch.is_autocast_enabled(device_type):
        return nullcontext()
    # Compiled graphs can trace torch.autocast. Elsewhere it is avoided, since it takes 5 us and a
    # layer enters it six times
    if torch.compiler.is_compiling():
        return torch.autocast(device_type, enabled=False)
    return _AutocastOff(device_type)


# Does the same as `autocast_off` in less time. It is a context manager in C++, which PyTorch's
# compiled graphs use too. `autocast_dtype` does not notice it and returns the same value inside the
# block as outside. So it is only for code that does not read whether autocast is on, and not for
# compiled graphs and memory plans
fast_autocast_off = torch._C._DisableAutocast


class _AutocastOff:
    """Switches autocast of one device type off within the block, and on again after it."""

    __slots__ = ("device_type",)

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type

    def __enter__(self) -> None:
        torch.set_autocast_enabled(self.device_type, False)

    def __exit__(self, *_: object) -> None:
        torch.set_autocast_enabled(self.device_type, True)


def arithmetic_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """Returns the dtype of an op's arithmetic. This is fp32, or fp64 if any input is fp64."""
    if torch.float64 in dtypes:
        return torch.float64
    return torch.float32


def cast_output(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns `x` in `dtype`, or `x` itself if it already has that dtype. An autograd function uses
    it to cast the result of its forward.

    `x.to(dtype)` must not be called if `x` already has this dtype. In a graph that torch 2.11
    compiled, `x` and the result would then get a gradient of zero, and no error would be raised.
    """
    if x.dtype == dtype:
        return x
    return x.to(dtype)


def unsafe_view(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Returns `x` in another shape, in the same memory. The forward of an autograd function uses
    this function to reshape its result.

    If the forward of an autograd function returns an ordinary view, PyTorch raises an error when a
    model changes it in place. Some models do this: OLMo clamps its queries in place. `F.linear`
    also returns a view that can be changed in place.
    """
    reshaped: Tensor = _UNSAFE_VIEW_OP(x, list(shape))
    return reshaped


def empty_rows_like(x_BNSD: Tensor) -> Tensor:
    """Returns an empty tensor whose dimensions have the same order in memory as those of x. For
    example, x may have the shape [B N S D] and be a view of a projection's output, which has the
    shape [B S N D]. The result can then be the input of the output projection without a copy.
    """
    y_BNSD = torch.empty_like(x_BNSD)
    if y_BNSD.stride(-1) == 1:
        return y_BNSD
    return torch.empty_like(x_BNSD, memory_format=torch.contiguous_format)


def product_dtype(x: Tensor, *operands: Tensor) -> torch.dtype:
    """Returns the dtype of a matrix product of these tensors. This is autocast's dtype if autocast
    is on and none of the tensors is fp64. Otherwise it is the dtype to which PyTorch promotes the
    dtypes of the tensors.
    """
    dtype = x.dtype
    for operand in operands:
        dtype = torch.promote_types(dtype, operand.dtype)
    cast_dtype = autocast_dtype(x)
    if cast_dtype is None or dtype == torch.float64:
        return dtype
    return cast_dtype


# "graph" is plain PyTorch that is traced
Implementation = Literal["triton", "cpp", "plain", "graph"]
BACKENDS = ("triton", "cpp", "eager")  # values that `force_backend` accepts

_forced_backend: ContextVar[str | None] = ContextVar("isotype_ops_backend", default=None)
# the backend of `force_backend`, or None
forced_backend = _forced_backend.get
# types of the tensors whose memory is passed to a kernel directly, without PyTorch's dispatcher
PLAIN_TENSOR_TYPES = (Tensor, torch.nn.Parameter)


@contextmanager
def force_backend(backend: str) -> Iterator[None]:
    """Within this block every op uses the given implementation ("triton", "cpp" or "eager") on any
    device. Tests and comparisons use this function.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r}: expected {', '.join(BACKENDS)}")
    token = _forced_backend.set(backend)
    try:
        yield
    finally:
        _forced_backend.reset(token)


# the permanent results of `kernel_unavailable_reason`
_unavailable_reasons: dict[torch.device, str] = {}


def kernel_unavailable_reason(device: torch.device) -> str:
    """Returns the reason why the Triton kernels of ops do not run on this CUDA device, or "" if
    they run.

    The first call compiles and launches a tiny kernel, since Triton may be installed without a C
    compiler or a driver. The function caches the reason if it is permanent, such as a missing
    package or compiler. Any other reason, such as a lack of memory, is not cached, because it may
    not apply to the next call.
    """
    if device in _unavailable_reasons:
        return _unavailable_reasons[device]
    if find_spec("triton") is None:
        reason = "Triton is not installed"
        is_permanent = True
    elif _is_capturing_graph():
        reason = "a CUDA graph is captured, in which no kernel can be tried out"
        is_permanent = False
    else:
        reason, is_permanent = _run_probe(device)
    if reason:
        _warn_once(f"{device}: {reason}")
    if is_permanent:
        _unavailable_reasons[device] = reason
    return reason


def _is_capturing_graph() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _run_probe(device: torch.device) -> tuple[str, bool]:
    """Launches a small kernel as a test. Returns (the reason why it does not run, or "" if it does;
    whether this reason is permanent).
    """
    try:
        from .launch import probe

        # without this, a dispatch mode would intercept the probe's operators, and a fake mode would
        # compute nothing
        with _disable_current_modes():
            probe(device)
    # whatever fails (the compiler, the driver, a missing header), the kernels do not run
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        first_line = ""
        if lines:
            first_line = lines[0]
        is_permanent = (
            isinstance(error, ImportError | OSError | SubprocessError)
            or type(error).__module__.startswith("triton")
            or "compiler" in first_line
        )
        reason = f"Triton cannot run a kernel: {type(error).__name__}: {first_line}"
        return reason[:200], is_permanent
    return "", True


@cache
def _warn_once(reason: str) -> None:
    print(f"isotype: ops run as plain PyTorch on {reason}", file=sys.stderr, flush=True)


# (op, device, dtype) -> "", or the reason why the op's Triton kernels must not be used there
_triton_verdicts: dict[tuple[str, torch.device, torch.dtype], str] = {}
_ops_in_check: set[str] = set()


def triton_blocked_reason(op: str, device: torch.device, dtype: torch.dtype) -> str:
    """Returns the reason why the Triton kernels of an op are not used for tensors of this dtype on
    this device, or "" if they are. The first call for an op, a device and a dtype checks the
    kernels there, unless the user's cache has the result.
    """
    key = (op, device, dtype)
    verdict = _triton_verdicts.get(key)
    if verdict is not None:
        return verdict
    if reason := kernel_unavailable_reason(device):
        return reason
    if op in _ops_in_check:
        return ""
    if torch._C._current_graph_task_id() != -1:
        # a check would need the thread that computes gradients on this device, which waits here
        _warn_once(f"{device} for {op} in {dtype} until this kernel is checked")
        return "a backward is running, in which no kernel can be checked"
    if _is_capturing_graph():
        # a check allocates memory in another thread, which would make the capture fail
        return "a CUDA graph is captured, in which no kernel can be checked"
    verdict = _check_triton_kernels(op, device, dtype)
    _triton_verdicts[key] = verdict
    if verdict:
        trust.warn_of_wrong_kernel(op, device.type, verdict)
    return verdict


def _check_triton_kernels(op: str, device: torch.device, dtype: torch.dtype) -> str:
    _ops_in_check.add(op)
    try:
        # a packed weight is dequantised to the dtype of the products
        checked = dtype if dtype.is_floating_point else torch.float16
        return trust.find_disagreement(op, trust.gpu_facts(device), device, [checked])
    finally:
        _ops_in_check.discard(op)


def wrong_triton_kernels() -> dict[str, str]:
    """Returns the ops whose Triton kernels give wrong results on a GPU. Each op is mapped to a text
    that describes its error.
    """
    return {op: verdict for (op, _, _), verdict in _triton_verdicts.items() if verdict}


def choose_implementation(
    kernels: CppKernels, *tensors: Tensor, out_dtype: torch.dtype | None = None
) -> Implementation:
    """Returns the implementation that an op uses for these tensors, in forward and in backward.

    fp64 runs as plain PyTorch, since the kernels compute in fp32. In a compiled graph, the op also
    runs in plain PyTorch, and PyTorch's compiler (Inductor) fuses its operations.

    out_dtype  dtype of the op's result, if it differs from the dtype of the tensors
    """
    if torch.compiler.is_dynamo_compiling():
        return "graph"
    x = tensors[0]
    forced = _forced_backend.get()
    if forced is None and x.is_cpu:
        for t in tensors:
            if not t.is_cpu or t.dtype not in DTYPES:
                return "plain"
        if out_dtype is torch.float64:
            return "plain"
        if kernels.library is not None or kernels.load():
            return "cpp"
        return "plain"
    if out_dtype is torch.float64 or any(t.dtype is torch.float64 for t in tensors):
        return "plain"
    if forced == "triton":
        return "triton"
    if forced is None and x.is_cuda and not triton_blocked_reason(kernels.op, x.device, x.dtype):
        return "triton"
    if uses_cpp(kernels, *tensors):
        return "cpp"
    return "plain"


def uses_triton(op: str, x: Tensor) -> bool:
    """Whether the op's Triton kernels run on `x`. The kernels do not run for fp64, since they
    compute in fp32. They do not run in a compiled graph either, since Inductor fuses the op's
    formula there.
    """
    if torch.compiler.is_compiling():
        return False
    forced = _forced_backend.get()
    if forced is not None:
        return forced == "triton"
    if not x.is_cuda or x.dtype == torch.float64:
        return False
    return not triton_blocked_reason(op, x.device, x.dtype)


def uses_fused_kernel(op: str, x: Tensor) -> bool:
    """Whether the op's Triton kernels run on `x`, or would run on the GPU for which memory is planned (`x`
    is then a tensor without data). It is for ops whose kernel is a single `torch.library` op with a
    fake implementation.
    """
    if uses_triton(op, x):
        return True
    if not is_planned(x.device) or x.dtype == torch.float64:
        return False
    return target_device_type(x.device) != "cpu"


@cache
def _device_has_fp32_output(operand: torch.dtype, device_type: str, index: int | None) -> bool:
    """Whether a matrix product of bf16 or fp16 operands can return its fp32 sums (`out_dtype`).
    This needs CUDA, and for bf16 a compute capability of at least 8.0.
    """
    if device_type != "cuda" or operand not in (torch.bfloat16, torch.float16):
        return False
    if operand == torch.float16 or not torch.cuda.is_available():
        # without a GPU the caller plans memory for a GPU, which is assumed to be a recent one
        return True
    return torch.cuda.get_device_capability(index)[0] >= 8


def has_fp32_output(operand: torch.dtype, device: torch.device) -> bool:
    """Whether a matrix product with operands of this dtype can return its fp32 sums on this device."""
    check: Callable[..., bool] = _device_has_fp32_output
    if torch.compiler.is_compiling():
        # Dynamo traces the body of a cached function, and warns about the cache
        check = _device_has_fp32_output.__wrapped__
    return check(operand, target_device_type(device), device.index)


def can_count_rows(x: Tensor) -> bool:
    """Whether the program can count elements of `x`, such as labels that are not ignored, without
    waiting for a GPU. This is only possible if `x` is on a CPU.
    """
    return target_device_type(x.device) == "cpu"


def uses_cpp(kernels: CppKernels, *tensors: Tensor) -> bool:
    """Whether the op's C++ kernels run on these tensors. The kernels do not run for fp64, and run
    in a compiled graph only if they are declared with `in_graphs`. A compiler must have built them
    on this machine.
    """
    if torch.compiler.is_compiling():
        return (
            kernels.in_graphs
            and kernels.is_built
            and all(t.device.type == "cpu" and t.dtype in DTYPES for t in tensors)
        )
    x = tensors[0]
    forced = _forced_backend.get()
    if forced not in (None, "cpp"):
        return False
    if not x.is_cpu and (isinstance(x, FakeTensor) or is_planned(x.device)):
        # memory is planned for another device, whose kernels also allocate only their outputs
        return forced == "cpp" and all(t.dtype in DTYPES for t in tensors)
    for t in tensors:
        if not t.is_cpu or t.dtype not in DTYPES:
            return False
    return kernels.library is not None or kernels.load()


def eager_apply(function: type[Function]) -> Callable[..., Any]:
    """Returns the C++ method `apply` of this autograd function. It is faster than `apply_function`,
    because it runs no Python code before the forward. Do not use it under torch.func or in a
    compiled graph.
    """
    function_class: Any = function
    dispatcher: Any = super(Function, function_class)
    apply: Callable[..., Any] = dispatcher.apply
    return apply


def can_bypass_dispatcher(*tensors: Tensor | None) -> bool:
    """Whether an op may call its C++ kernel without an autograd function and without PyTorch's
    dispatcher. This is so if no gradient is recorded, and no transform or dispatch mode has to see
    the operator. Generating a token calls the norms of a model of 30 layers 61 times, and each call
    then takes 25 us less.
    """
    if torch.is_grad_enabled() or torch._C._len_torch_dispatch_stack():
        return False
    if torch._C._are_functorch_transforms_active():
        return False
    for tensor in tensors:  # noqa: SIM110  # a generator would add a call
        if tensor is not None and type(tensor) not in PLAIN_TENSOR_TYPES:
            return False
    return True


def apply_function(function: type[Function], *args: Any) -> Any:
    """Does the same as `function.apply(*args)` in less time, for an autograd function without
    `setup_context`.

    `Function.apply` searches every argument for tensors of a torch.func transform, and PyTorch's
    dispatcher then searches them again. If neither torch.func nor a compiled graph is in use, this
    function calls the dispatcher directly. A decoder layer with adapters calls this function 150
    times. With 20 arguments, `Function.apply` takes 28 us and this function 15 us.
    """
    if torch.compiler.is_dynamo_compiling() or torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    function_class: Any = function
    dispatcher: Any = super(Function, function_class)
    return dispatcher.apply(*args)


def refuse_second_derivative(op: str) -> None:
    """Raises UsageError for `create_graph=True` in a backward whose result has no graph. PyTorch's
    `once_differentiable` is not enough. It raises an error only when a later `backward` reaches
    this part of the graph. `torch.autograd.grad` raises no error and uses zero as the derivative.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise UsageError(
            f"{op} has no second derivative (create_graph=True): its backward is fused",
            fix="call isotype.restore(model), or compute the same in plain PyTorch",
        )
