"""The blocks of diffusers' models, through which the hidden states run."""

from __future__ import annotations

from torch import nn


def denoiser_blocks(model: nn.Module) -> list[nn.Module]:
    """The members of module lists whose class a diffusers model names in `_no_split_modules`, in the order of the model; of nested ones
    the inner (a U-Net's resnet and transformer blocks). Empty for other models."""
    for owner in model.modules():
        if type(owner).__module__.startswith("diffusers.") and getattr(owner, "_no_split_modules", None):
            classes = set(owner._no_split_modules)  # type: ignore[arg-type]  # a list of names, where there is one
            lists = [module for module in owner.modules() if isinstance(module, nn.ModuleList)]
            members = {block for blocks in lists for block in blocks if type(block).__name__ in classes}
            return [block for block in owner.modules() if block in members and not _holds_another(block, members)]
    return []


def _holds_another(block: nn.Module, members: set[nn.Module]) -> bool:
    return any(inner in members for inner in block.modules() if inner is not block)
