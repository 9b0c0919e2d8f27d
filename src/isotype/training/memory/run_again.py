"""Runs a layer so that backward runs it again: of all tensors that autograd would save, only the
layer's inputs are kept.

A saved tensor is replaced by an empty place. The first place that backward asks for runs the layer
again, which fills all of them and stops where the last one is full. Each place gives its tensor
away once, so that memory is freed as backward goes on; a second backward over the same graph runs
the layer once more. As torch.utils.checkpoint with use_reentrant=False, for a fraction of its calls
of Python functions: what has no user here (other contexts, a trace of operators, groups of
backwards) is left out.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointError

from ...environment import planned
from ...ops.recomputed_layer import RecomputedLayer


def call_and_recompute(
    function: Callable[..., Any], *args: Any, keep_attention: bool, **options: Any
) -> Any:
    """`function(*args)`, whose activations are recomputed in backward.

    keep_attention  attention's output and logsumexp are kept, so that the recompute runs no
                    attention
    options         of RecomputedLayer: put and get, which say where what is kept waits
    """
    layer = RecomputedLayer(keep_attention=keep_attention, **options)
    # autocast is restored here; a plan's is another one
    return run_again_in_backward(partial(layer.run, planned.keep_autocast(function)), *args)


def run_again_in_backward(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`. In backward it runs again, under the same autocast and, where it drew
    random numbers, with the same ones.

    Raises  CheckpointError in backward where the second run saves other shapes or dtypes than the
            first
    """
    call = _Call(function, args)
    with saved_tensors_hooks(call.empty, call.taken):
        output = function(*args)
    call.forward_ended()
    return output


class _Inputs(torch.autograd.Function):
    """Saves tensors as any operator does: they are checked for changes in place, and hooks around
    the layer see them.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0)


class _Place:
    """Of one saved tensor. It belongs to the graph: once the graph frees it, nothing is kept for
    it.
    """

    __slots__ = ("__weakref__", "device", "dtype", "shape", "tensor")
    tensor: Tensor | None
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class _Full(Exception):
    """The last place is filled: what the layer would compute now nobody reads."""


class _Call:
    """One call of a layer."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.function = function
        self.places = list[weakref.ref[_Place]]()
        tensors = {i: value for i, value in enumerate(args) if isinstance(value, Tensor)}
        self.rest = [None if i in tensors else value for i, value in enumerate(args)]
        self.positions = tuple(tensors)
        self.inputs: Any = _Inputs.apply(torch.empty(0, requires_grad=True), *tensors.values())
        self.devices = list(
            dict.fromkeys(
                t.device for t in tensors.values() if t.device.type not in ("cpu", "meta")
            )
        )
        self.autocast = [
            _autocast(kind)
            for kind in dict.fromkeys(("cpu", *(device.type for device in self.devices)))
        ]
        self.random: list[Tensor] | None = _random_states(self.devices)

    def forward_ended(self) -> None:
        if all(
            _bits(a) == _bits(b) for a, b in zip(self.random or (), _random_states(self.devices))
        ):
            self.random = None

    def empty(self, tensor: Tensor) -> _Place:
        place = _Place()
        place.tensor, place.shape, place.dtype, place.device = (
            None,
            tensor.shape,
            tensor.dtype,
            tensor.device,
        )
        self.places.append(weakref.ref(place))
        return place

    def taken(self, place: _Place) -> Tensor:
        if place.tensor is None:
            self.run_again()
        tensor, place.tensor = place.tensor, None
        assert tensor is not None
        return tensor

    def run_again(self) -> None:
        args = list(self.rest)
        for i, tensor in zip(self.positions, self.inputs.grad_fn.saved_tensors):
            args[i] = tensor
        count, filled = len(self.places), 0

        def fill(tensor: Tensor) -> Tensor:
            nonlocal filled
            # an output would hold the operator that holds it
            tensor = tensor.detach() if tensor.requires_grad else tensor
            place = self.places[filled]()
            filled += 1
            if place is not None:
                if (
                    tensor.shape != place.shape
                    or tensor.dtype != place.dtype
                    or tensor.device != place.device
                ):
                    raise CheckpointError(
                        _DIFFERS + f": {_words(tensor)} where it saved {_words(place)}"
                    )
                place.tensor = tensor
            if filled == count:
                raise _Full
            return tensor

        with ExitStack() as stack:
            if self.random is not None:
                stack.enter_context(_drawing_from(self.random, self.devices))
            for then in self.autocast:
                if then != _autocast(then[0]):
                    stack.enter_context(
                        torch.autocast(
                            then[0], enabled=then[1], dtype=then[2], cache_enabled=then[3]
                        )
                    )
            stack.enter_context(saved_tensors_hooks(fill, _as_it_is))
            stack.enter_context(torch.enable_grad())
            try:
                self.function(*args)
            except _Full:
                return
        raise CheckpointError(_DIFFERS + f": {filled} tensors where it saved {count}")


_DIFFERS = (
    "a recomputed layer saves other tensors in backward than in forward, by a condition that"
    " changed between the two"
)


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _words(of: Tensor | _Place) -> str:
    return f"{tuple(of.shape)} {of.dtype} on {of.device}"


def _autocast(kind: str) -> tuple[str, bool, torch.dtype, bool]:
    """Of a device type: whether it is on, its dtype, whether it keeps the weights that it cast."""
    return (
        kind,
        torch.is_autocast_enabled(kind),
        torch.get_autocast_dtype(kind),
        torch.is_autocast_cache_enabled(),
    )


def _random_states(devices: list[torch.device]) -> list[Tensor]:
    return [
        torch.get_rng_state(),
        *(torch.get_device_module(device).get_rng_state(device) for device in devices),
    ]


def _bits(state: Tensor) -> bytes:
    # past PyTorch's dispatcher: who records or counts a step's operators sees none
    return bytes(state.numpy())


@contextmanager
def _drawing_from(states: list[Tensor], devices: list[torch.device]) -> Iterator[None]:
    """Within this block random numbers are those that follow `states`; afterwards they go on where
    they were.
    """
    before = _random_states(devices)
    _put_random(states, devices)
    try:
        yield
    finally:
        _put_random(before, devices)


def _put_random(states: list[Tensor], devices: list[torch.device]) -> None:
    torch.set_rng_state(states[0])
    for device, state in zip(devices, states[1:]):
        torch.get_device_module(device).set_rng_state(state, device)
