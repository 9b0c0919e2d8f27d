"""The blocks of diffusers' models that can recompute their activations.

diffusers has one switch for a whole model. Here a block's own forward is put under checkpointing on the instance, so that some blocks may
recompute and others not, as in transformers' models.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ...instance_method import InstanceMethod


def denoiser_blocks(model: nn.Module) -> list[nn.Module]:
    """The members of module lists whose class a diffusers model names in `_no_split_modules`, in the order of the model; of nested ones
    the inner (a U-Net's resnet and transformer blocks). Empty for other models."""
    found: list[nn.Module] = []
    for owner in model.modules():
        if type(owner).__module__.startswith("diffusers.") and getattr(owner, "_no_split_modules", None):
            classes = set(owner._no_split_modules)  # type: ignore[arg-type]  # a list of names, where there is one
            lists = [module for module in owner.modules() if isinstance(module, nn.ModuleList)]
            members = {block for blocks in lists for block in blocks if type(block).__name__ in classes}
            found += [block for block in owner.modules() if block in members and not _holds_another(block, members)]
            break
    return found


def _holds_another(block: nn.Module, members: set[nn.Module]) -> bool:
    return any(inner in members for inner in block.modules() if inner is not block)


def put_switch(block: nn.Module) -> None:
    """Makes a block ask its `gradient_checkpointing` and `_gradient_checkpointing_func` at every call, as transformers' layers do."""
    if not isinstance(block.__dict__.get("forward"), InstanceMethod):
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
