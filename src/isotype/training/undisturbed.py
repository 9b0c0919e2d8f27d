"""What surrounds an evaluation or a sample in the middle of training, so that training goes on as without it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ..runs.checkpoint.snapshot import random_state, restore_random_state


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode and no gradients; afterwards every module has the mode it had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
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
