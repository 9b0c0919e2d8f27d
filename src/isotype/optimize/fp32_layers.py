"""Lets decoder layers compute in fp32, in a run whose `precision.compute` is fp16.

The largest fp16 number is 65504. Some models were trained in bf16, and in a few of their layers the
residual stream has larger values. Loss scaling does not help, since the overflow is in the forward
pass. These layers then get fp32 weights and inputs and run without autocast. All other layers
compute in fp16.

`find_overflowing_layers` runs the model once, with every layer in fp32. So it finds the layers
whose values are too large for fp16. `use_fp32_layers` changes the layers for the rest of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..instance_method import INSTALLED_KEY
from ..precision.apply import (
    FP32_LAYERS_KEY,
    decoder_layers,
    inner_model,
    is_cast_hook,
    is_quantised,
)
from ..runs.folder import RunFolder

FP32_LAYERS_FILE = "fp32_layers.json"
# half of fp16's largest number, because later steps may have larger values than the measured one
MAX_VALUE = torch.finfo(torch.float16).max / 2


def find_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the decoder layers of a model, by the name of the module. A block inside a layer, such
    as an expert, is a part of this layer.
    """
    inner = inner_model(model)
    blocks = set(decoder_layers(inner))
    layers: dict[str, nn.Module] = {}
    parts: set[nn.Module] = set()
    for name, module in inner.named_modules():
        if module in blocks and module not in parts:
            layers[name] = module
            parts.update(module.modules())
    return layers


def find_overflowing_layers(model: nn.Module, forward: Callable[[], object]) -> dict[str, float]:
    """Runs `forward` once with all decoder layers in fp32. Returns the layers whose values do not
    fit fp16, each with the largest absolute value that was found. The value is infinite if the
    layer, computed in fp16, returns a number that is not finite.
    """
    largest: dict[str, float] = {}
    with torch.no_grad(), _measuring(model, largest):
        forward()
    return {name: value for name, value in largest.items() if not value <= MAX_VALUE}


@contextmanager
def _measuring(model: nn.Module, largest: dict[str, float]) -> Iterator[None]:
    handles: list[Any] = []
    for name, layer in find_layers(model).items():
        wide = _Fp32Layer(layer, next_is_wide=True, keeps_weights=False)
        meter = _Meter(name, wide, largest)
        for module in layer.modules():
            handles.append(module.register_forward_hook(meter.read, with_kwargs=True))
        # the layer's own hook runs last, when all values of the layer are known
        handles.append(layer.register_forward_pre_hook(wide.begin, with_kwargs=True))
        handles.append(layer.register_forward_hook(wide.end, always_call=True))
        handles.append(layer.register_forward_hook(meter.try_fp16, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Meter:
    """Records the largest absolute value that the modules of a layer read or return."""

    def __init__(self, name: str, wide: _Fp32Layer, largest: dict[str, float]) -> None:
        self.name = name
        self.wide = wide
        self.largest = largest

    def read(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        values: list[Tensor] = []
        _map_tensors((args, output), values.append)
        for value in values:
            if value.is_floating_point() and value.numel():
                self.add(float(value.detach().abs().amax()))

    def try_fp16(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Also runs the layer in fp16, to find overflows inside fused ops, whose intermediate
        values cannot be observed.
        """
        if self.largest.get(self.name, 0.0) > MAX_VALUE:
            return
        half = _map_tensors((args, kwargs), _to_half)
        values: list[Tensor] = []
        _map_tensors(module.forward(*half[0], **half[1]), values.append)
        if not all(bool(value.isfinite().all()) for value in values):
            self.add(float("inf"))

    def add(self, value: float) -> None:
        if value != value:  # not a number
            value = float("inf")
        self.largest[self.name] = max(value, self.largest.get(self.name, 0.0))


def _map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """Applies the function to each tensor in a value, which may be a tensor, or a tuple, list or
    dictionary with tensors.
    """
    if isinstance(value, Tensor):
        return function(value)
    if type(value) in (tuple, list):
        return type(value)(_map_tensors(item, function) for item in value)
    if type(value) is dict:
        return {key: _map_tensors(item, function) for key, item in value.items()}
    return value


def _to_half(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float16) if tensor.dtype == torch.float32 else tensor


def _to_fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


class _Fp32Layer:
    """Two hooks of a layer. They switch autocast off while the layer runs, and cast its inputs to
    fp32.

    next_is_wide   true if the next layer computes in fp32 or if there is no next layer. The output
                   is then not cast to fp16
    keeps_weights  whether the weights stay fp32 after the layer has run. `find_overflowing_layers`
                   sets it to False, so that only one layer at a time needs the memory for fp32
                   weights
    """

    def __init__(self, layer: nn.Module, *, next_is_wide: bool, keeps_weights: bool) -> None:
        self.next_is_wide = next_is_wide
        self.undo: list[Callable[[], None]] = []
        self.autocast: list[bool] = []
        self.keeps_weights = keeps_weights
        if keeps_weights:
            _widen_layer(layer, [])

    def begin(self, layer: nn.Module, args: Any, kwargs: Any) -> Any:
        device_type = next(layer.parameters()).device.type
        self.autocast.append(torch.is_autocast_enabled(device_type))
        torch.set_autocast_enabled(device_type, False)
        if not self.keeps_weights:
            _widen_layer(layer, self.undo)
        return _map_tensors((args, kwargs), _to_fp32)

    def end(self, layer: nn.Module, args: Any, output: Any) -> Any:
        device_type = next(layer.parameters()).device.type
        torch.set_autocast_enabled(device_type, self.autocast.pop())
        if not self.keeps_weights:
            for undo in reversed(self.undo):
                undo()
            self.undo.clear()
        return output if self.next_is_wide else _map_tensors(output, _to_half)


def _widen_layer(layer: nn.Module, undo: list[Callable[[], None]]) -> None:
    """Casts the weights of a layer to fp32. The norms and the 4-bit layers inside it then compute
    in fp32 too.
    """

    def set_value(target: Any, attribute: str, value: Any) -> None:
        previous = getattr(target, attribute)
        undo.append(lambda: setattr(target, attribute, previous))
        setattr(target, attribute, value)

    for parameter in layer.parameters():
        is_narrow = parameter.dtype in (torch.float16, torch.bfloat16)
        if is_narrow and not is_quantised(parameter):
            set_value(parameter, "data", parameter.data.float())
    module: Any
    for module in layer.modules():
        for hook in module._forward_hooks.values():
            if is_cast_hook(hook):
                set_value(hook, "cast_dtype", torch.float32)
        if hasattr(module, "compute_type_is_set"):
            set_value(module, "compute_dtype", torch.float32)
        installed = module.__dict__.get(INSTALLED_KEY)
        if installed is not None and getattr(installed[0], "out_dtype", None) is not None:
            settings = replace(installed[0], out_dtype=torch.float32)
            undo.append(lambda m=module, old=installed: m.__dict__.update({INSTALLED_KEY: old}))  # type: ignore[misc]
            module.__dict__[INSTALLED_KEY] = (settings, *installed[1:])


def use_fp32_layers(model: nn.Module, names: Collection[str]) -> None:
    """Lets these decoder layers compute in fp32 from now on. The declared dtype of their weights
    (`declared_dtype`) is then fp32, so that the check of observed dtypes does not report them.
    """
    layers = find_layers(model)
    ordered = list(layers)
    for position, name in enumerate(ordered):
        if name not in names:
            continue
        following = ordered[position + 1 : position + 2]
        next_is_wide = not following or following[0] in names
        wide = _Fp32Layer(layers[name], next_is_wide=next_is_wide, keeps_weights=True)
        layers[name].register_forward_pre_hook(wide.begin, with_kwargs=True)
        layers[name].register_forward_hook(wide.end, always_call=True)
    vars(inner_model(model))[FP32_LAYERS_KEY] = tuple(n for n in ordered if n in names)


def has_fp32_layers(model: nn.Module) -> bool:
    """Returns True after `use_fp32_layers`."""
    return bool(vars(inner_model(model)).get(FP32_LAYERS_KEY))


def use_stored_fp32_layers(model: nn.Module, run_folder: Path) -> None:
    """Reads from the run folder which layers computed in fp32 in this run, and lets these layers
    compute in fp32. Does nothing if the run has no such layers.
    """
    stored = RunFolder(run_folder).read_json(FP32_LAYERS_FILE).get("layers", {})
    if stored:
        use_fp32_layers(model, [name for name in find_layers(model) if name in stored])
