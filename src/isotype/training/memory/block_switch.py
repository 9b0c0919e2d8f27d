"""A switch for recomputation on each block of a diffusers model (`precision.denoiser_blocks`).

diffusers has one switch for a whole model. Here a block's own forward is put under checkpointing on the instance, so that some blocks may
recompute and others not, as in transformers' models.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ...instance_method import InstanceMethod


def put_switch(block: nn.Module) -> None:
    """Makes a block ask its `gradient_checkpointing` and `_gradient_checkpointing_func` at every call, as transformers' layers do."""
    if getattr(block.__dict__.get("forward"), "__func__", None) is not _forward:
        InstanceMethod(_forward, block).put()


def _forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    method: InstanceMethod = block.__dict__["forward"]
    own = method.before or method.own()
    if not (block.training and getattr(block, "gradient_checkpointing", False)):
        return own(*args, **kwargs)
    names = tuple(kwargs)
    count = len(args)

    def run(*values: Any) -> Any:
        return own(*values[:count], **dict(zip(names, values[count:])))

    # all of them by position: checkpointing sees the tensors among its arguments
    return block._gradient_checkpointing_func(run, *args, *kwargs.values())  # type: ignore[operator]  # the function that apply_checkpointing put there
