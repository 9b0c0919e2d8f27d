"""Context managers for an evaluation or a sample during training, which restore the state of training on exit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ..precision.own_part import settle
from ..runs.checkpoint.snapshot import random_state, restore_random_state


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode and no gradients; afterwards every module has the mode it had."""
    with modes_restored(model), torch.no_grad():
        model.eval()
        try:
            yield
        finally:
            settle(model)


@contextmanager
def modes_restored(model: nn.Module) -> Iterator[None]:
    """Puts every module back into training or evaluation mode on exit, as it was."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def random_state_restored() -> Iterator[None]:
    """Restores all random state on exit."""
    tensors, state = random_state()
    try:
        yield
    finally:
        restore_random_state(tensors, state)
