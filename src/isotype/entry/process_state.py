"""Restores the state of the process after a run: a run in a notebook or a sweep must not change what runs after it.

A run seeds the generators, may forbid nondeterministic algorithms, and silences libraries. It also depends on settings of the process that
a caller may have changed: the default dtype, the gradient mode and autocast. It begins with PyTorch's own defaults for these.
"""

from __future__ import annotations

import logging
import os
import random
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # set by `train.deterministic`
LIBRARIES = ("peft", "bitsandbytes")


@contextmanager
def own_process_state() -> Iterator[None]:
    """Sets the default dtype to fp32, records gradients, and leaves the caller's autocast. Restores everything on exit."""
    import numpy as np
    import torch
    import transformers

    from ..training.undisturbed import callers_autocast_left

    levels = {name: logging.getLogger(name).level for name in LIBRARIES}
    said, bars = transformers.utils.logging.get_verbosity(), transformers.utils.logging.is_progress_bar_enabled()
    dtype, workspace = torch.get_default_dtype(), os.environ.get(WORKSPACE)
    strict, warn_only = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    python, numpy = random.getstate(), np.random.get_state()
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(torch.random.fork_rng(devices=range(torch.cuda.device_count())))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(callers_autocast_left())
        try:
            torch.set_default_dtype(torch.float32)
            yield
        finally:
            torch.set_default_dtype(dtype)
            torch.use_deterministic_algorithms(strict, warn_only=warn_only)
            random.setstate(python)
            np.random.set_state(numpy)
            _set_or_remove(WORKSPACE, workspace)
            transformers.utils.logging.set_verbosity(said)
            if bars:
                transformers.utils.logging.enable_progress_bar()
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)


def _set_or_remove(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
