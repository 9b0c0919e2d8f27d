"""Defines a recorded step of a program, with its calls and its losses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ....observe.origin import Site
from ..graph import read_grad_fn
from .positions import Position

# attributes whose values are views of the tensor
_VIEW_ATTRIBUTES = frozenset(("T", "mT", "H", "mH", "real", "imag", "data"))


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """A recorded call. An entry is a call of a module that no other module called, or a call of a
    function outside of modules.

    function         the module, or the function
    outputs          the floating-point tensors in the result
    autocast         device -> dtype of autocast during the call
    random_state     the state of the generators before a module's call; None for a function
    owner            the program's expression for the module, or for the model that contains it
    number_expressions  number among the arguments of a function -> the program's expression for it
    instruction      the offset of the instruction that made the call
    versions         how often each of the outputs was written at the end of the call
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[Tensor]
    autocast: dict[str, torch.dtype]
    site: Site | None
    random_state: dict[str, Tensor] | None = None
    owner: str = ""
    number_expressions: dict[float, str] = field(default_factory=dict)
    instruction: int = -1
    versions: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "versions", _read_versions(self.outputs))

    @property
    def is_overwritten(self) -> bool:
        """True if the program has written into an output after the call."""
        return self.versions != _read_versions(self.outputs)

    @property
    def position(self) -> Position | None:
        return None if self.site is None else Position(self.site, self.instruction)

    @property
    def is_in_place(self) -> bool:
        """True for functions such as `add_` and `__iadd__`, and for `x[i] = y`."""
        name = self.name
        is_operator = name.startswith("__i") and name.endswith("__") and name != "__invert__"
        is_method = name.endswith("_") and not name.endswith("__")
        return is_operator or is_method or self.is_assignment

    @property
    def is_assignment(self) -> bool:
        """True for `x[i] = y`, which returns nothing."""
        return self.function is Tensor.__setitem__

    @property
    def is_module(self) -> bool:
        return isinstance(self.function, nn.Module)

    @property
    def takes_part(self) -> bool:
        """True if autograd recorded the call. Calls that autograd did not record must not run
        again, because they may change a tensor, for example by initialising a weight.
        """
        return any(read_grad_fn(tensor) is not None for tensor in self.outputs)

    @property
    def name(self) -> str:
        if self.is_module:
            return type(self.function).__name__
        name = getattr(self.function, "__name__", "")
        if name == "__get__":
            return str(self.function.__self__.__name__)
        return name or type(self.function).__name__


def _read_versions(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    # a tensor that was made in inference mode has no version
    return tuple(0 if tensor.is_inference() else tensor._version for tensor in tensors)


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """The recorded calls before one backward, and the tensors on which backward was called.

    written_buffers  ids of the buffers that the calls have written
    bad_call         an earlier call of a module without a gradient whose result is not finite
    quantity         what the tensors in `losses` are
    """

    entries: Sequence[Entry]
    losses: Sequence[Tensor]
    gradients: Sequence[Tensor | None]
    number: int
    scale: float | None = None
    written_buffers: frozenset[int] = frozenset()
    bad_call: Entry | None = None
    quantity: str = "loss"


def is_plain_attribute(function: Any) -> bool:
    """Whether a function reads an attribute that autograd does not record, such as `shape`."""
    if function.__name__ != "__get__":
        return False
    return getattr(function.__self__, "__name__", "") not in _VIEW_ATTRIBUTES


def collect_tensors(value: Any) -> list[Tensor]:
    """Returns all tensors in a value and in the containers inside it, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        items: Iterable[Any] = value.values()
    elif isinstance(value, (list, tuple)):
        items = value
    else:
        fields = getattr(value, "__dataclass_fields__", {})
        items = [getattr(value, name, None) for name in fields]
    return [tensor for item in items for tensor in collect_tensors(item)]


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """True if none of the floating-point tensors contains NaN or inf. For all tensors with the same
    device and dtype, the function waits for the device only once.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        value = tensor._local_tensor if hasattr(tensor, "_local_tensor") else tensor
        value = value.detach()
        if value.is_sparse:
            value = value._values()
        if value.is_floating_point() and value.numel():
            groups.setdefault((value.device, value.dtype), []).append(value)
    return all(_is_finite_group(group) for group in groups.values())


@torch.no_grad()
def _is_finite_group(group: list[Tensor]) -> bool:
    # the norm is 13 times faster than the largest magnitude on a CPU, but can overflow
    norms = torch.stack(torch._foreach_norm(group))
    if bool(norms.isfinite().all()):
        return True
    largest = torch.stack(torch._foreach_norm(group, float("inf")))
    return bool(largest.isfinite().all())


def collect_gradients(entries: Sequence[Entry]) -> Iterator[Tensor]:
    """Yields the gradients of all parameters and leaf tensors that the recorded calls use. Each
    gradient is yielded only once.
    """
    leaves: dict[int, Tensor] = {}
    for entry in entries:
        if entry.is_module:
            leaves.update((id(p), p) for p in entry.function.parameters())
        else:
            tensors = collect_tensors((entry.args, entry.kwargs))
            leaves.update(
                (id(t), t) for t in tensors if t.requires_grad and read_grad_fn(t) is None
            )
    for leaf in leaves.values():
        if leaf.grad is not None:
            yield leaf.grad
