"""Runs Triton kernels on a CPU. The module uses Triton's interpreter and repairs the faults of this
interpreter, so that the results are correct. Kernels need only the usual decorator `@triton.jit`.

    with interpreted():
        silu_mul_forward[grid](gate, up, out, n, BLOCK=128)      # CPU tensors

Neither TRITON_INTERPRET=1 nor a particular order of imports is needed. Within the block, ordinary
JIT functions that are launched run in the interpreter. At the end of the block everything is
restored. The unrepaired interpreter of Triton 3.9 has several faults. The interpreter stores bf16
values as integers with the same bits (uint16). It then adds, multiplies, compares and reduces these
integers as if they were the values. When it converts fp32 to bf16, it truncates instead of
rounding. It sums fp16 in fp32. The interpreter does not convert Python floats to its own type, so
`.to` fails on a float. In the repaired interpreter, every operator converts its bf16 operands to a
wider dtype, computes, and rounds the result once, to nearest even.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton

# The compiler takes its table of `min` and `max` from triton.language when it is imported. If it is
# first imported while the language is patched, every later compilation uses the patched functions.
import triton.compiler.code_generator
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime import autotuner, jit
from triton.runtime import interpreter as triton_interpreter

from ..doctor.kernels.compile_inputs import require_triton

Array = np.ndarray[Any, Any]
Operation = Callable[..., Any]
# (owner, attribute, its replacement)
Replacement = tuple[Any, str, Any]


def widen(bits: Any) -> Array:
    """Converts the uint16 bits of bf16 to fp32, exactly."""
    raw = np.asarray(bits, dtype=np.uint16)
    shifted = raw.astype(np.uint32) << np.uint32(16)
    wide: Array = np.ascontiguousarray(shifted).view(np.float32)
    return wide.reshape(raw.shape)


def narrow(values: Any) -> Array:
    """Converts fp16, fp32, fp64 or integers to the uint16 bits of bf16, rounded once to nearest
    even. Overflow becomes infinity, and NaN stays NaN.
    """
    numbers = np.asarray(values)
    if numbers.dtype not in (np.float32, np.float16):
        numbers = _round_to_odd(numbers.astype(np.float64))
    single = np.ascontiguousarray(numbers, dtype=np.float32)
    bits = single.view(np.uint32)
    half = np.uint32(16)
    is_odd = (bits >> half) & np.uint32(1)
    rounded = (bits + (is_odd + np.uint32(0x7FFF))) >> half
    narrowed = np.where(np.isnan(single), np.uint16(0x7FC0), rounded.astype(np.uint16))
    return narrowed.reshape(numbers.shape)


def _round_to_odd(values: Array) -> Array:
    """Converts fp64 to fp32 by rounding to odd. A later rounding to bf16 then gives the same result
    as a single rounding.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        single = values.astype(np.float32)
        back = single.astype(np.float64)
        beyond = np.abs(back) > np.abs(values)
    towards_zero = np.nextafter(single, np.float32(0))
    single = np.where(beyond, towards_zero, single).astype(np.float32)
    is_inexact = (single.astype(np.float64) != values) & np.isfinite(values)
    lowest_bit = is_inexact.astype(np.uint32).reshape(single.shape)
    bits = np.ascontiguousarray(single).view(np.uint32) | lowest_bit
    odd: Array = bits.view(np.float32)
    return odd


Handle = triton_interpreter.TensorHandle
Builder = triton_interpreter.InterpreterBuilder

# the interpreter of Triton 3.6 has more faults than the one of 3.9
IS_TRITON_3_6 = not hasattr(Builder, "get_bf16")

# Operators whose operands and result share a dtype; comparisons among them give int1.
ELEMENTWISE = """
    fadd fmul fdiv frem fsub fneg precise_divf approx_divf clampf
    minimumf minnumf maximumf maxnumf
    fcmpOLT fcmpOGT fcmpOLE fcmpOGE fcmpOEQ fcmpONE
    fcmpULT fcmpUGT fcmpULE fcmpUGE fcmpUEQ fcmpUNE
    cos sin exp exp2 log log2 sqrt precise_sqrt rsqrt erf floor ceil
"""
CASTS = (
    "cast_impl",
    "create_si_to_fp",
    "create_ui_to_fp",
    "create_fp_to_si",
    "create_fp_to_ui",
    "create_fp_ext",
    "create_fp_trunc",
)


def is_bf16(handle: Any) -> bool:
    """True if a value of the interpreter is bf16."""
    return isinstance(handle, Handle) and handle.dtype.scalar == tl.bfloat16


def _widen_bf16(handle: Any) -> Any:
    """Converts a bf16 value to fp32, and returns any other value unchanged."""
    if is_bf16(handle):
        return Handle(widen(handle.data), tl.float32)
    return handle


def repair_elementwise(original: Operation) -> Operation:
    """Wraps an operator so that bf16 operands are widened to fp32 and the result is rounded once."""

    def operator(self: Any, *operands: Any, **options: Any) -> Any:
        if not any(is_bf16(operand) for operand in operands):
            return original(self, *operands, **options)
        with np.errstate(all="ignore"):
            result = original(self, *[_widen_bf16(operand) for operand in operands], **options)
        if result.data.dtype == np.bool_:
            return Handle(result.data, tl.int1)
        return Handle(narrow(result.data), tl.bfloat16)

    return operator


def repair_cast(original: Operation) -> Operation:
    """Wraps a cast so that casts from and to bf16 convert the value and not its bits."""

    def operator(self: Any, src: Any, dst_type: Any) -> Any:
        source = src.dtype.scalar
        target = dst_type.scalar
        if tl.bfloat16 not in (source, target) or source == target:
            return original(self, src, dst_type)
        if target == tl.bfloat16:
            return Handle(narrow(src.data), tl.bfloat16)
        wide = _widen_bf16(src)
        if target == tl.float32:
            return wide
        return original(self, wide, dst_type)

    return operator


def repair_float_cast(original: Operation) -> Operation:
    """Wraps the cast between floats. Casts from and to fp8 still use the code of Triton's
    interpreter.
    """

    def operator(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        source = src.dtype.scalar
        target = dst_type.scalar
        if tl.bfloat16 not in (source, target) or 8 in (
            source.primitive_bitwidth,
            target.primitive_bitwidth,
        ):
            return original(self, src, dst_type, rounding_mode)
        if target == tl.bfloat16 and rounding_mode == triton_interpreter._ir.ROUNDING_MODE.RTZ:
            towards_zero = src.data.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
            return Handle(narrow(towards_zero.view(np.float32)), tl.bfloat16)
        return self.cast_impl(src, dst_type)

    return operator


def repair_dot(original: Operation) -> Operation:
    """Wraps the matrix product so that bf16 operands are summed in the accumulator's dtype."""

    def operator(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        result = original(self, _widen_bf16(a), _widen_bf16(b), _widen_bf16(d), *options)
        if is_bf16(d):
            return Handle(narrow(result.data), tl.bfloat16)
        return result

    return operator


def repair_fma(original: Operation) -> Operation:
    """Wraps the fused multiply-add so that its result (in bf16, fp16 or fp32) is rounded only once,
    as on a GPU.
    """

    def operator(self: Any, x: Any, y: Any, z: Any) -> Any:
        if is_bf16(z):
            # a bf16 product is exact in fp64, so there is one rounding, at the end
            product = widen(x.data).astype(np.float64) * widen(y.data)
            return Handle(narrow(product + widen(z.data)), tl.bfloat16)
        if IS_TRITON_3_6 and z.dtype.scalar in (tl.float16, tl.float32):
            # the version of Triton 3.6 rounds twice
            with np.errstate(all="ignore"):
                total = x.data.astype(np.float64) * y.data + z.data
                return Handle(total.astype(z.data.dtype), z.dtype.scalar)
        return original(self, x, y, z)

    return operator


def refuse_bf16(operation: str, original: Operation, get_operand: Operation) -> Operation:
    """Wraps an operator so that it raises NotImplementedError for bf16. Triton's operator would
    compute with the bits of bf16 values as if they were integers. No kernel is known that needs
    this operator in bf16, so it is not repaired.
    """

    def operator(self: Any, *operands: Any) -> Any:
        if get_operand(*operands).dtype.scalar == tl.bfloat16:
            raise NotImplementedError(
                f"{operation} of bf16 has no CPU version: widen to fp32 before it"
            )
        return original(self, *operands)

    return operator


def _sum_by_halves(data: Any, axis: int, add: Callable[[Any, Any], Any]) -> Any:
    """Sums in the same order as a GPU. It adds the second half of the elements to the first half,
    rounds each sum, and repeats this until one element is left.
    """
    data = np.moveaxis(data, axis, 0)
    while data.shape[0] > 1:
        half = data.shape[0] // 2
        remainder = data[2 * half :]
        data = add(data[:half], data[half : 2 * half])
        if len(remainder):
            data = np.concatenate([data, remainder])
    return data[0]


def _add_low(dtype: Any) -> Callable[[Any, Any], Any]:
    """Returns a function that adds two arrays in bf16 or fp16."""
    if dtype == tl.bfloat16:
        return lambda x, y: narrow(widen(x) + widen(y))
    return lambda x, y: np.add(x, y, dtype=np.float16)


def _is_half_precision(tensor: Any) -> bool:
    return tensor.dtype.scalar in (tl.bfloat16, tl.float16)


def repair_sum(original: Operation) -> Operation:
    """Wraps the reduction `sum` so that bf16 values and fp16 values are summed in their own dtype."""

    def operator(self: Any, tensor: Any) -> Any:
        if not _is_half_precision(tensor):
            return original(self, tensor)
        data = tensor.handle.data
        axis = self.axis
        rank = data.ndim
        if axis is None:
            data = data.reshape(-1)
            axis = 0
        with np.errstate(all="ignore"):
            total = _sum_by_halves(data, axis, _add_low(tensor.dtype.scalar))
        if self.keep_dims:
            if self.axis is not None:
                total = np.expand_dims(total, axis)
            else:
                total = np.reshape(total, (1,) * rank)
        return self.to_tensor(total, tensor.dtype)

    return operator


def repair_min_max(original: Operation) -> Operation:
    """Wraps the reductions `min` and `max` so that bf16 values are compared in fp32."""

    def operator(self: Any, operand: Any, val_reduce_op: Any, idx_reduce_op: Any = None) -> Any:
        tensor = operand
        if isinstance(operand, tuple):
            tensor = operand[0]
        if tensor.dtype.scalar != tl.bfloat16:
            return original(self, operand, val_reduce_op, idx_reduce_op)
        wide = tl.tensor(Handle(widen(tensor.handle.data), tl.float32), tl.float32)
        result = original(self, wide, val_reduce_op, idx_reduce_op)
        if not val_reduce_op:
            return result
        value = result
        indices: list[Any] = []
        if isinstance(result, tuple):
            value, *indices = result
        data = value.handle.data
        if not value.shape:
            data = data.reshape(())
        low = self.to_tensor(narrow(data), tensor.dtype)
        if indices:
            return (low, *indices)
        return low

    return operator


def repair_generic_reduce(original: Operation) -> Operation:
    """Wraps `tl.reduce` with a function of the kernel's author. The interpreter calls this function
    for each element. Here it is called with blocks, as `_sum_by_halves` adds. cut-cross-entropy
    reduces tiles of 128 x 128 elements in this way.
    """

    def operator(self: Any, operands: tuple[Any, ...]) -> Any:
        try:
            with ExitStack() as undo:
                _set_attribute(undo, tl.tensor, "__bool__", _require_one_element)
                return _reduce_by_halves(self, operands)
        except Exception:  # for example `if a > b`, which needs single elements
            return original(self, operands)

    return operator


def _require_one_element(condition: Any) -> bool:
    """Returns the value of a condition, as `tl.tensor.__bool__`. A block raises an error, because
    its elements may differ.
    """
    if condition.handle.data.size != 1:
        raise ValueError("a condition must be a single element")
    return bool(condition.handle.data.item())


def _reduce_by_halves(reduction: Any, operands: tuple[Any, ...]) -> list[Any]:
    rank = operands[0].handle.data.ndim
    dtypes = [operand.dtype for operand in operands]
    arrays = [operand.handle.data for operand in operands]
    axis = reduction.axis
    if axis is None:
        arrays = [array.reshape(-1) for array in arrays]
        axis = 0
    arrays = [np.moveaxis(array, axis, 0) for array in arrays]
    while len(arrays[0]) > 1:
        half = len(arrays[0]) // 2
        blocks = [
            reduction.to_tensor(part, dtype)
            for first, last in ((0, half), (half, 2 * half))
            for part, dtype in zip([array[first:last] for array in arrays], dtypes)
        ]
        combined = reduction.combine_fn.fn(*blocks)
        results = combined if isinstance(combined, tuple) else (combined,)
        for index, result in enumerate(results):
            array = arrays[index]
            data = np.broadcast_to(result.handle.data, array[:half].shape).astype(array.dtype)
            arrays[index] = np.concatenate([data, array[2 * half :]])
    totals = [array[0] for array in arrays]
    if reduction.keep_dims and reduction.axis is None:
        totals = [np.reshape(total, (1,) * rank) for total in totals]
    elif reduction.keep_dims:
        totals = [np.expand_dims(total, axis) for total in totals]
    return [reduction.to_tensor(total, dtype) for total, dtype in zip(totals, dtypes)]


def wrap_argument(original: Operation) -> Operation:
    """Wraps the conversion of arguments so that a Python float becomes an fp32 scalar, as in a
    compiled kernel.
    """

    def convert(arg: Any) -> Any:
        if isinstance(arg, float):
            return tl.tensor(Handle(np.array([arg], dtype=np.float32), tl.float32), tl.float32)
        return original(arg)

    return convert


def interpreter_repairs() -> Iterator[Replacement]:
    """For each fault of the interpreter, yields the object and the attribute that must be replaced,
    and the replacement.
    """
    for name in ELEMENTWISE.split():
        attribute = f"create_{name}"
        if hasattr(Builder, attribute):
            yield Builder, attribute, repair_elementwise(getattr(Builder, attribute))
    if IS_TRITON_3_6:  # Triton 3.6 cannot convert a Python number to bf16
        yield (
            Builder,
            "get_bf16",
            lambda self, value: Handle(narrow(np.array([value], dtype=np.float32)), tl.bfloat16),
        )
    plain = Builder.cast_impl
    for name in CASTS:
        if hasattr(Builder, name):
            yield Builder, name, repair_cast(plain)
    yield Builder, "create_fp_to_fp", repair_float_cast(Builder.create_fp_to_fp)
    yield Builder, "create_dot", repair_dot(Builder.create_dot)
    yield Builder, "create_fma", repair_fma(Builder.create_fma)
    yield (
        Builder,
        "create_atomic_rmw",
        refuse_bf16(
            "an atomic operation", Builder.create_atomic_rmw, lambda kind, ptr, val, *_: val
        ),
    )
    yield triton_interpreter.ReduceOps, "sum", repair_sum(triton_interpreter.ReduceOps.sum)
    yield (
        triton_interpreter.ReduceOps,
        "min_max",
        repair_min_max(triton_interpreter.ReduceOps.min_max),
    )
    yield (
        triton_interpreter.ReduceOps,
        "generic_reduce",
        repair_generic_reduce(triton_interpreter.ReduceOps.generic_reduce),
    )
    for name in ("cumsum", "cumprod"):
        yield (
            triton_interpreter.ScanOps,
            name,
            refuse_bf16(
                f"tl.{name}", getattr(triton_interpreter.ScanOps, name), lambda tensor: tensor
            ),
        )
    yield triton_interpreter, "_implicit_cvt", wrap_argument(triton_interpreter._implicit_cvt)


# --- libdevice. The interpreter has only empty stubs for it. The functions that kernels of
# libraries call are computed here by torch, in fp32 and fp64. bf16 and fp16 arguments are rejected,
# as on a GPU
_SAME_NAMES = """
    abs floor ceil trunc exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan asin acos atan
    sinh cosh tanh asinh acosh atanh erf erfc erfinv lgamma round atan2 hypot copysign fmod pow
    nextafter isnan isinf signbit
"""


def _fma(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    return (x.double() * y.double() + z.double()).to(z.dtype)


FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    **{name: getattr(torch, name) for name in _SAME_NAMES.split()},
    "rint": torch.round,
    "nearbyint": torch.round,
    "fma": _fma,
    "finitef": torch.isfinite,
    "isfinited": torch.isfinite,
}


def interpreted_libdevice(name: str, *arguments: Any) -> Any:
    """Computes the libdevice function with this name in the interpreter."""
    if name not in FUNCTIONS:
        raise NotImplementedError(
            f"libdevice.{name} has no CPU version; known: {', '.join(sorted(FUNCTIONS))}"
        )
    tensors = [argument for argument in arguments if isinstance(argument, tl.tensor)]
    types = [tensor.dtype for tensor in tensors]
    unsupported_types = [
        tensor_type for tensor_type in types if tensor_type not in (tl.float32, tl.float64)
    ]
    if unsupported_types:
        raise ValueError(
            f"libdevice.{name}: input arg type does not match. Expect fp32 or fp64, got {unsupported_types[0]}"
        )
    result_type = tl.float32
    dtype = torch.float32
    if tl.float64 in types:
        result_type = tl.float64
        dtype = torch.float64
    values = [_to_torch(argument, dtype) for argument in arguments]
    result = FUNCTIONS[name](*values).numpy()
    if result.dtype == np.bool_:
        result_type = tl.int1
    handle = Handle(result, result_type)
    if any(tensor.type.is_block() for tensor in tensors):
        return tl.tensor(handle, tl.block_type(result_type, list(result.shape)))
    return tl.tensor(handle, result_type)


def _to_torch(argument: Any, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(argument, tl.tensor):
        return torch.from_numpy(np.array(argument.handle.data)).to(dtype)
    if isinstance(argument, tl.constexpr):
        argument = argument.value
    return torch.tensor(argument, dtype=dtype)


def libdevice_replacements() -> Iterator[tuple[FunctionType, Any]]:
    """Yields pairs of a stub from libdevice and a function. The code of the stub is replaced by the
    code of the function. The stub object itself stays the same, so kernels that imported it earlier
    use the new code too.
    """
    libdevice.__dict__.setdefault("_interpreted_libdevice", interpreted_libdevice)
    for name, stub in list(vars(libdevice).items()):
        if not isinstance(stub, FunctionType) or name.startswith("_"):
            continue
        count = stub.__code__.co_argcount
        arguments = ", ".join(f"arg{i}" for i in range(count))
        space: dict[str, Any] = {}
        exec(
            f"def {name}({arguments}, _semantic=None): return _interpreted_libdevice({name!r},"
            f" {arguments})",
            space,
        )
        yield stub, space[name]


_active = threading.local()
_MISSING = object()


@contextmanager
def interpreted() -> Iterator[None]:
    """Within this block Triton kernels run on the CPU in the repaired interpreter. Blocks may be
    nested.

    Raises  UsageError for a Triton version whose interpreter is not supported
    """
    if getattr(_active, "depth", 0):
        yield
        return
    require_triton()
    with ExitStack() as undo:
        for owner, attribute, replacement in [*interpreter_repairs(), *_diversions()]:
            _set_attribute(undo, owner, attribute, replacement)
        for stub, replacement in libdevice_replacements():
            for part in ("__code__", "__defaults__"):
                undo.callback(setattr, stub, part, getattr(stub, part))
                setattr(stub, part, getattr(replacement, part))
        _active.depth = 1
        undo.callback(setattr, _active, "depth", 0)
        yield


def _set_attribute(undo: ExitStack, owner: Any, attribute: str, value: Any) -> None:
    """Sets an attribute, and restores it when `undo` is closed."""
    previous = vars(owner).get(attribute, _MISSING)
    setattr(owner, attribute, value)
    if previous is _MISSING:
        undo.callback(delattr, owner, attribute)
    else:
        undo.callback(setattr, owner, attribute, previous)


def _diversions() -> Iterator[Replacement]:
    """Yields the replacements that make launches, device functions and autotuners use the
    interpreter.
    """
    call = jit.JITFunction.__call__

    def run(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Any:
        if warmup:
            return None
        return _run_launch(self.fn, args, grid, kwargs, self.pre_run_hooks)

    def device_function(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not getattr(_active, "launches", 0):
            return call(self, *args, **kwargs)
        return _rewrite_function(self.fn)(*args, **kwargs)

    def first_configuration(self: Any, *args: Any, config: Any, **meta: Any) -> list[float]:
        """Reports the same time for every configuration, so that the autotuner takes the first one.
        On a CPU no times are measured.
        """
        return [0.0, 0.0, 0.0]

    def skip_disk_cache(self: Any, tuning_key: Any, configs: Any, bench_fn: Any) -> bool:
        """Neither reads nor writes the cache of `autotune(cache_results=True)`. Its key contains
        the GPU, and the times above must not be saved for a GPU. Kernels of
        flash-linear-attention have this cache.
        """
        bench_fn()
        return False

    yield jit.JITFunction, "run", run
    yield jit.JITFunction, "__call__", device_function
    yield triton_interpreter.InterpretedFunction, "run", run
    yield triton_interpreter.InterpretedFunction, "__call__", device_function
    yield autotuner.Autotuner, "_bench", first_configuration
    yield autotuner.Autotuner, "check_disk_cache", skip_disk_cache


def _rewrite_function(function: Any) -> Any:
    """Returns the version of a function that Triton's interpreter rewrote for its own use. Each
    function is rewritten only once.
    """
    cache = triton_interpreter.InterpretedFunction.rewritten_fn
    if function not in cache:
        cache[function] = triton_interpreter.FunctionRewriter(function).rewrite_ast()
    return cache[function]


def _run_launch(
    function: Any, args: tuple[Any, ...], grid: Any, kwargs: dict[str, Any], hooks: list[Any]
) -> None:
    """Runs one launch. `triton.language` is patched once for the kernel and all device functions
    that it calls. `triton.language` is restored afterwards, also after an error.
    """
    names = list(triton_interpreter.inspect.signature(function).parameters)
    interpreting = triton.knobs.runtime.interpret
    _active.launches = getattr(_active, "launches", 0) + 1
    triton.knobs.runtime.interpret = True
    with ExitStack() as undo:
        undo.callback(setattr, triton.knobs.runtime, "interpret", interpreting)
        undo.callback(setattr, _active, "launches", _active.launches - 1)
        aliases = _find_aliases(function)
        for owner, attribute, replacement in _language_replacements():
            _set_attribute(undo, owner, attribute, replacement)
        for namespace, name, replacement in aliases:
            undo.callback(namespace.__setitem__, name, namespace[name])
            namespace[name] = replacement
        # the executor would patch the language again for every launch, which takes 10 ms and covers
        # only modules that the kernel's file names
        _set_attribute(
            undo, triton_interpreter, "_patch_lang", lambda _: triton_interpreter._LangPatchScope()
        )
        triton_interpreter.GridExecutor(_rewrite_function(function), names, grid, hooks)(
            *args, **kwargs
        )


@functools.cache
def _find_aliases(function: Any) -> list[tuple[dict[str, Any], str, Any]]:
    """Returns the names under which the module of a kernel, and the modules of the device functions
    that it calls, hold functions of `triton.language`, and the replacements of these functions.
    unsloth has `triton_cast = tl.cast`.
    """
    replacements = {
        id(vars(owner)[attribute]): replacement
        for owner, attribute, replacement in _language_replacements()
        if attribute in vars(owner)
    }
    aliases = []
    functions = [function]
    for caller in functions:
        namespace = caller.__globals__
        for name in caller.__code__.co_names:
            value = namespace.get(name)
            if isinstance(value, jit.JITFunction) and value.fn not in functions:
                functions.append(value.fn)
            elif id(value) in replacements:
                aliases.append((namespace, name, replacements[id(value)]))
    return aliases


@functools.cache
def _language_replacements() -> list[Replacement]:
    """Returns the replacements that the interpreter makes in `triton.language`. The replacements
    are cached, because it takes ten times longer to compute them than to run a small kernel.
    """
    replacements: list[Replacement] = []
    scope = triton_interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    try:
        for owner, attribute, _ in scope._changes:
            replacements.append((owner, attribute, vars(owner)[attribute]))
    finally:
        scope.restore()
    # Triton before 3.9 converts an array with one element to an int, for which NumPy 2.5 raises an
    # error
    replacements.append(
        (tl.tensor, "__index__", lambda self: int(self.handle.data.reshape(()))),
    )
    # for calls such as x.sum(1): a JIT function that is stored on the class is not bound to the
    # instance
    for name, member in vars(tl.tensor).items():
        if isinstance(member, jit.JITFunction):
            replacements.append((tl.tensor, name, functools.partialmethod(member)))
    return replacements
