"""One layer's call under PyTorch's checkpoint: run for the forward, and run again, as it was, inside backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.utils.checkpoint import checkpoint

from ...environment import planned
from ...ops.recompute import RecomputedLayer


def call_and_recompute(function: Callable[..., Any], *args: Any, keep_attention: bool, **away: Any) -> Any:
    """`function(*args)`, whose activations are recomputed in backward.

    keep_attention  attention's output and logsumexp are kept, so that the recompute runs no attention
    away            put and get of RecomputedLayer: where stored results are until backward
    """
    layer = RecomputedLayer(keep_attention=keep_attention, **away)
    # PyTorch's checkpoint restores its own autocast; a plan's is another one
    return checkpoint(partial(layer.run, planned.as_now(function)), *args, use_reentrant=False)
