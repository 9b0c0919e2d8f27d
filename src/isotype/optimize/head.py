"""The head: returns deferred logits when the forward of its causal LM was given labels or `deferring` says so, else plain logits."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.backend import reference_runs
from ..placement import Placement
from ..precision.apply import inner_model
from . import fused_head
from .deferred import defer
from .instances import KERNEL_LIBRARIES, foreign, library_of, placement, put, settings_of, taken
from .manifest import Manifest

PART = "head"
_forwards = threading.local()

BYPASSED = "TRL's fused head computes the loss from the head's weight, and never calls the head: its logits are not deferred"


@dataclass
class HeadSettings:
    """manifest  gets a note when another library's loss does not call the head"""

    manifest: Manifest


def head_forward(self: nn.Linear, hidden: Tensor) -> Tensor:
    # a graph holds real tensors, torch.func's differ from step to step, forward mode has no rule for deferred ones, and a backward hook is
    # given the gradient of real logits
    asked = getattr(_forwards, "depth", 0) or (getattr(_forwards, "with_gradients", 0) and torch.is_grad_enabled())
    if not asked or torch.compiler.is_compiling() or reference_runs() or has_backward_hooks(self):
        own: Tensor = type(self).forward(self, hidden)
        return own
    return defer(hidden, self.weight, self.bias)


def has_backward_hooks(head: nn.Module) -> bool:
    """Its own, or those that PyTorch calls for every module."""
    everywhere = nn.modules.module
    of_all = everywhere._global_backward_hooks or everywhere._global_backward_pre_hooks
    return bool(head._backward_hooks or head._backward_pre_hooks or of_all)


def has_labels(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return kwargs.get("labels") is not None


def before_forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A hook of the causal LM: its forward has labels, so the logits will go into a loss."""
    if kwargs.get("fused_lm_head") and fused_head.placed(inner_model(model)) is None:
        _passed_by(model)
    if has_labels(model, args, kwargs):
        _forwards.depth = getattr(_forwards, "depth", 0) + 1


def _passed_by(model: Any) -> None:
    """Says once that TRL's loss is the one that runs: a setting without effect is never silent."""
    settings: HeadSettings = settings_of(model.get_output_embeddings())
    if BYPASSED not in settings.manifest.notes:
        settings.manifest.notes.append(BYPASSED)
        warnings.warn(f"isotype.optimize: {BYPASSED}", stacklevel=3)


def after_forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Also called when forward raised, so that a failed step does not leave the head deferring."""
    if has_labels(model, args, kwargs):
        _forwards.depth = max(0, getattr(_forwards, "depth", 0) - 1)


@contextmanager
def deferring(*, with_gradients: bool = False) -> Iterator[None]:
    """Within this block optimized heads return deferred logits without labels: for a loop that computes its own loss.

    with_gradients  only where gradients are on: rollouts and reference models of a training step read real logits
    """
    name = "with_gradients" if with_gradients else "depth"
    setattr(_forwards, name, getattr(_forwards, name, 0) + 1)
    try:
        yield
    finally:
        setattr(_forwards, name, getattr(_forwards, name) - 1)


def place(path: str, model: nn.Module, manifest: Manifest) -> Placement:
    """Makes the head of the causal LM at this path return deferred logits, where nothing else owns the head or its loss."""
    get_head: Callable[[], nn.Module | None] | None = getattr(model, "get_output_embeddings", None)
    head = get_head() if get_head is not None else None
    if head is None:
        return placement(PART, path, model, None, "the model has no output embeddings")
    reason = why_not(model, head)
    if reason is not None:
        return placement(PART, path, head, None, reason)
    inner = inner_model(model)
    by_trl = fused_head.of(inner) is not None
    if by_trl:
        fused_head.place(inner)
    # TRL's reads the weight of any head, as of one that PEFT trains in full, and calls none
    if type(head) is nn.Linear:
        put(head, head_forward, HeadSettings(manifest))
        model.register_forward_pre_hook(before_forward, with_kwargs=True)
        model.register_forward_hook(after_forward, with_kwargs=True, always_call=True)
    op, note = ("linear_log_probs", "for TRL's fused head") if by_trl else ("linear_cross_entropy", "deferred logits")
    return placement(PART, path, head, op, note)


def why_not(model: nn.Module, head: nn.Module) -> str | None:
    """Why this head of a causal LM stays as it is, or None."""
    inner = inner_model(model)
    if type(head) is not nn.Linear and fused_head.of(inner) is None:
        return f"the head is a {type(head).__name__}, not a plain Linear"
    reason = taken(head)
    if reason is not None:
        return reason
    # a fused loss of TRL's or Liger's replaces the model's forward, on the instance or on its class, and never calls the head
    other = fused_head.why_not(inner) if fused_head.of(inner) is not None else foreign(model)
    if other is not None:
        return f"the model: {other}, which may have a loss of its own"
    if library_of(F.cross_entropy) in KERNEL_LIBRARIES:
        return f"torch's cross_entropy was replaced by {library_of(F.cross_entropy)}"
    return None


def remove_hooks(model: nn.Module) -> None:
    """By function, not by handle: a deep copy has the hooks and no handle."""
    for hooks, flags, ours in (
        (model._forward_pre_hooks, (model._forward_pre_hooks_with_kwargs,), before_forward),
        (model._forward_hooks, (model._forward_hooks_with_kwargs, model._forward_hooks_always_called), after_forward),
    ):
        for key in [key for key, hook in hooks.items() if hook is ours]:
            del hooks[key]
            for flag in flags:
                flag.pop(key, None)
