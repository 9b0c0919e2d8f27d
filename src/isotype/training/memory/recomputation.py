"""Chooses which layers of a model recompute their activations in backward. The choice also says
whether the inputs of these layers are stored in host memory.

A layer that recomputes stores only its input. In transformers, all layers that support
recomputation have the same base class, which has a switch for it. This module sets the switch of
each layer separately, so that only the chosen layers recompute their activations. A model of
diffusers has only one switch, which applies to all its blocks. Therefore this module replaces the
forward method of each diffusers block that recomputes. The recomputation uses the same random
numbers, so that the results are bit-identical.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ...config.schema import TrainSection
from ...errors import UsageError, raise_first_refusal
from ...instance_method import InstanceMethod
from ...precision.apply import denoiser_blocks, inner_model
from ...precision.vision import LANGUAGE, vision_parts
from .checkpointed_call import call_and_recompute
from .offload import HostMemory

NONE = "none"
LAYERS = "layers"
OFFLOAD = "layers+offload"
AUTO = "auto"
# the attribute of a block whose weights are offloaded: a function that copies them to the device
PREPARE_ATTRIBUTE = "_isotype_enter"


@dataclass(frozen=True)
class Checkpointing:
    """Which layers of a run recompute their activations.

    kind            `none`, `layers`, or `layers+offload` (the inputs of the layers are stored in
                    host memory)
    layers          the positions of the recomputed layers
    layer_count     the number of all layers
    reason          the setting that made this choice, or the reason for which `auto` made it
    keep_attention  whether the layers that recompute store the output of attention
    """

    kind: str
    layers: tuple[int, ...] = ()
    layer_count: int = 0
    reason: str = "train.gradient_checkpointing"
    keep_attention: bool = False

    def __str__(self) -> str:
        if self.kind == NONE:
            return f"none ({self.reason})"
        count = len(self.layers)
        if count == self.layer_count:
            layer_text = "all"
        elif self.layers == tuple(range(count)):
            layer_text = f"the first {count}"
        else:
            layer_text = " ".join(map(str, self.layers))
        attention_text = ", attention kept" if self.keep_attention else ""
        return f"{self.kind}: {layer_text} of {self.layer_count}{attention_text} ({self.reason})"

    def to_settings(self) -> dict[str, Any]:
        """Returns settings with which a later run recomputes exactly these layers."""
        count = len(self.layers)
        if count == self.layer_count:
            layers: Any = "all"
        elif self.layers == tuple(range(count)):
            layers = count
        else:
            layers = list(self.layers)
        return {
            "train.gradient_checkpointing": self.kind,
            "train.checkpointed_layers": "all" if self.kind == NONE else layers,
            "train.keep_attention": self.keep_attention,
        }


def check_settings(train: TrainSection, *, device_type: str) -> None:
    """Checks the settings before anything is loaded. Raises UsageError for settings that would have
    no effect.
    """
    kind = train.gradient_checkpointing
    layers = train.checkpointed_layers
    key = f"train.gradient_checkpointing: {kind}"
    is_off = kind in (NONE, AUTO)
    fix = "train.gradient_checkpointing: layers"
    raise_first_refusal(
        (
            kind == OFFLOAD and device_type == "cpu",
            f"{key} moves activations to host memory, and on a CPU they are there already",
            fix,
        ),
        (
            is_off and layers != "all",
            f"train.checkpointed_layers: {layers} has no effect with {key}",
            fix,
        ),
        (
            is_off and train.keep_attention,
            f"train.keep_attention has no effect with {key}",
            f"{fix}, or leave train.keep_attention to auto",
        ),
        (
            kind != AUTO and train.memory is not None,
            f"train.memory has no effect with {key}",
            "train.gradient_checkpointing: auto",
        ),
    )


def configured_checkpointing(model: nn.Module, train: TrainSection) -> Checkpointing:
    """Returns which layers of this model recompute according to the configuration. The setting must
    not be `auto`. Raises UsageError if the model has no layers that support recomputation.
    """
    assert train.gradient_checkpointing != AUTO
    if train.gradient_checkpointing == NONE:
        return Checkpointing(NONE)
    total = len(checkpointable_layers(model))
    if not total:
        raise UsageError(
            f"train.gradient_checkpointing: {train.gradient_checkpointing}: this architecture marks"
            " no layers that could be recomputed",
            fix="train.gradient_checkpointing: none",
        )
    return Checkpointing(
        train.gradient_checkpointing,
        select_layers(train.checkpointed_layers, total),
        total,
        keep_attention=train.keep_attention,
    )


def select_layers(layers: str | int | list[int], total: int) -> tuple[int, ...]:
    """Returns the positions of the layers that the setting `train.checkpointed_layers` names. The
    model has `total` layers. Raises UsageError if a named layer does not exist.

    layers  "all", "every N", the number of first layers, or a list of positions
    """
    if layers == "all":
        return tuple(range(total))
    if isinstance(layers, str):
        return tuple(range(0, total, int(layers.removeprefix("every "))))
    if isinstance(layers, int):
        positions = tuple(range(layers))
    else:
        positions = tuple(sorted(set(layers)))
    if not positions or positions[-1] >= total:
        allowed = f"0 to {total - 1}" if isinstance(layers, list) else f"1 to {total}"
        raise UsageError(
            f"train.checkpointed_layers: {layers}: the model has {total} layers",
            fix=f"{allowed}, or all",
        )
    return positions


def checkpointable_layers(model: nn.Module) -> list[Any]:
    """Returns the layers for which gradient checkpointing is possible, in the order of the model.
    In transformers, these are the layers with the base class `GradientCheckpointingLayer`. If such
    a layer is inside another such layer, only the outer layer is returned. In a diffusers model,
    these are the blocks.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers: list[Any] = []
    outer_prefix = ""
    inner = inner_model(model)
    vision = vision_parts(inner)
    for name, module in inner.named_modules():
        if isinstance(module, GradientCheckpointingLayer) and not (
            outer_prefix and name.startswith(outer_prefix)
        ):
            if (
                vision is None
                or vision.part_kind(name) == LANGUAGE
                or any(p.requires_grad for p in module.parameters())
            ):
                layers.append(module)
            outer_prefix = f"{name}."
    return layers or denoiser_blocks(model)


def apply_checkpointing(model: nn.Module, checkpointing: Checkpointing) -> None:
    """Switches recomputation on or off for every layer. This function may be called again later to
    change the choice.
    """
    call: Callable[..., Any] = partial(
        call_and_recompute, keep_attention=checkpointing.keep_attention
    )
    function = HostMemory(call=call) if checkpointing.kind == OFFLOAD else call
    for position, layer in enumerate(checkpointable_layers(model)):
        if position in checkpointing.layers:
            layer.gradient_checkpointing = OnWhileRecording()
        else:
            layer.gradient_checkpointing = False
        prepare = layer.__dict__.get(PREPARE_ATTRIBUTE)
        if prepare is None:
            layer._gradient_checkpointing_func = function
        else:
            layer._gradient_checkpointing_func = partial(_prepare_and_run, prepare, function)
        if type(layer).__module__.startswith("diffusers."):
            install_switch(layer)


def _prepare_and_run(
    prepare: Callable[[], None],
    function: Callable[..., Any],
    run: Callable[..., Any],
    *args: Any,
    **options: Any,
) -> Any:
    """Calls `function(run, ...)`. Before each call of `run`, the weights of the block are copied to
    the device. This also happens when `run` is called again in backward.
    """

    def run_prepared(*values: Any, **kwargs: Any) -> Any:
        prepare()
        return run(*values, **kwargs)

    return function(run_prepared, *args, **options)


class OnWhileRecording:
    """A switch that is true only while autograd records operators.

    If a layer is in training mode and this switch is true, transformers disables the layer's cache.
    With a switch that is always true, a model that generates text in training mode would have no
    cache, and the layer would see only the newest token.
    """

    def __bool__(self) -> bool:
        return torch.is_grad_enabled()


def install_switch(block: nn.Module) -> None:
    """Makes a block read its `gradient_checkpointing` and `_gradient_checkpointing_func` at every
    call, as transformers' layers do.
    """
    if getattr(block.__dict__.get("forward"), "__func__", None) is not _forward:
        InstanceMethod(_forward, block).install()


def _forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    method: InstanceMethod = block.__dict__["forward"]
    original_forward = method.previous or method.bound_class_method()
    if not (block.training and getattr(block, "gradient_checkpointing", False)):
        return original_forward(*args, **kwargs)
    names = tuple(kwargs)
    count = len(args)

    def run(*values: Any) -> Any:
        return original_forward(*values[:count], **dict(zip(names, values[count:])))

    # all arguments are passed by position, because checkpointing finds tensors only among these
    return block._gradient_checkpointing_func(run, *args, *kwargs.values())  # type: ignore[operator]  # the function that apply_checkpointing put there
