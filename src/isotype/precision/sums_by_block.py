"""Adds up, block by block, the gradients of a tensor that several blocks are given.

Every block of a denoiser takes the embedding of time or the caption, and the gradients of such a tensor are in the compute dtype: in bf16
the order in which they are added moves the gradients of the layers that made it by 2e-3 of their largest element. PyTorch adds them use by
use. FSDP's hooks make it add those of a unit first. So that a model which processes share has the gradients of one process, every run
adds them as FSDP does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class SumByBlock:
    """Forward hook of a block, before it runs: each tensor that needs a gradient gets a view, where the gradients of its uses meet."""

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return (_met(args), _met(kwargs)) if torch.is_grad_enabled() else None


def _met(given: Any) -> Any:
    """The same with views in the place of tensors that need a gradient, inside tuples, lists and dictionaries too."""
    if isinstance(given, Tensor):
        return given.view_as(given) if given.requires_grad else given
    if type(given) in (tuple, list):
        return type(given)(map(_met, given))
    if type(given) is dict:
        return {name: _met(value) for name, value in given.items()}
    return given


def sum_by_block(block: nn.Module) -> None:
    block.register_forward_pre_hook(SumByBlock(), with_kwargs=True)


def remove(module: nn.Module) -> None:
    for key in [key for key, hook in module._forward_pre_hooks.items() if isinstance(hook, SumByBlock)]:
        del module._forward_pre_hooks[key]
        module._forward_pre_hooks_with_kwargs.pop(key, None)
