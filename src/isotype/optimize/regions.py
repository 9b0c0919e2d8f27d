"""Decoder layers as compiled regions: one function that `torch.compile` has made runs in every layer of a training step.

A region is compiled whole (`fullgraph`) and for any batch size and length (`dynamic`), so that layers and lengths share one graph; the
first layer, whose input needs no gradient, has its own. Sampling, evaluation, and whatever looks at each operator or module run the same
code uncompiled: an observed step, a memory plan, a trace, hooks. Modules keep their classes and names, so that files of weights have no
`_orig_mod`. Dropout draws the same numbers as uncompiled. Layers of two halves (`layers`) are regions there; others run their class's own
forward as one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as modules
from transformers.utils import logging

from ..errors import UsageError
from ..instance_method import InstanceMethod

logger = logging.get_logger(__name__)
CACHES = ("past_key_values", "layer_past")
COMPILED = "_isotype_compiled"


def is_region(layer: nn.Module) -> bool:
    return COMPILED in vars(layer)


def mark(layer: nn.Module, *, compiled: bool) -> None:
    """`region` gives this layer compiled functions from now on, or no longer."""
    vars(layer).pop(COMPILED, None)
    if compiled:
        vars(layer)[COMPILED] = True


def region(layer: nn.Module, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function(layer, ...)` as it shall run now: compiled, or as it is."""
    return compiled(function) if is_region(layer) and runs_compiled(layer) else function


def runs_compiled(layer: nn.Module) -> bool:
    """Whether this is a training step in which nothing looks inside the layer.

    A dispatch mode is how an observer, a plan and a tracer see operators. Hooks inside are asked for here because a graph has no guard on
    them: it would leave out one that was added after it was made. Those of `apply_precision` are part of the graph (`in_graphs`).
    """
    if not layer.training or not torch.is_grad_enabled() or torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return False
    return not modules._has_any_global_hook() and not any(_has_hooks(m) for m in layer.modules() if m is not layer)


def _has_hooks(module: nn.Module) -> bool:
    own = module.__dict__
    if own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]:
        return True
    return any(not getattr(hook, "in_graphs", False) for hook in own["_forward_hooks"].values())


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as one graph. Raises UsageError where it cannot be one, with the compiler's reason."""
    import torch._dynamo.config as settings
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    # `fallback_random` draws with PyTorch's generators in the order of the uncompiled code
    options: dict[str, str | int | bool | Callable[..., Any]] = {"fallback_random": True, "guard_filter_fn": _guards}
    made = torch.compile(function, fullgraph=True, dynamic=True, options=options)
    # a scale is a constant of the model, which an op may ask for
    made = settings.patch(specialize_float=True)(made)

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return made(*args, **kwargs)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise UsageError(
                f"model.compile: layers: {type(args[0]).__name__} is not one graph: {reason}", fix="model.compile: none"
            ) from error

    return run


def _guards(found: Sequence[Any]) -> list[bool]:
    """All guards but that a module's forward is this very object: each layer has its own, and its function is guarded besides."""
    return [not (isinstance(guard.value, InstanceMethod) and guard.guard_type == "CLOSURE_MATCH") for guard in found]


def without_cache(given: dict[str, Any]) -> None:
    """A recompute would fill the cache a second time. transformers' layers take it away too, and say so once."""
    taken = [name for name in CACHES if given.get(name) is not None] + (["use_cache"] if given.get("use_cache") else [])
    if taken:
        given.update({name: False if name == "use_cache" else None for name in taken})
        logger.warning_once(f"Caching is incompatible with gradient checkpointing: training goes on without {', '.join(taken)}.")
