"""Context managers for an evaluation or a sample during training, which restore the state of training on exit."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ..precision.parts import settle
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
def same_draws() -> Iterator[None]:
    """Every block under it draws the same numbers, so that two evaluations of a model that draws in its forward can be compared."""
    with random_state_restored():
        torch.manual_seed(0)
        random.seed(0)
        yield


@contextmanager
def process_settings_restored() -> Iterator[None]:
    """Restores on exit the settings of the process that a run's result depends on: gradient mode, default dtype and device, autocast,
    number of threads, working directory."""
    grad, dtype, device = torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_default_device()
    threads, folder, depth = torch.get_num_threads(), os.getcwd(), _autocast_depth()
    autocast = {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")}
    try:
        yield
    finally:
        torch.set_grad_enabled(grad)
        torch.set_default_dtype(dtype)
        if torch.get_default_device() != device:
            torch.set_default_device(None if device.type == "cpu" else device)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        for kind, (enabled, word) in autocast.items():
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, word)
        _leave_autocast(depth)
        os.chdir(folder)


@contextmanager
def callers_autocast_left() -> Iterator[None]:
    """Leaves the autocast blocks of the caller, and enters them again on exit.

    Inside one, PyTorch keeps each weight as it was first cast until the block ends: every step would compute with the first step's weights.
    """
    depth, enabled = _autocast_depth(), {kind: torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")}
    _leave_autocast(0)
    for kind in enabled:
        torch.set_autocast_enabled(kind, False)
    try:
        yield
    finally:
        for kind, was in enabled.items():
            torch.set_autocast_enabled(kind, was)
        for _ in range(depth):
            torch.autocast_increment_nesting()


def _leave_autocast(depth: int) -> None:
    while _autocast_depth() > depth:
        torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()


def _autocast_depth() -> int:
    """How many autocast blocks are open; the weights that they cast are kept until it is 0."""
    depth: int = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return depth - 1


@contextmanager
def random_state_restored() -> Iterator[None]:
    """Restores all random state on exit."""
    tensors, state = random_state()
    try:
        yield
    finally:
        restore_random_state(tensors, state)
