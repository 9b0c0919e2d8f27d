"""Chooses which layers of a model recompute their activations in backward, and whether their inputs
are stored in host memory.

A recomputed layer stores only its input. In transformers one class marks the layers that support
this; the switch is set on instances, so that some layers may recompute and others not. diffusers
has one switch for a whole model: there a block's own forward is put under checkpointing on the
instance. Recomputing draws the same random numbers, so that the results are bit-identical.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ...config.schema import TrainSection
from ...errors import UsageError, refuse_where
from ...instance_method import InstanceMethod
from ...precision.apply import denoiser_blocks, inner_model
from ...precision.vision import LANGUAGE, vision_parts
from .offload import HostMemory
from .run_again import call_and_recompute

NONE = "none"
LAYERS = "layers"
OFFLOAD = "layers+offload"
AUTO = "auto"
ENTER = "_isotype_enter"  # of a block whose weights may be away: what brings them


@dataclass(frozen=True)
class Checkpointing:
    """The choice for a run. `layers`: positions of the recomputed layers among `of`; `reason`: the
    file, or why `auto` chose it; `keep_attention`: the outputs of their attention are stored.
    """

    kind: str
    layers: tuple[int, ...] = ()
    of: int = 0
    reason: str = "train.gradient_checkpointing"
    keep_attention: bool = False

    def __str__(self) -> str:
        if self.kind == NONE:
            return f"none ({self.reason})"
        n = len(self.layers)
        if n == self.of:
            which = "all"
        elif self.layers == tuple(range(n)):
            which = f"the first {n}"
        else:
            which = " ".join(map(str, self.layers))
        kept = ", attention kept" if self.keep_attention else ""
        return f"{self.kind}: {which} of {self.of}{kept} ({self.reason})"

    def as_settings(self) -> dict[str, Any]:
        """The configuration that gives exactly this."""
        n = len(self.layers)
        if n == self.of:
            given: Any = "all"
        elif self.layers == tuple(range(n)):
            given = n
        else:
            given = list(self.layers)
        return {
            "train.gradient_checkpointing": self.kind,
            "train.checkpointed_layers": "all" if self.kind == NONE else given,
            "train.keep_attention": self.keep_attention,
        }


def check_settings(train: TrainSection, *, device_type: str) -> None:
    """Raises  UsageError for settings that would have no effect, before anything is loaded."""
    kind = train.gradient_checkpointing
    layers = train.checkpointed_layers
    key = f"train.gradient_checkpointing: {kind}"
    none = kind in (NONE, AUTO)
    fix = "train.gradient_checkpointing: layers"
    refuse_where(
        (
            kind == OFFLOAD and device_type == "cpu",
            f"{key} moves activations to host memory, and on a CPU they are there already",
            fix,
        ),
        (
            none and layers != "all",
            f"train.checkpointed_layers: {layers} has no effect with {key}",
            fix,
        ),
        (
            none and train.keep_attention,
            f"train.keep_attention has no effect with {key}",
            f"{fix}, or leave train.keep_attention to auto",
        ),
        (
            kind != AUTO and train.memory is not None,
            f"train.memory has no effect with {key}",
            "train.gradient_checkpointing: auto",
        ),
    )


def as_configured(model: nn.Module, train: TrainSection) -> Checkpointing:
    """The choice that the configuration makes for this model; `auto_checkpointing` decides about
    `auto`. Raises UsageError.
    """
    assert train.gradient_checkpointing != AUTO
    if train.gradient_checkpointing == NONE:
        return Checkpointing(NONE)
    of = len(checkpointable(model))
    if not of:
        raise UsageError(
            f"train.gradient_checkpointing: {train.gradient_checkpointing}: this architecture marks"
            " no layers that could be recomputed",
            fix="train.gradient_checkpointing: none",
        )
    return Checkpointing(
        train.gradient_checkpointing,
        chosen(train.checkpointed_layers, of),
        of,
        keep_attention=train.keep_attention,
    )


def chosen(layers: str | int | list[int], of: int) -> tuple[int, ...]:
    """The positions that `train.checkpointed_layers` names among `of` layers. Raises UsageError for
    one that does not exist.
    """
    if layers == "all":
        return tuple(range(of))
    if isinstance(layers, str):
        return tuple(range(0, of, int(layers.removeprefix("every "))))
    if isinstance(layers, int):
        positions = tuple(range(layers))
    else:
        positions = tuple(sorted(set(layers)))
    if not positions or positions[-1] >= of:
        most = f"0 to {of - 1}" if isinstance(layers, list) else f"1 to {of}"
        raise UsageError(
            f"train.checkpointed_layers: {layers}: the model has {of} layers", fix=f"{most}, or all"
        )
    return positions


def checkpointable(model: nn.Module) -> list[Any]:
    """The layers that can be checkpointed, in the order of the model: those that transformers
    marks, not those inside another one; else the blocks of a diffusers model.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    found: list[Any] = []
    inside = ""
    inner = inner_model(model)
    parts = vision_parts(inner)
    for name, module in inner.named_modules():
        if isinstance(module, GradientCheckpointingLayer) and not (
            inside and name.startswith(inside)
        ):
            if (
                parts is None
                or parts.part_kind(name) == LANGUAGE
                or any(p.requires_grad for p in module.parameters())
            ):
                found.append(module)
            inside = f"{name}."
    return found or denoiser_blocks(model)


def apply_checkpointing(model: nn.Module, what: Checkpointing) -> None:
    """Switches recomputation of every layer on or off. May be called again with another choice."""
    keep: Callable[..., Any] = partial(call_and_recompute, keep_attention=what.keep_attention)
    function = HostMemory(call=keep) if what.kind == OFFLOAD else keep
    for position, layer in enumerate(checkpointable(model)):
        if position in what.layers:
            layer.gradient_checkpointing = WhileRecording()
        else:
            layer.gradient_checkpointing = False
        enter = layer.__dict__.get(ENTER)
        if enter is None:
            layer._gradient_checkpointing_func = function
        else:
            layer._gradient_checkpointing_func = partial(_entering, enter, function)
        if type(layer).__module__.startswith("diffusers."):
            put_switch(layer)


def _entering(
    enter: Callable[[], None],
    function: Callable[..., Any],
    run: Callable[..., Any],
    *args: Any,
    **options: Any,
) -> Any:
    """`function(run, ...)`, where each `run`, also inside backward, has its weights."""

    def entered(*values: Any, **named: Any) -> Any:
        enter()
        return run(*values, **named)

    return function(entered, *args, **options)


class WhileRecording:
    """A switch that is true only while autograd records. transformers disables the cache of every
    layer that is in training mode and whose switch is on; with a plain True, a generation in
    training mode would see one token at a time and no earlier ones.
    """

    def __bool__(self) -> bool:
        return torch.is_grad_enabled()


def put_switch(block: nn.Module) -> None:
    """Makes a block ask its `gradient_checkpointing` and `_gradient_checkpointing_func` at every
    call, as transformers' layers do.
    """
    if getattr(block.__dict__.get("forward"), "__func__", None) is not _forward:
        InstanceMethod(_forward, block).install()


def _forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    method: InstanceMethod = block.__dict__["forward"]
    own = method.previous or method.bound_class_method()
    if not (block.training and getattr(block, "gradient_checkpointing", False)):
        return own(*args, **kwargs)
    names = tuple(kwargs)
    count = len(args)

    def run(*values: Any) -> Any:
        return own(*values[:count], **dict(zip(names, values[count:])))

    # all of them by position: checkpointing sees the tensors among its arguments
    return block._gradient_checkpointing_func(run, *args, *kwargs.values())  # type: ignore[operator]  # the function that apply_checkpointing put there
