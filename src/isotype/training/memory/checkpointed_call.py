"""Implements gradient checkpointing for one call of a layer. In backward, the layer runs again. Of
all tensors that autograd would save, only the layer's inputs are kept.

In forward, an empty slot is stored in place of each tensor that autograd saves. When backward reads
the first slot, the layer runs again until all slots are filled. A slot is emptied when it is read,
so that memory is freed during backward. If backward runs a second time over the same graph, the
layer runs once more.

torch.utils.checkpoint with use_reentrant=False gives the same result. This implementation needs far
fewer Python calls than torch's, because it leaves out features that Isotype does not use. For
example, it does not support other context managers around the second run of the layer.
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

from ...environment import planned_device
from ...ops.recomputed_layer import RecomputedLayer


def call_and_recompute(
    function: Callable[..., Any], *args: Any, keep_attention: bool, **options: Any
) -> Any:
    """Returns the result of `function(*args)`. The activations of `function` are recomputed in
    backward.

    keep_attention  whether to keep the output and the logsumexp of attention, so that attention is
                    not recomputed
    options         the functions `offload` and `restore` of RecomputedLayer, which move the kept
                    tensors
    """
    layer = RecomputedLayer(keep_attention=keep_attention, **options)
    # `run_again_in_backward` restores torch's autocast; `keep_autocast` restores that of a memory
    # plan
    return run_again_in_backward(partial(layer.run, planned_device.keep_autocast(function)), *args)


def run_again_in_backward(function: Callable[..., Any], *args: Any) -> Any:
    """Returns the result of `function(*args)`, and runs the function again in backward. The second
    run uses the same autocast settings and the same random numbers.

    Raises  CheckpointError in backward if the second run saves tensors with other shapes or dtypes
            than the first run
    """
    call = _CheckpointedCall(function, args)
    with saved_tensors_hooks(call.pack, call.unpack):
        output = function(*args)
    call.finish_forward()
    return output


class _InputSaver(torch.autograd.Function):
    """Saves the layer's inputs for backward with `save_for_backward`, as an ordinary operator does.
    So PyTorch checks whether the inputs were changed in place, and passes the inputs to the hooks
    for saved tensors that are active around the layer.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0)


class _SavedSlot:
    """A slot that replaces one tensor that autograd would save. The autograd graph owns the slot.
    If the graph has already freed the slot, its tensor is not stored when the layer runs again.
    """

    __slots__ = ("__weakref__", "device", "dtype", "shape", "tensor")
    tensor: Tensor | None
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class _AllSlotsFilled(Exception):
    """Is raised to stop the layer's second run when the last slot is filled, because backward needs
    none of the later results.
    """


class _CheckpointedCall:
    """One call of a layer. This object contains the inputs and the state that are needed to run the
    layer again.
    """

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.function = function
        self.slots = list[weakref.ref[_SavedSlot]]()
        tensors = {i: value for i, value in enumerate(args) if isinstance(value, Tensor)}
        self.other_args = [None if i in tensors else value for i, value in enumerate(args)]
        self.positions = tuple(tensors)
        self.inputs: Any = _InputSaver.apply(torch.empty(0, requires_grad=True), *tensors.values())
        self.devices = list(
            dict.fromkeys(
                t.device for t in tensors.values() if t.device.type not in ("cpu", "meta")
            )
        )
        self.autocast_states = [
            _autocast_state(device_type)
            for device_type in dict.fromkeys(("cpu", *(device.type for device in self.devices)))
        ]
        self.random_states: list[Tensor] | None = _random_states(self.devices)

    def finish_forward(self) -> None:
        if all(
            _random_state_bytes(a) == _random_state_bytes(b)
            for a, b in zip(self.random_states or (), _random_states(self.devices))
        ):
            self.random_states = None

    def pack(self, tensor: Tensor) -> _SavedSlot:
        slot = _SavedSlot()
        slot.tensor, slot.shape, slot.dtype, slot.device = (
            None,
            tensor.shape,
            tensor.dtype,
            tensor.device,
        )
        self.slots.append(weakref.ref(slot))
        return slot

    def unpack(self, slot: _SavedSlot) -> Tensor:
        if slot.tensor is None:
            self.recompute()
        tensor, slot.tensor = slot.tensor, None
        assert tensor is not None
        return tensor

    def recompute(self) -> None:
        args = list(self.other_args)
        for i, tensor in zip(self.positions, self.inputs.grad_fn.saved_tensors):
            args[i] = tensor
        count, filled = len(self.slots), 0

        def fill(tensor: Tensor) -> Tensor:
            nonlocal filled
            # without `detach` an output and the operator that saved it would keep each other alive
            tensor = tensor.detach() if tensor.requires_grad else tensor
            slot = self.slots[filled]()
            filled += 1
            if slot is not None:
                if (
                    tensor.shape != slot.shape
                    or tensor.dtype != slot.dtype
                    or tensor.device != slot.device
                ):
                    raise CheckpointError(
                        _MISMATCH
                        + f": {_describe_tensor(tensor)} where it saved {_describe_tensor(slot)}"
                    )
                slot.tensor = tensor
            if filled == count:
                raise _AllSlotsFilled
            return tensor

        with ExitStack() as stack:
            if self.random_states is not None:
                stack.enter_context(_use_random_states(self.random_states, self.devices))
            for state in self.autocast_states:
                if state != _autocast_state(state[0]):
                    stack.enter_context(
                        torch.autocast(
                            state[0], enabled=state[1], dtype=state[2], cache_enabled=state[3]
                        )
                    )
            stack.enter_context(saved_tensors_hooks(fill, _return_unchanged))
            stack.enter_context(torch.enable_grad())
            try:
                self.function(*args)
            except _AllSlotsFilled:
                return
        raise CheckpointError(_MISMATCH + f": {filled} tensors where it saved {count}")


_MISMATCH = (
    "a recomputed layer saves other tensors in backward than in forward, by a condition that"
    " changed between the two"
)


def _return_unchanged(tensor: Tensor) -> Tensor:
    return tensor


def _describe_tensor(tensor: Tensor | _SavedSlot) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"


def _autocast_state(device_type: str) -> tuple[str, bool, torch.dtype, bool]:
    """Returns the autocast state of a device type as a tuple (device type, whether autocast is on,
    its dtype, whether it caches weights after the cast).
    """
    return (
        device_type,
        torch.is_autocast_enabled(device_type),
        torch.get_autocast_dtype(device_type),
        torch.is_autocast_cache_enabled(),
    )


def _random_states(devices: list[torch.device]) -> list[Tensor]:
    return [
        torch.get_rng_state(),
        *(torch.get_device_module(device).get_rng_state(device) for device in devices),
    ]


def _random_state_bytes(state: Tensor) -> bytes:
    # NumPy bypasses PyTorch's dispatcher, so that a mode that records operators sees no extra ones
    return bytes(state.numpy())


@contextmanager
def _use_random_states(states: list[Tensor], devices: list[torch.device]) -> Iterator[None]:
    """Uses these random states within this block, and restores the previous states at its end."""
    previous = _random_states(devices)
    _set_random_states(states, devices)
    try:
        yield
    finally:
        _set_random_states(previous, devices)


def _set_random_states(states: list[Tensor], devices: list[torch.device]) -> None:
    torch.set_rng_state(states[0])
    for device, state in zip(devices, states[1:]):
        torch.get_device_module(device).set_rng_state(state, device)
