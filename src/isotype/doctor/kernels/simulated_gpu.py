"""Simulates a GPU on the CPU, for code that uses `x.is_cuda`, device properties or `.cuda()`.

Inside `simulate_gpu(target)` tensors are on the CPU but report `cuda:0`. A call that asks for a
CUDA device creates a CPU tensor. New memory is filled with zeros. The kernels do not run, so their
outputs keep these zeros. Triton's active driver reports `target`. Nothing runs on a GPU, even if
the machine has one.

With `allocates=False`, tensors are on the meta device: they have shapes, dtypes and strides, but no
memory. So a wrapper can be called with tensors that are larger than the memory of the machine. The
value of an element is not known, so `.item()` returns 1, `torch.equal` returns False, and both are
recorded.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from ..compiler import run_without_compiler
from .compile_inputs import shared_bytes

_CUDA = torch.device("cuda:0")
# functions whose result has random content -> functions that give zeros
_ZEROED_FUNCTIONS = {
    torch.empty: torch.zeros,
    torch.empty_like: torch.zeros_like,
    torch.Tensor.new_empty: torch.Tensor.new_zeros,
}
_HOST_TRANSFERS = (torch.Tensor.cuda, torch.Tensor.cpu, torch.Tensor.pin_memory)
_TENSOR_TO = torch.Tensor.to
_NEW_METHODS = (torch.Tensor.new_empty, torch.Tensor.new_zeros)


def _is_cuda(value: Any) -> bool:
    return (isinstance(value, torch.device) and value.type == "cuda") or (
        isinstance(value, str) and value.split(":")[0] == "cuda"
    )


# functions whose arguments are a shape or a range
_SHAPED_NAMES = (
    "empty",
    "zeros",
    "ones",
    "full",
    "rand",
    "randn",
    "randint",
    "arange",
    "empty_strided",
)
_CREATION_FUNCTIONS = (
    *_SHAPED_NAMES,
    "linspace",
    "eye",
    "tensor",
    "as_tensor",
    "scalar_tensor",
    "randperm",
    "empty_like",
    "zeros_like",
    "ones_like",
    "full_like",
    "rand_like",
    "randn_like",
)
_TENSOR_METHODS = (
    "to",
    "cuda",
    "cpu",
    "pin_memory",
    "new_empty",
    "new_zeros",
    "new_ones",
    "new_full",
    "new_tensor",
    "new_empty_strided",
)


_SHAPED_FUNCTIONS = [getattr(torch, name) for name in _SHAPED_NAMES]
_COMPARISONS = (torch.equal, torch.Tensor.equal, torch.allclose, torch.Tensor.allclose)
_VALUE_READERS = {
    torch.Tensor.item: lambda tensor: tensor.dtype,
    torch.Tensor.__bool__: lambda tensor: torch.bool,
    torch.Tensor.__int__: lambda tensor: torch.int64,
    torch.Tensor.__float__: lambda tensor: torch.float32,
    torch.Tensor.__index__: lambda tensor: torch.int64,
}


class _Memory:
    """The memory of the simulated GPU.

    device  `cpu`, or `meta` for tensors without memory
    reads   the lines that read the value of a tensor without memory
    """

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.reads: list[str] = []

    def call(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Calls `func` on the memory's device, also if its arguments name a CUDA device. New memory
        is filled with zeros.
        """
        if func in _HOST_TRANSFERS:
            return args[0]
        if self.device.type == "meta":
            return self._call_without_memory(func, args, kwargs)
        if func in (torch.empty_strided, torch.Tensor.new_empty_strided):
            return func(*args, **self._replace_device(kwargs)).zero_()
        if func is _TENSOR_TO or func in _NEW_METHODS or "device" in kwargs:
            args = tuple(self.device if _is_cuda(a) else a for a in args)
        return _ZEROED_FUNCTIONS.get(func, func)(*args, **self._replace_device(kwargs))

    def _call_without_memory(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if func in _COMPARISONS:
            self._record_read()
            return False
        if func in _VALUE_READERS and _is_meta(args[0]):
            self._record_read()
            dtype = _VALUE_READERS[func](args[0])
            number = 1.0 if dtype.is_floating_point else 1
            return True if dtype == torch.bool else number
        if func in _SHAPED_FUNCTIONS:
            kwargs = {"device": self.device, **kwargs}
        kwargs = {name: value for name, value in kwargs.items() if name != "generator"}
        args = tuple(self.device if _is_cuda(a) else a for a in args)
        return func(*args, **self._replace_device(kwargs))

    def _replace_device(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": self.device}
        return {name: value for name, value in kwargs.items() if name != "pin_memory"}

    def _record_read(self) -> None:
        caller = sys._getframe(1)
        while caller.f_back is not None and _is_torch_code(caller):
            caller = caller.f_back
        self.reads.append(f"{caller.f_code.co_filename}:{caller.f_lineno}")


def _is_meta(value: Any) -> bool:
    # `value.device` is replaced while a GPU is simulated
    return isinstance(value, torch.Tensor) and value.is_meta


def _is_torch_code(frame: Any) -> bool:
    path = frame.f_code.co_filename
    return path == __file__ or f"{os.sep}torch{os.sep}" in path


_REAL_DEVICE = torch.Tensor.device


def _simulated_device(tensor: torch.Tensor) -> Any:
    """Returns the device of a tensor for the user's code. torch computes some operators of meta
    tensors in Python, and this code must see the real device.
    """
    if _is_meta(tensor) and _is_torch_code(sys._getframe(1)):
        return _REAL_DEVICE.__get__(tensor)
    return _CUDA


class _StorageMode(TorchFunctionMode):
    """Intercepts every call of a torch function, also under `with torch.device("cuda")`."""

    def __init__(self, memory: _Memory) -> None:
        super().__init__()
        self.memory = memory

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        return self.memory.call(func, args, kwargs or {})


def _patch_function(func: Any, memory: _Memory) -> Any:
    """Returns a replacement for a function such as `torch.empty`. The replacement is needed because
    `_StorageMode` does not see the calls in backward and inside custom operators.
    """

    def call_on_storage(*args: Any, **kwargs: Any) -> Any:
        return memory.call(func, args, kwargs)

    call_on_storage.__name__ = getattr(func, "__name__", "torch_function")
    return call_on_storage


class _Stream:
    """A replacement for CUDA streams and events."""

    cuda_stream = 0
    device = _CUDA
    device_index = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def elapsed_time(self, end_event: Any) -> float:
        return 1.0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


class _DeviceContext:
    """A replacement for `torch.cuda.device` and `torch.cuda.device_of`. unsloth reads `idx`."""

    def __init__(self, device: object = None) -> None:
        self.idx = 0
        self.prev_idx = -1

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc: object) -> None:
        pass


def _device_properties(target: Any) -> SimpleNamespace:
    major, minor = divmod(int(target.arch), 10) if target.backend == "cuda" else (9, 4)
    return SimpleNamespace(
        name=f"pretended {target.arch}",
        major=major,
        minor=minor,
        multi_processor_count=132,
        total_memory=80 << 30,
        warp_size=target.warp_size,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=shared_bytes(target),
        L2_cache_size=50 << 20,
        gcnArchName=str(target.arch),
    )


def _simulated_driver(target: Any) -> SimpleNamespace:
    """Returns a Triton driver that reports a GPU of this target."""
    properties = _device_properties(target)
    limits = {
        "max_shared_mem": shared_bytes(target),
        "max_num_regs": properties.regs_per_multiprocessor,
        "multiprocessor_count": properties.multi_processor_count,
        "warpSize": target.warp_size,
    }
    return SimpleNamespace(
        utils=SimpleNamespace(get_device_properties=lambda device: dict(limits)),
        get_current_target=lambda: target,
        get_current_device=lambda: 0,
        set_current_device=lambda device: None,
        get_current_stream=lambda device: 0,
        get_active_torch_device=lambda: _CUDA,
        get_device_interface=lambda: torch.cuda,
        get_device_capability=lambda device=0: (properties.major, properties.minor),
    )


_NOOP_FUNCTIONS = (
    "set_device",
    "synchronize",
    "empty_cache",
    "reset_peak_memory_stats",
    "manual_seed",
    "manual_seed_all",
    "ipc_collect",
    "_lazy_init",
)


def _cuda_replacements(target: Any) -> dict[str, Any]:
    """Returns the replacements for functions of `torch.cuda`."""
    properties = _device_properties(target)
    replacements: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_capability": lambda device=None: (properties.major, properties.minor),
        "get_device_properties": lambda device=None: properties,
        "get_device_name": lambda device=None: properties.name,
        "is_bf16_supported": lambda *args, **kwargs: True,
        "get_arch_list": lambda: [f"sm_{target.arch}"],
        "current_stream": lambda device=None: _Stream(),
        "default_stream": lambda device=None: _Stream(),
        "Stream": _Stream,
        "Event": _Stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "device": _DeviceContext,
        "device_of": _DeviceContext,
        "memory_allocated": lambda *args: 0,
        "max_memory_allocated": lambda *args: 0,
        "mem_get_info": lambda *args: (70 << 30, 80 << 30),
    }
    return replacements | {name: _make_noop(name) for name in _NOOP_FUNCTIONS}


def _make_noop(name: str) -> Any:
    """Returns a function without effect. Each name gets a separate function, because
    torch.compile's table of functions may hold each function only once.
    """

    def do_nothing(*args: Any, **kwargs: Any) -> None:
        return None

    do_nothing.__name__ = name
    return do_nothing


@contextlib.contextmanager
def simulate_gpu_properties(target: Any) -> Iterator[None]:
    """Inside this context `torch.cuda` reports a GPU of this target, but tensors stay on the CPU and
    report it. `LigerDyTFunction` launches one program for each multiprocessor of the GPU, so the GPU
    has only two: the kernels run in the interpreter.
    """
    replacements = _cuda_replacements(target)
    properties = _device_properties(target)
    properties.multi_processor_count = 2
    replacements["get_device_properties"] = lambda device=None: properties
    with contextlib.ExitStack() as stack:
        for name, replacement in replacements.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, replacement))
        yield


@contextlib.contextmanager
def simulate_gpu(target: Any, *, allocates: bool = True) -> Iterator[list[str]]:
    """Simulates a GPU of this target inside the context. At the end of the context, all replaced
    functions are restored. Returns a list, which receives the lines that read the value of a tensor
    without memory.

    allocates  whether tensors have memory
    """
    from triton.runtime.driver import driver

    memory = _Memory("cpu" if allocates else "meta")
    with contextlib.ExitStack() as stack:
        stack.enter_context(run_without_compiler())
        for name, replacement in _cuda_replacements(target).items():
            stack.enter_context(mock.patch.object(torch.cuda, name, replacement))
        tensor_replacements = {
            "is_cuda": property(lambda self: True),
            "is_cpu": property(lambda self: False),
            "device": property(_simulated_device),
            "get_device": lambda self: 0,
        }
        for name, value in tensor_replacements.items():
            stack.enter_context(mock.patch.object(torch.Tensor, name, value))
        # torch.compile reads this when it is imported while CUDA reports that it is available
        stack.enter_context(
            mock.patch.object(
                torch._C,
                "_cuda_getCurrentRawStream",
                _make_noop("_cuda_getCurrentRawStream"),
                create=True,
            )
        )
        for name in _CREATION_FUNCTIONS:
            stack.enter_context(
                mock.patch.object(torch, name, _patch_function(getattr(torch, name), memory))
            )
        for name in _TENSOR_METHODS:
            stack.enter_context(
                mock.patch.object(
                    torch.Tensor, name, _patch_function(getattr(torch.Tensor, name), memory)
                )
            )
        if not allocates:
            for func in (*_COMPARISONS, *_VALUE_READERS):
                owner = torch if func in (torch.equal, torch.allclose) else torch.Tensor
                stack.enter_context(
                    mock.patch.object(owner, func.__name__, _patch_function(func, memory))
                )
        stack.enter_context(
            mock.patch.object(torch.nn.Module, "cuda", lambda self, device=None: self)
        )
        previous_driver = getattr(driver, "_active", None)
        driver.set_active(_simulated_driver(target))
        stack.callback(_restore_driver, driver, previous_driver)
        stack.enter_context(_StorageMode(memory))
        yield memory.reads


def _restore_driver(driver: Any, previous_driver: Any) -> None:
    """Restores the previous active driver. If no driver was active before, Triton searches for a
    driver when it needs one.
    """
    if hasattr(driver, "_active"):
        driver._active = previous_driver
    else:  # Triton 3.4
        with contextlib.suppress(RuntimeError):
            driver.reset_active()
