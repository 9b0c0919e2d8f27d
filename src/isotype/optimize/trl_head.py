"""Replaces the fused head of TRL by the op `linear_log_probs`. `model(..., labels=...,
fused_lm_head=True)` returns the same fields as with TRL's head.

TRL's trainers (SFT, DPO, KTO, GRPO, RLOO and others) install a forward on the model
(`add_fused_lm_head`). This forward runs the backbone, applies the head to the labelled positions
and returns values for each token. The settings of TRL's forward (temperature, softcap, scale,
fields) are variables of its closure, and this module reads them there. Without
`fused_lm_head=True`, TRL's forward runs.
"""

from __future__ import annotations

import inspect
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ..instance_method import get_forward_settings, install_forward
from ..ops import linear_log_probs
from ..ops.backend import autocast_off

IGNORED = -100  # the loss ignores positions with this label, as in PyTorch
# TRL's name of a field -> the op's name
FIELDS = {
    "entropy": "entropy",
    "log_sum_sq_probs": "log_sum_sq_probs",
    "mean_logits": "mean_logits",
    "is_top1": "top1",
}
_REQUIRED_VARIABLES = {
    "temperature", "cast_lm_head_to_fp32", "outputs", "logit_scale", "final_logit_softcapping", "text_config", "backbone_attr",
    "original_forward",
}  # fmt: skip


@dataclass
class FusedHead:
    """Holds the settings of TRL's forward, and counts its calls.

    trl_forward  TRL's bound forward
    options      the variables that TRL's forward reads from its closure
    calls        the name of the op, or the reason why TRL's own code ran -> number of calls
    """

    trl_forward: Any
    options: dict[str, Any]
    calls: Counter[str] = field(default_factory=Counter)


def find_trl_forward(model: nn.Module) -> Any | None:
    """Returns TRL's bound forward of this instance, or None if there is none."""
    trl_forward = model.__dict__.get("forward")
    function = getattr(trl_forward, "__func__", None)
    module_name = getattr(function, "__globals__", {}).get("__name__")
    # functools.wraps renames the function, but its code keeps the name
    code = getattr(function, "__code__", None)
    if module_name == "trl.trainer.utils" and code is not None and code.co_name == "_fused_forward":
        return trl_forward
    return None


def find_fused_head(model: nn.Module) -> FusedHead | None:
    """Returns the fused head of this instance, or None if there is none."""
    head = get_forward_settings(model)
    return head if isinstance(head, FusedHead) else None


def fused_head_blocker(model: nn.Module) -> str | None:
    """Returns the reason why the op cannot replace TRL's forward on this instance, or None if it
    can.
    """
    options = _closure(find_trl_forward(model))
    missing = _REQUIRED_VARIABLES - set(options)
    if missing:
        return f"TRL's fused head has another form here (no {', '.join(sorted(missing))})"
    unknown = set(options["outputs"]) - {"log_probs", *FIELDS}
    if unknown:
        return f"TRL's fused head has fields that the op has not: {', '.join(sorted(unknown))}"
    return None


def place_fused_head(model: nn.Module) -> None:
    """Replaces TRL's forward by one that calls the op."""
    trl_forward = find_trl_forward(model)
    install_forward(model, fused_head_forward, FusedHead(trl_forward, _closure(trl_forward)))


def _closure(trl_forward: Any) -> dict[str, Any]:
    return dict(inspect.getclosurevars(trl_forward.__func__).nonlocals)


def fused_head_forward(
    self: Any,
    *args: Any,
    fused_lm_head: bool = False,
    labels: Any = None,
    shift_labels: Any = None,
    num_items_in_batch: Any = None,
    **kwargs: Any,
) -> Any:
    head: FusedHead = get_forward_settings(self)
    reason = _fallback_reason(self, labels, shift_labels) if fused_lm_head else None
    if not fused_lm_head or reason:
        if reason:
            head.calls[reason] += 1
        arguments = {
            "labels": labels,
            "shift_labels": shift_labels,
            "num_items_in_batch": num_items_in_batch,
        }
        kwargs |= {name: value for name, value in arguments.items() if value is not None}
        # the unbound function, so that a deep copy calls it on itself
        return head.trl_forward.__func__(self, *args, fused_lm_head=fused_lm_head, **kwargs)
    options, text_config = head.options, head.options["text_config"]
    kwargs["use_cache"] = False
    if getattr(text_config, "output_router_logits", False):
        kwargs.setdefault("output_router_logits", True)
    backbone_output = getattr(self, options["backbone_attr"])(*args, **kwargs)
    if shift_labels is not None:
        hidden = backbone_output.last_hidden_state
    else:
        hidden = backbone_output.last_hidden_state[:, :-1]
    labels = shift_labels if shift_labels is not None else labels[:, 1:]
    head.calls["linear_log_probs"] += 1
    return _compute_output(self, head, hidden, labels, num_items_in_batch, backbone_output, kwargs)


def _fallback_reason(model: Any, labels: Any, shift_labels: Any) -> str | None:
    """Returns the reason why TRL's own code must compute this call, or None if the op can."""
    if shift_labels is not None:
        labels = shift_labels
    if not isinstance(labels, Tensor):
        return "no labels"
    head = model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    if hasattr(weight, "ds_id"):
        return "the head is sharded by DeepSpeed, which gathers it for TRL's code"
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        return f"the head is a {type(head).__name__}"
    return None


def _compute_output(
    model: Any,
    head: FusedHead,
    hidden: Tensor,
    labels: Tensor,
    num_items_in_batch: Any,
    backbone_output: Any,
    kwargs: dict[str, Any],
) -> Any:
    from trl.trainer.utils import FusedCausalLMOutput

    options = head.options
    projection = model.get_output_embeddings()
    weight = projection.weight
    bias = projection.bias
    if hasattr(weight, "full_tensor"):  # FSDP2 shards it
        weight = weight.full_tensor()
        bias = None if bias is None else bias.full_tensor()
    hidden = hidden.to(weight.device)
    labels = labels.to(weight.device)
    context: AbstractContextManager[object] = nullcontext()
    if options["cast_lm_head_to_fp32"]:
        context = autocast_off(hidden)
        hidden = hidden.float()
    with context:
        values = linear_log_probs(
            hidden,
            weight,
            labels,
            bias=bias,
            outputs=(
                "log_probs",
                *(op_output for name, op_output in FIELDS.items() if name in options["outputs"]),
            ),
            logit_scale=options["logit_scale"],
            softcap=options["final_logit_softcapping"],
            temperature=options["temperature"],
        )
    assert values.log_probs is not None
    mask = labels != IGNORED
    count = mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    loss = -values.log_probs.sum() / count
    aux_loss: Any = None
    config = options["text_config"]
    if kwargs.get("output_router_logits"):
        # add the mixture's load-balancing loss, as transformers' forward does
        from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

        aux_loss = load_balancing_loss_func(
            backbone_output.router_logits,
            config.num_experts,
            config.num_experts_per_tok,
            kwargs.get("attention_mask"),
        )
        loss = loss + getattr(config, "router_aux_loss_coef", 0.0) * aux_loss
    fields = {name: getattr(values, op_output) for name, op_output in FIELDS.items()}
    fields["is_top1"] = None if values.top1 is None else (values.top1 == labels) & mask
    return FusedCausalLMOutput(
        loss=loss, log_probs=values.log_probs, label_mask=mask, aux_loss=aux_loss, **fields
    )
