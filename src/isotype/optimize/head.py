"""The head: returns deferred logits when the forward of its causal LM was given labels or `deferring` says so, else plain logits."""

from __future__ import annotations

import inspect
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..lora import PackedLinear
from ..ops import linear_log_probs
from ..ops.autocast import autocast_off
from ..ops.backend import reference_runs
from ..ops.packed import widen
from ..placement import Placement
from ..precision.apply import inner_model
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
    if type(self) is PackedLinear:
        # widened once for the loss and its gradient
        return defer(hidden, widen(self.weight, self.weight.quant_state, self.compute_dtype or hidden.dtype), self.bias)
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
    if kwargs.get("fused_lm_head") and fused_head_of(inner_model(model)) is None:
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
    by_trl = trls_forward(inner) is not None
    if by_trl:
        place_fused_head(inner)
    # TRL's reads the weight of any head, as of one that PEFT trains in full, and calls none
    if type(head) in (nn.Linear, PackedLinear):
        put(head, head_forward, HeadSettings(manifest))
        model.register_forward_pre_hook(before_forward, with_kwargs=True)
        model.register_forward_hook(after_forward, with_kwargs=True, always_call=True)
    op, note = ("linear_log_probs", "for TRL's fused head") if by_trl else ("linear_cross_entropy", "deferred logits")
    return placement(PART, path, head, op, note)


def why_not(model: nn.Module, head: nn.Module) -> str | None:
    """Why this head of a causal LM stays as it is, or None."""
    inner = inner_model(model)
    if type(head) not in (nn.Linear, PackedLinear) and trls_forward(inner) is None:
        return f"the head is a {type(head).__name__}, not a plain Linear"
    reason = taken(head)
    if reason is not None:
        return reason
    # a fused loss of TRL's or Liger's replaces the model's forward, on the instance or on its class, and never calls the head
    other = why_no_fused_head(inner) if trls_forward(inner) is not None else foreign(model)
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


# --- TRL's fused head, answered by `linear_log_probs`: `model(..., labels=..., fused_lm_head=True)` gives the same fields. SFT, DPO, KTO,
# GRPO, RLOO and their like put a forward on the model (`add_fused_lm_head`) that runs the backbone, projects the labelled positions and
# returns per-token values. Its settings (temperature, softcap, scale, fields) are read from its closure; without the flag TRL's runs

IGNORED = -100
# TRL's name of a field -> the op's
FIELDS = {"entropy": "entropy", "log_sum_sq_probs": "log_sum_sq_probs", "mean_logits": "mean_logits", "is_top1": "top1"}
_NEEDED = {
    "temperature", "cast_lm_head_to_fp32", "outputs", "logit_scale", "final_logit_softcapping", "text_config", "backbone_attr",
    "original_forward",
}  # fmt: skip


@dataclass
class FusedHead:
    """What TRL's forward was made with, and what has run.

    before  TRL's bound forward
    calls   how often the op answered, and why TRL's own code did
    """

    before: Any
    options: dict[str, Any]
    calls: Counter[str] = field(default_factory=Counter)


def trls_forward(model: nn.Module) -> Any | None:
    """TRL's bound forward on this instance, or None."""
    bound = model.__dict__.get("forward")
    function = getattr(bound, "__func__", None)
    written = getattr(function, "__globals__", {}).get("__name__")
    # functools.wraps renames it: its code keeps its name
    code = getattr(function, "__code__", None)
    return bound if written == "trl.trainer.utils" and code is not None and code.co_name == "_fused_forward" else None


def fused_head_of(model: nn.Module) -> FusedHead | None:
    """What answers on this instance, or None."""
    found = settings_of(model)
    return found if isinstance(found, FusedHead) else None


def why_no_fused_head(model: nn.Module) -> str | None:
    """Why the op cannot answer for TRL's forward on this instance, or None."""
    options = _closure(trls_forward(model))
    missing = _NEEDED - set(options)
    if missing:
        return f"TRL's fused head has another form here (no {', '.join(sorted(missing))})"
    unknown = set(options["outputs"]) - {"log_probs", *FIELDS}
    return f"TRL's fused head has fields that the op has not: {', '.join(sorted(unknown))}" if unknown else None


def place_fused_head(model: nn.Module) -> None:
    """Puts the op in the place of TRL's forward."""
    bound = trls_forward(model)
    put(model, fused_head_forward, FusedHead(bound, _closure(bound)))


def _closure(bound: Any) -> dict[str, Any]:
    return dict(inspect.getclosurevars(bound.__func__).nonlocals)


def fused_head_forward(
    self: Any,
    *args: Any,
    fused_lm_head: bool = False,
    labels: Any = None,
    shift_labels: Any = None,
    num_items_in_batch: Any = None,
    **kwargs: Any,
) -> Any:
    head: FusedHead = settings_of(self)
    why_not = _why_trls_code(self, labels, shift_labels) if fused_lm_head else None
    if not fused_lm_head or why_not:
        if why_not:
            head.calls[why_not] += 1
        given = {"labels": labels, "shift_labels": shift_labels, "num_items_in_batch": num_items_in_batch}
        kwargs |= {name: value for name, value in given.items() if value is not None}
        # by the function, so that a deep copy's calls its own model
        return head.before.__func__(self, *args, fused_lm_head=fused_lm_head, **kwargs)
    options, text_config = head.options, head.options["text_config"]
    kwargs["use_cache"] = False
    if getattr(text_config, "output_router_logits", False):
        kwargs.setdefault("output_router_logits", True)
    made = getattr(self, options["backbone_attr"])(*args, **kwargs)
    hidden = made.last_hidden_state if shift_labels is not None else made.last_hidden_state[:, :-1]
    labels = shift_labels if shift_labels is not None else labels[:, 1:]
    head.calls["linear_log_probs"] += 1
    return _output(self, head, hidden, labels, num_items_in_batch, made, kwargs)


def _why_trls_code(model: Any, labels: Any, shift_labels: Any) -> str | None:
    """Why TRL's own code answers this call, or None."""
    if not isinstance(shift_labels if shift_labels is not None else labels, Tensor):
        return "no labels"
    head = model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    if hasattr(weight, "ds_id"):
        return "the head is sharded by DeepSpeed, which gathers it for TRL's code"
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        return f"the head is a {type(head).__name__}"
    return None


def _output(
    model: Any, head: FusedHead, hidden: Tensor, labels: Tensor, num_items_in_batch: Any, made: Any, kwargs: dict[str, Any]
) -> Any:  # fmt: skip
    from trl.trainer.utils import FusedCausalLMOutput

    options = head.options
    projection = model.get_output_embeddings()
    weight, bias = projection.weight, projection.bias
    if hasattr(weight, "full_tensor"):  # sharded by FSDP2
        weight, bias = weight.full_tensor(), None if bias is None else bias.full_tensor()
    hidden, labels = hidden.to(weight.device), labels.to(weight.device)
    if options["cast_lm_head_to_fp32"]:
        with autocast_off(hidden):
            values = _values(options, hidden.float(), weight, bias, labels)
    else:
        values = _values(options, hidden, weight, bias, labels)
    mask = labels != IGNORED
    count = mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    loss = -values.log_probs.sum() / count
    aux_loss = _router_loss(options["text_config"], made, kwargs) if kwargs.get("output_router_logits") else None
    if aux_loss is not None:
        loss = loss + getattr(options["text_config"], "router_aux_loss_coef", 0.0) * aux_loss
    fields = {name: getattr(values, ours) for name, ours in FIELDS.items()}
    fields["is_top1"] = None if values.top1 is None else values.top1 == labels
    if fields["is_top1"] is not None:
        fields["is_top1"] = fields["is_top1"] & mask
    return FusedCausalLMOutput(loss=loss, log_probs=values.log_probs, label_mask=mask, aux_loss=aux_loss, **fields)


def _values(options: dict[str, Any], hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Any:
    return linear_log_probs(
        hidden, weight, labels, bias=bias, outputs=("log_probs", *(ours for name, ours in FIELDS.items() if name in options["outputs"])),
        logit_scale=options["logit_scale"], softcap=options["final_logit_softcapping"], temperature=options["temperature"],
    )  # fmt: skip


def _router_loss(text_config: Any, made: Any, kwargs: dict[str, Any]) -> Any:
    """The mixture's load-balancing loss, as transformers' own forward adds it."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    return load_balancing_loss_func(
        made.router_logits, text_config.num_experts, text_config.num_experts_per_tok, kwargs.get("attention_mask")
    )
