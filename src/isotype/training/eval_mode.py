"""Context managers around an evaluation, a sample or a user's code during training: each restores the state of training on exit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ..precision.parts import settle
from ..runs.checkpoint.snapshot import random_state, restore_random_state


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
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
def same_draws() -> Iterator[None]:
    """Every block under it draws the same numbers, so that two evaluations of a model that draws in its forward can be compared."""
    with random_state_restored():
        torch.manual_seed(0)
        random.seed(0)
        yield


@contextmanager
def process_settings_restored() -> Iterator[None]:
    """Restores gradient mode and default dtype on exit."""
    grad, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    try:
        yield
    finally:
        torch.set_grad_enabled(grad)
        torch.set_default_dtype(dtype)


@contextmanager
def random_state_restored() -> Iterator[None]:
    """Restores all random state on exit."""
    tensors, state = random_state()
    try:
        yield
    finally:
        restore_random_state(tensors, state)
