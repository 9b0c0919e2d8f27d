"""Contains functions and classes for the tensors of a training step. They find the tensors in
nested arguments, find the storage of a tensor, and describe one call of an operator. For each
tensor, `Lineages` stores whether it was computed from inputs, weights or buffers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..dtypes import format_dtype
from ..precision.parts import gathered_weights
from .operators import CAST, CREATE, PRODUCT, SUM, Operator
from .origin import AUTOGRAD, Caller, find_caller
from .record import Observation
from .tape import AFTER_BACKWARD, BACKWARD, LOSS, UPDATE

# bits that say from which tensors a value was computed (`Lineage.sources`)
INPUT = 1
WEIGHT = 2
BUFFER = 4
FLOAT_INPUT = 8
MASK_BOUND = 1e4  # a number of a larger magnitude fills a mask
# a larger tensor is not computed again to check whether it was rounded
MAX_RECOMPUTED_ELEMENTS = 1 << 20

# complex dtype -> the dtype of its parts
_REAL_DTYPES = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}


@cache
def float_dtype_name(dtype: torch.dtype) -> str | None:
    """Returns the name of a floating-point dtype. For a complex dtype, returns the name of the
    dtype of its real and imaginary parts. Returns None for other dtypes.
    """
    real_dtype = _REAL_DTYPES.get(dtype, dtype)
    return format_dtype(real_dtype) if real_dtype.is_floating_point else None


def collect_tensors(value: object, collected: list[Tensor]) -> list[Tensor]:
    """Collects every tensor in arguments or results, at any depth."""
    if isinstance(value, Tensor):
        collected.append(value)
    elif isinstance(value, (list, tuple)):
        for part in value:
            collect_tensors(part, collected)
    elif isinstance(value, dict):
        for part in value.values():
            collect_tensors(part, collected)
    return collected


def floating_tensors(output: object) -> list[Tensor]:
    """Lists every floating tensor in a module's output, at any depth."""
    return [tensor for tensor in collect_tensors(output, []) if tensor.is_floating_point()]


def storage_tensor(tensor: Tensor) -> Tensor | None:
    """Returns the tensor whose storage holds the values. This is the tensor itself, or the values
    of a sparse tensor. Returns None for oneDNN's layout, which has no storage.
    """
    if tensor.layout is torch.strided:
        return tensor
    if tensor.layout is torch.sparse_coo:
        return tensor._values()
    return None if tensor.is_mkldnn else tensor.values()


def is_wrapper(tensor: Tensor) -> bool:
    """Whether the tensor's class may compute in another dtype than `tensor.dtype`. The tensor
    classes of quantisation libraries do so. The tensor classes of PyTorch (sharded and nested
    tensors) and of Isotype do not.
    """
    kind = type(tensor)
    if kind is Tensor or kind is torch.nn.Parameter:
        return False
    has_own_dispatch = getattr(kind, "__torch_dispatch__", None) is not Tensor.__torch_dispatch__
    return has_own_dispatch and not kind.__module__.startswith(("torch.", "isotype."))


def dense_values(tensor: Tensor) -> Tensor | None:
    """Returns the tensor's values as a dense tensor. Returns None for the meta device, nested
    tensors and oneDNN's layout.
    """
    values = storage_tensor(tensor)
    if values is None or values.is_nested or values.device.type == "meta":
        return None
    return values


def storage_address(tensor: Tensor) -> int:
    """Returns the address of the tensor's storage, or 0 if it has none."""
    try:
        values = storage_tensor(tensor)
        if values is None:
            return 0
        return int(values.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return 0  # a subclass that represents another tensor has no storage


@dataclass(frozen=True, slots=True)
class Rounding:
    """Describes a cast to a narrower dtype in the user's code."""

    dtype_name: str
    file: str
    function: str


@dataclass(frozen=True, slots=True)
class Lineage:
    """Describes what a value was computed from.

    sources    the kinds of tensors from which the value was computed, as the bits INPUT, WEIGHT,
               BUFFER and FLOAT_INPUT
    additions  the number of additions in a narrow dtype that Python code in backward made to
               compute it
    products   numbers that identify matrix products in another dtype than `compute`. The value
               depends on these products, and it is not known yet for what they are used
    rounding   the cast that created the value, if no arithmetic followed
    """

    sources: int = 0
    additions: int = 0
    products: frozenset[int] = frozenset()
    rounding: Rounding | None = None

    @property
    def is_activation(self) -> bool:
        """Whether the value is an activation. An activation depends on the inputs and the weights
        of the model, as every hidden state does. A value that depends on a floating-point input is
        an activation too.
        """
        return (
            bool(self.sources & FLOAT_INPUT) or (self.sources & (INPUT | WEIGHT)) == INPUT | WEIGHT
        )


EMPTY_LINEAGE = Lineage()


def merge_lineages(lineages: list[Lineage]) -> Lineage:
    """Combines the lineages of several values. The result is the lineage of a value that was
    computed from all of them.
    """
    if len(lineages) < 2:
        return lineages[0] if lineages else EMPTY_LINEAGE
    sources = 0
    for lineage in lineages:
        sources |= lineage.sources
    return Lineage(
        sources,
        max(lineage.additions for lineage in lineages),
        frozenset().union(*(lineage.products for lineage in lineages)),
    )


class Lineages:
    """Stores for each tensor what its values were computed from (see `Lineage`).

    Tensors that share memory share one `Lineage`, so that views and in-place operators need no
    special rules. A weak reference to the storage prevents PyTorch from reusing its address, but
    does not keep its memory alive.
    """

    def __init__(self) -> None:
        self._by_storage: dict[int, tuple[StorageWeakRef, Lineage]] = {}

    def get(self, tensor: Tensor) -> Lineage | None:
        key = storage_address(tensor)
        entry = self._by_storage.get(key) if key else None
        return entry[1] if entry else None

    def share_storage(self, first: Tensor, second: Tensor) -> bool:
        """Whether both tensors share one storage."""
        return bool(key := storage_address(first)) and key == storage_address(second)

    def set(self, tensor: Tensor, lineage: Lineage) -> None:
        key = storage_address(tensor)
        values = storage_tensor(tensor)
        if not key or values is None:
            return
        entry = self._by_storage.get(key)
        self._by_storage[key] = (
            entry[0] if entry else StorageWeakRef(values.untyped_storage()),
            lineage,
        )

    def set_weights(self, model: nn.Module) -> None:
        """Marks the model's weights, their gradients and the scales of quantised weights as tensors
        that come from weights (WEIGHT). The scales may themselves be quantised.
        """
        tensors = [*gathered_weights(model)]
        for parameter in model.parameters():
            tensors += [parameter] if parameter.grad is None else [parameter, parameter.grad]
            state = getattr(parameter, "quant_state", None)
            while state is not None:
                collect_tensors(list(vars(state).values()), tensors)
                state = getattr(state, "state2", None)
        for tensor in tensors:
            self.set(tensor, Lineage(WEIGHT))


# part of a step -> the role that declares the dtype of its arithmetic
_ROLE_OF_REGION = {
    LOSS: "loss",
    BACKWARD: "grads",
    AFTER_BACKWARD: "grads",
    UPDATE: "optimizer",
}


class Call:
    """Describes one call of an operator: its inputs and outputs, its caller, and the part of the
    training step in which it runs.

    checker          the `contract.ContractChecker` that checks the call
    op               the operator
    args, kwargs     its arguments
    inputs, outputs  the tensors in its arguments and results
    region           the part of the training step in which it runs (`tape.FORWARD`, ...)
    module           the name of the running module; "" outside of modules
    role             the part of the precision (`compute`, `loss`, `grads`, `optimizer`, ...) that
                     declares the dtype of the call
    """

    def __init__(
        self,
        checker: Any,
        op: Operator | None,
        args: tuple,
        kwargs: dict,
        inputs: list[Tensor],
        outputs: list[Tensor],
    ) -> None:
        self.op: Any = op
        self.args = args
        self.kwargs = kwargs
        self.inputs = inputs
        self.outputs = outputs
        self.observation: Observation = checker.observation
        self.region: str = checker.step.current_region()
        self.module: str = checker.step.module
        self.location = self.module or self.region
        self.role = _ROLE_OF_REGION.get(self.region, checker.role)
        self._precision = checker.precision

    @property
    def is_in_adapter(self) -> bool:
        return "lora_" in self.module

    @cached_property
    def caller(self) -> Caller:
        return find_caller(skip_deferred_frames=self.op is not None and self.op.kind == CAST)

    @cached_property
    def written_tensors(self) -> list[Tensor]:
        """Returns the tensors into which the call writes."""
        written_arguments = [
            value for writes, value in zip(self.op.is_written, self.args) if writes
        ]
        return collect_tensors([*written_arguments, self.kwargs.get("out")], [])

    def dtype(self) -> str | None:
        """Returns the dtype of the arithmetic. This is the dtype that the call requests, or else
        the dtype to which the operands are promoted. Returns None if no tensor is floating-point.
        """
        requested_dtype = self.kwargs.get("dtype")
        if requested_dtype is not None and self.op.kind in (SUM, CREATE):
            return float_dtype_name(requested_dtype)
        if (
            self.op.base_name in ("_softmax", "_log_softmax")
            and len(self.args) > 2
            and self.args[2] is True
        ):
            return "fp32"
        floating_operands = [t for t in self.inputs if float_dtype_name(t.dtype)]
        if not floating_operands:
            return next(
                (dtype_name for t in self.outputs if (dtype_name := float_dtype_name(t.dtype))),
                None,
            )
        non_scalar_operands = [t for t in floating_operands if t.dim()] or floating_operands
        dtype = non_scalar_operands[0].dtype
        for tensor in non_scalar_operands[1:]:
            if self.op.kind != PRODUCT:
                dtype = torch.promote_types(dtype, tensor.dtype)
        return float_dtype_name(dtype)

    def written_numbers(self) -> list[Any]:
        """Returns the numbers that the operator writes. These are its Scalar arguments, and tensors
        of a wider dtype that hold a single number.
        """
        schema = getattr(self.op.func, "_schema", None)
        arguments = schema.arguments if schema is not None else []
        arguments_by_name = {
            **dict(zip((argument.name for argument in arguments), self.args)),
            **self.kwargs,
        }
        scalars = [
            arguments_by_name[argument.name]
            for argument in arguments
            if "number" in str(argument.type)
            and isinstance(arguments_by_name.get(argument.name), int | float | complex)
        ]
        output = self.outputs[0]
        wider_scalars = [
            t
            for t in self.inputs
            if not t.dim()
            and t.is_floating_point()
            and t.itemsize > output.itemsize
            and not t.is_meta
        ]
        return scalars + [float(t) for t in wider_scalars if output.dim()]

    def contains_number(self, number: complex) -> bool:
        """Whether this number occurs in the result of the operator. For example, the bound of a
        clamp may not occur in the result.
        """
        output = self.outputs[0]
        return self.op.kind == CREATE or bool((output == torch.tensor(number).to(output)).any())

    def rounds_numbers(self) -> bool:
        """Whether the operator rounds a number that it writes."""
        return any(
            is_rounded(number, self.outputs[0].dtype) and self.contains_number(number)
            for number in self.written_numbers()
        )

    def rounds_ramp(self) -> bool:
        """Whether the sequence that the operator creates (arange, linspace) has other values than
        the same sequence in fp32.
        """
        output = self.outputs[0]
        dtype_arguments = (
            {"out": torch.empty_like(output, dtype=torch.float32)}
            if "out" in self.kwargs
            else {"dtype": torch.float32}
        )
        try:
            exact = self.op(*self.args, **{**self.kwargs, **dtype_arguments})
        except (RuntimeError, TypeError):
            return True
        return not torch.equal(collect_tensors(exact, [])[0], output.float())

    def is_inexact(self) -> bool:
        """Whether the operator returns other values if its operands are converted to fp32 first."""
        if any(self.op.is_written) or self.outputs[0].numel() > MAX_RECOMPUTED_ELEMENTS:
            return True

        def widened(tensor: Tensor) -> Tensor:
            if tensor.is_floating_point():
                return tensor.float()
            return tensor

        try:
            args, kwargs = torch.utils._pytree.tree_map_only(
                Tensor, widened, (self.args, self.kwargs)
            )
            exact = self.op(*args, **kwargs)
        except (RuntimeError, TypeError):
            return True
        wide = dense_values(collect_tensors(exact, [])[0])
        values = dense_values(self.outputs[0])
        if wide is None or values is None or wide.shape != values.shape:
            return True
        return not torch.equal(wide.float().nan_to_num(), values.float().nan_to_num())

    def operand_dtype_reason(self, dtype_name: str) -> str:
        """Explains why the operands of a matrix product have this dtype. Call this method while the
        matrix product runs, because it reads the current autocast state.
        """
        device = self.outputs[0].device.type
        if not torch.is_autocast_enabled(device):
            return "its operands have that dtype, and no autocast is on there"
        autocast_dtype = float_dtype_name(torch.get_autocast_dtype(device))
        if autocast_dtype == dtype_name:
            return f"an autocast to {dtype_name} is on there"
        return (
            f"its operands have that dtype, and the autocast to {autocast_dtype} that is on there does not"
            " cast them for this operator"
        )

    def report(self, role: str, message: str, *, observed: str, cause: str, rule: str = "") -> None:
        """Reports that this call violates the dtype that is declared for `role`
        (`Observation.report`).
        """
        caller_suffix = f" at {self.caller.file_and_line}" if self.caller.kind != AUTOGRAD else ""
        self.observation.report(
            role,
            f"{message} ({self.location}{caller_suffix})",
            location=self.location,
            observed=observed,
            rule=rule,
            cause=cause,
            declared=getattr(self._precision, role),
            file=self.caller.file,
            line=self.caller.line,
        )


def is_rounded(number: complex, dtype: torch.dtype) -> bool:
    parts = (number.real, number.imag) if isinstance(number, complex) else (number,)
    real = dtype.to_real() if dtype.is_complex else dtype
    finite = [part for part in map(float, parts) if math.isfinite(part) and abs(part) < MASK_BOUND]
    exact = torch.tensor(finite, dtype=torch.float32)
    return not torch.equal(exact, exact.to(real).float())
