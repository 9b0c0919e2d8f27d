"""What an observed step computes with: tensors in nested values, their memory, what each was
computed from, and one call of an operator.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..dtypes import name
from ..precision.parts import gathered_weights
from .operators import CAST, CREATE, PRODUCT, SUM, Operator
from .origin import ENGINE, Caller, caller
from .record import Observation
from .tape import BACKWARD, GRADIENTS, LOSS, UPDATE

INPUT = 1
WEIGHT = 2
BUFFER = 4
FLOAT_INPUT = 8
BOUND = 1e4  # numbers beyond it fill masks
SMALL = 1 << 20  # most elements of a tensor that is computed again to check it for loss

_REAL = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}


def float_word(dtype: torch.dtype) -> str | None:
    """The word of a floating dtype, or of the parts of a complex one; else None."""
    real = _REAL.get(dtype, dtype)
    return name(real) if real.is_floating_point else None


def plain_tensors(value: object, into: list[Tensor]) -> list[Tensor]:
    """Every tensor in arguments or results, however nested."""
    if isinstance(value, Tensor):
        into.append(value)
    elif isinstance(value, list | tuple):
        for part in value:
            plain_tensors(part, into)
    elif isinstance(value, dict):
        for part in value.values():
            plain_tensors(part, into)
    return into


def floating_tensors(output: object) -> list[Tensor]:
    """Every floating tensor in what a module returned, however it is nested."""
    return [tensor for tensor in plain_tensors(output, []) if tensor.is_floating_point()]


def stored(tensor: Tensor) -> Tensor | None:
    """The tensor whose storage holds its values: itself, or the values of a sparse one. None for
    oneDNN's layout, which has no storage.
    """
    if tensor.layout is torch.strided:
        return tensor
    if tensor.layout is torch.sparse_coo:
        return tensor._values()
    return None if tensor.is_mkldnn else tensor.values()


def is_wrapper(tensor: Tensor) -> bool:
    """Whether its class computes itself, with other tensors than its dtype says, as those of
    quantisation libraries do. PyTorch's own (sharded tensors, rows of several lengths) and
    Isotype's have the dtype that they say.
    """
    kind = type(tensor)
    if kind is Tensor or kind is torch.nn.Parameter:
        return False
    own = getattr(kind, "__torch_dispatch__", None) is not Tensor.__torch_dispatch__
    return own and not kind.__module__.startswith(("torch.", "isotype."))


def readable(tensor: Tensor) -> Tensor | None:
    """Its values as a dense tensor, to look at them. None for the meta device, rows of several
    lengths and oneDNN's layout.
    """
    values = stored(tensor)
    if values is None or values.is_nested or values.device.type == "meta":
        return None
    return values


def address(tensor: Tensor) -> int:
    """Of its storage; 0 where it has none."""
    try:
        values = stored(tensor)
        if values is None:
            return 0
        return int(values.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return 0  # a subclass that stands for something else has no storage


@dataclass(frozen=True, slots=True)
class Lineage:
    """What is known of a value.

    from_     what it was made of: bits
    added     how many narrow additions in Python code of backward it is the end of
    products  products outside `compute` that it depends on and whose use is not known yet
    """

    from_: int = 0
    added: int = 0
    products: frozenset[int] = frozenset()

    @property
    def activation(self) -> bool:
        """Whether it depends on both the model's inputs and its weights, as every hidden state
        does, or was given as floats.
        """
        return bool(self.from_ & FLOAT_INPUT) or (self.from_ & (INPUT | WEIGHT)) == INPUT | WEIGHT


NOTHING = Lineage()


def joined(parts: list[Lineage]) -> Lineage:
    """The lineage of a value that was computed from several others."""
    if len(parts) < 2:
        return parts[0] if parts else NOTHING
    from_ = 0
    for part in parts:
        from_ |= part.from_
    return Lineage(
        from_,
        max(part.added for part in parts),
        frozenset().union(*(part.products for part in parts)),
    )


class Lineages:
    """Storage -> lineage.

    The record belongs to a storage, not to a tensor, so that views and in-place operators need no
    rules of their own. A weak reference keeps the storage's address from being reused, but not its
    memory from being freed.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[StorageWeakRef, Lineage]] = {}

    def of(self, tensor: Tensor) -> Lineage | None:
        key = address(tensor)
        found = self._known.get(key) if key else None
        return found[1] if found else None

    def same(self, one: Tensor, other: Tensor) -> bool:
        """Whether both tensors share one storage."""
        return bool(found := address(one)) and found == address(other)

    def set(self, tensor: Tensor, lineage: Lineage) -> None:
        key = address(tensor)
        values = stored(tensor)
        if not key or values is None:
            return
        found = self._known.get(key)
        self._known[key] = (
            found[0] if found else StorageWeakRef(values.untyped_storage()),
            lineage,
        )

    def set_weights(self, model: nn.Module) -> None:
        """Of weights, their gradients, and a quantised weight's scales, which may be quantised
        themselves.
        """
        tensors = [*gathered_weights(model)]
        for parameter in model.parameters():
            tensors += [parameter] if parameter.grad is None else [parameter, parameter.grad]
            state = getattr(parameter, "quant_state", None)
            while state is not None:
                plain_tensors(list(vars(state).values()), tensors)
                state = getattr(state, "state2", None)
        for tensor in tensors:
            self.set(tensor, Lineage(WEIGHT))


class Call:
    """One call of an operator: its inputs and outputs, its caller, and the part of the step.

    contract  the reader of the tape (`contract.Contract`)
    """

    def __init__(
        self,
        contract: Any,
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
        self.seen: Observation = contract.seen
        self.region: str = contract.step.now()
        self.module: str = contract.step.module
        self.where = self.module or self.region
        self.role = {LOSS: "loss", BACKWARD: "grads", GRADIENTS: "grads", UPDATE: "optimizer"}.get(
            self.region, contract.role
        )
        self._precision = contract.precision

    @cached_property
    def by(self) -> Caller:
        return caller(asked=self.op is not None and self.op.kind == CAST)

    @cached_property
    def written(self) -> list[Tensor]:
        """The tensors that it writes into."""
        written = [value for writes, value in zip(self.op.writes, self.args) if writes]
        return plain_tensors([*written, self.kwargs.get("out")], [])

    def dtype(self) -> str | None:
        """The dtype of the arithmetic: the requested one, else the dtype to which the operands are
        promoted; None if none is floating.
        """
        asked = self.kwargs.get("dtype")
        if asked is not None and self.op.kind in (SUM, CREATE):
            return float_word(asked)
        if (
            self.op.plain in ("_softmax", "_log_softmax")
            and len(self.args) > 2
            and self.args[2] is True
        ):
            return "fp32"
        floats = [t for t in self.inputs if float_word(t.dtype)]
        if not floats:
            return next((word for t in self.outputs if (word := float_word(t.dtype))), None)
        several = [t for t in floats if t.dim()] or floats
        dtype = several[0].dtype
        for tensor in several[1:]:
            if self.op.kind != PRODUCT:
                dtype = torch.promote_types(dtype, tensor.dtype)
            else:
                dtype = dtype
        return float_word(dtype)

    def numbers(self) -> list[Any]:
        """The numbers that an operator writes: its arguments of the type Scalar, and single numbers
        in a wider tensor.
        """
        schema = getattr(self.op.func, "_schema", None)
        arguments = schema.arguments if schema is not None else []
        given = {**dict(zip((a.name for a in arguments), self.args)), **self.kwargs}
        found = [
            given[a.name]
            for a in arguments
            if "number" in str(a.type) and isinstance(given.get(a.name), int | float | complex)
        ]
        own = self.outputs[0]
        wider = [
            t
            for t in self.inputs
            if not t.dim() and t.is_floating_point() and t.itemsize > own.itemsize and not t.is_meta
        ]
        return found + [float(t) for t in wider if own.dim()]

    def holds(self, number: complex) -> bool:
        """Whether the number is in the result: the bound of a clamp may be in none."""
        own = self.outputs[0]
        return self.op.kind == CREATE or bool((own == torch.tensor(number).to(own)).any())

    def rounds_numbers(self) -> bool:
        """Whether a number that it writes is rounded."""
        return any(
            _rounds(number, self.outputs[0].dtype) and self.holds(number)
            for number in self.numbers()
        )

    def is_rounded_ramp(self) -> bool:
        """Whether the same ramp in fp32 has other values."""
        own = self.outputs[0]
        out = (
            {"out": torch.empty_like(own, dtype=torch.float32)}
            if "out" in self.kwargs
            else {"dtype": torch.float32}
        )
        try:
            exact = self.op(*self.args, **{**self.kwargs, **out})
        except (RuntimeError, TypeError):
            return True
        return not torch.equal(plain_tensors(exact, [])[0], own.float())

    def is_inexact(self) -> bool:
        """Whether the same operator on widened operands gives different values."""
        if any(self.op.writes) or self.outputs[0].numel() > SMALL:
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
        wide = readable(plain_tensors(exact, [])[0])
        own = readable(self.outputs[0])
        if wide is None or own is None or wide.shape != own.shape:
            return True
        return not torch.equal(wide.float().nan_to_num(), own.float().nan_to_num())

    def why(self, word: str) -> str:
        """Why a product's operands have that dtype: to ask while it runs."""
        device = self.outputs[0].device.type
        if not torch.is_autocast_enabled(device):
            return "its operands have that dtype, and no autocast is on there"
        asked = float_word(torch.get_autocast_dtype(device))
        if asked == word:
            return f"an autocast to {word} is on there"
        return (
            f"its operands have that dtype, and the autocast to {asked} that is on there does not"
            " cast them for this operator"
        )

    def report(self, role: str, message: str, *, observed: str, cause: str, rule: str = "") -> None:
        place = f" at {self.by.place}" if self.by.kind != ENGINE else ""
        self.seen.report(
            role,
            f"{message} ({self.where}{place})",
            symbol=self.where,
            observed=observed,
            rule=rule,
            cause=cause,
            declared=getattr(self._precision, role),
            file=self.by.file,
            line=self.by.line,
        )


def _rounds(number: complex, dtype: torch.dtype) -> bool:
    parts = (number.real, number.imag) if isinstance(number, complex) else (number,)
    real = dtype.to_real() if dtype.is_complex else dtype
    kept = [part for part in map(float, parts) if math.isfinite(part) and abs(part) < BOUND]
    exact = torch.tensor(kept, dtype=torch.float32)
    return not torch.equal(exact, exact.to(real).float())
