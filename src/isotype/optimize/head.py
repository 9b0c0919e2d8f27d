"""Replaces the head of a causal LM, and computes the loss without storing all logits.

Isotype's training loop passes targets to the model's forward (`Targets`). The head then computes
the loss with an op, and the model's output contains the loss instead of logits. Other training
loops do not pass `Targets`. For them, the head returns deferred logits, which are computed only
when they are needed. It does so if the forward gets labels or runs inside `deferring`. In all other
cases the head returns plain logits.
"""

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

from ..dtypes import to_torch
from ..instance_method import Placement, get_forward_settings, install_forward
from ..lora import PackedLinear
from ..lora.attach import linear_for_few_rows
from ..ops import linear_cross_entropy, linear_log_probs
from ..ops.backend import product_dtype
from ..ops.packed import dequantise_packed
from ..precision.apply import inner_model
from .deferred import DeferredLogits, defer
from .generation import find_input_embeddings
from .instances import (
    KERNEL_LIBRARIES,
    foreign_kernel_reason,
    library_name,
    make_placement,
    make_probe_copy,
    replacement_blocker,
)
from .manifest import Manifest
from .trl_head import find_fused_head, find_trl_forward, fused_head_blocker, place_fused_head

PART_NAME = "head"  # the value of `Placement.part`
IGNORED = -100  # the loss ignores positions with this label, as in PyTorch
_forwards = threading.local()

BYPASSED_NOTE = (
    "TRL's fused head computes the loss from the head's weight, and never calls the head: its"
    " logits are not deferred"
)


def head_forward(self: nn.Linear, hidden: Tensor) -> Tensor:
    request: _TargetRequest | None = getattr(_forwards, "request", None)
    if request is not None and request.loss is None and not has_backward_hooks(self):
        return request.compute_loss(self, hidden)
    # a compiled graph and a backward hook need real logits
    is_deferring = getattr(_forwards, "depth", 0) or (
        getattr(_forwards, "with_gradients", 0) and torch.is_grad_enabled()
    )
    if not is_deferring or torch.compiler.is_compiling() or has_backward_hooks(self):
        if type(self) is nn.Linear:
            return linear_for_few_rows(self, hidden)
        logits: Tensor = type(self).forward(self, hidden)
        return logits
    return defer(hidden, head_weight(self, hidden), self.bias, getattr(_forwards, "items", None))


def head_weight(head: nn.Linear, hidden: Tensor) -> Tensor:
    """Returns the head's weight. If the weight is packed (quantised), it is dequantised only once,
    and the loss and its gradient use the same copy.
    """
    if type(head) is PackedLinear:
        return dequantise_packed(
            head.weight, head.weight.quant_state, head.compute_dtype or hidden.dtype
        )
    return head.weight


def has_backward_hooks(head: nn.Module) -> bool:
    """Whether a backward hook is registered on the head or for all modules."""
    module_globals = nn.modules.module
    global_hooks = (
        module_globals._global_backward_hooks or module_globals._global_backward_pre_hooks
    )
    return bool(head._backward_hooks or head._backward_pre_hooks or global_hooks)


def start_deferring(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """This hook runs before the forward of the causal LM. If the forward gets labels, a loss will
    use the logits. The hook then makes the head return deferred logits.
    """
    if kwargs.get("fused_lm_head") and find_fused_head(inner_model(model)) is None:
        # warn once that TRL's own loss runs, so that the deferral has no effect
        manifest: Manifest = get_forward_settings(model.get_output_embeddings())  # type: ignore[operator]  # nn.Module does not declare it
        if BYPASSED_NOTE not in manifest.notes:
            manifest.notes.append(BYPASSED_NOTE)
            warnings.warn(f"isotype.optimize: {BYPASSED_NOTE}", stacklevel=2)
    if kwargs.get("labels") is not None:
        _forwards.depth = getattr(_forwards, "depth", 0) + 1
        # transformers sums the losses and divides by this number; the op divides before it rounds a
        # gradient
        _forwards.items = kwargs.get("num_items_in_batch")


def stop_deferring(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> None:
    """This hook runs after the forward of the causal LM. It also runs after an error in the
    forward. Otherwise the head would continue to return deferred logits.
    """
    if kwargs.get("labels") is not None:
        _forwards.depth = max(0, getattr(_forwards, "depth", 0) - 1)
        _forwards.items = None


@contextmanager
def deferring(*, with_gradients: bool = False) -> Iterator[None]:
    """Within this block, heads that `optimize` replaced return deferred logits (which are computed
    only when needed), even without labels. It is for training loops that compute the loss
    themselves.

    with_gradients  whether logits are deferred only while gradients are enabled, because rollouts
                    and reference models in a training step need real logits
    """
    name = "with_gradients" if with_gradients else "depth"
    setattr(_forwards, name, getattr(_forwards, name, 0) + 1)
    try:
        yield
    finally:
        setattr(_forwards, name, getattr(_forwards, name) - 1)


def place_head(path: str, model: nn.Module, manifest: Manifest) -> Placement:
    """Replaces the forward of a causal LM's head, if no other library has replaced the head or its
    loss.
    """
    get_head: Callable[[], nn.Module | None] | None = getattr(model, "get_output_embeddings", None)
    head = get_head() if get_head is not None else None
    if head is None:
        return make_placement(PART_NAME, path, model, None, "the model has no output embeddings")
    reason = head_blocker(model, head)
    if reason is not None:
        return make_placement(PART_NAME, path, head, None, reason)
    inner = inner_model(model)
    has_trl_forward = find_trl_forward(inner) is not None
    if has_trl_forward:
        place_fused_head(inner)
    # TRL's forward reads the head's weight and never calls the head, which may be PEFT's wrapper of
    # a head that is trained in full
    if type(head) in (nn.Linear, PackedLinear):
        # the manifest gets a note if TRL's loss does not call the head
        install_forward(head, head_forward, manifest)
        model.register_forward_pre_hook(start_deferring, with_kwargs=True)
        model.register_forward_hook(stop_deferring, with_kwargs=True, always_call=True)
    if has_trl_forward:
        return make_placement(PART_NAME, path, head, "linear_log_probs", "for TRL's fused head")
    targets_blocker = place_targets(inner, head)
    if targets_blocker is None:
        note = "the loss of targets, else deferred logits"
    else:
        note = f"deferred logits; takes no targets: {targets_blocker}"
    return make_placement(PART_NAME, path, head, "linear_cross_entropy", note)


def head_blocker(model: nn.Module, head: nn.Module) -> str | None:
    """Returns the reason why this head of a causal LM cannot be replaced, or None if it can."""
    inner = inner_model(model)
    if type(head) not in (nn.Linear, PackedLinear) and find_trl_forward(inner) is None:
        return f"the head is a {type(head).__name__}, not a plain Linear"
    reason = replacement_blocker(head)
    if reason is not None:
        return reason
    # a fused loss of TRL or Liger replaces the model's forward, on the instance or on the class,
    # and never calls the head
    foreign_reason = (
        fused_head_blocker(inner)
        if find_trl_forward(inner) is not None
        else foreign_kernel_reason(model)
    )
    if foreign_reason is not None:
        return f"the model: {foreign_reason}, which may have a loss of its own"
    if library_name(F.cross_entropy) in KERNEL_LIBRARIES:
        return f"torch's cross_entropy was replaced by {library_name(F.cross_entropy)}"
    return None


def remove_hooks(model: nn.Module) -> None:
    """Removes the hooks that `place_head` registered. It searches for hooks with the same function,
    because the handles of the hooks do not exist in a deep copy.
    """
    for hooks, flags, own_hook in (
        (model._forward_pre_hooks, (model._forward_pre_hooks_with_kwargs,), start_deferring),
        (
            model._forward_hooks,
            (model._forward_hooks_with_kwargs, model._forward_hooks_always_called),
            stop_deferring,
        ),
    ):
        for key in [key for key, hook in hooks.items() if hook is own_hook]:
            del hooks[key]
            for flag in flags:
                flag.pop(key, None)


# --- a loss from targets


@dataclass(frozen=True, slots=True)
class Targets:
    """Contains the targets for a causal LM. A training loop passes them to the model so that the
    model returns a loss instead of logits. B x T is the number of tokens, and N of them have a
    target.

    classes  int64[N]  the class of each row, or -100
    rows     int64[N]  the indices of these rows in the flattened B x T; None for all rows in
             order
    divisor  the number by which the summed cross-entropy is divided; the op divides, so that each
             gradient is rounded once
    per_row  whether fp32[N] log-probabilities are returned instead of the loss
    dtype    the dtype of the logits inside the loss, `precision.loss`
    """

    classes: Tensor
    rows: Tensor | None = None
    divisor: int | float | None = None
    per_row: bool = False
    dtype: str = "fp32"

    def loss_from_hidden(
        self, head: nn.Linear, hidden: Tensor, scale: float, softcap: float | None
    ) -> Tensor:
        """Computes the loss from hidden states in fp32. The op that it calls never stores the
        logits of all tokens.
        """
        x_NH = hidden.reshape(-1, hidden.shape[-1])
        x_NH = x_NH if self.rows is None else x_NH.index_select(0, self.rows)
        if self.per_row:
            log_probs = linear_log_probs(
                x_NH,
                head_weight(head, x_NH),
                self.classes,
                bias=head.bias,
                logit_scale=scale,
                softcap=softcap,
            ).log_probs
            assert log_probs is not None
            return log_probs
        loss: Tensor = linear_cross_entropy(
            x_NH,
            head_weight(head, x_NH),
            self.classes,
            bias=head.bias,
            logit_scale=scale,
            softcap=softcap,
            ignore_index=IGNORED,
            reduction="mean" if self.divisor else "sum",
            num_items=self.divisor,
        )
        return loss

    def loss_from_logits(self, logits_BTV: Tensor) -> Tensor:
        """Computes the loss from real or deferred logits, in `dtype`."""
        logits_NV = logits_BTV.reshape(-1, logits_BTV.shape[-1])
        if self.rows is not None:
            logits_NV = logits_NV.index_select(0, self.rows)
        logits_NV = logits_NV.to(to_torch(self.dtype))
        if self.per_row:
            return F.log_softmax(logits_NV, -1).gather(-1, self.classes.unsqueeze(-1)).squeeze(-1)
        loss = F.cross_entropy(logits_NV, self.classes, ignore_index=IGNORED, reduction="sum")
        return loss / self.divisor if self.divisor else loss


def compute_loss(model: nn.Module, inputs: dict[str, Any], targets: Targets) -> Tensor:
    """Runs the model and returns the loss or the log-probabilities (see `Targets`).

    Some models cannot take targets in their forward. The manifest (the list of what `optimize`
    replaced) then states the reason, and the loss is computed from deferred logits. If the head was
    not replaced either, the loss is computed from the real logits.
    """
    if targets.dtype != "fp32":
        return targets.loss_from_logits(model(**inputs).logits)
    if takes_targets(model):
        loss: Tensor = model(**inputs, targets=targets).loss
        return loss
    with deferring():
        return targets.loss_from_logits(model(**inputs).logits)


def takes_targets(model: nn.Module) -> bool:
    return isinstance(get_forward_settings(inner_model(model)), LogitTransform)


@dataclass(frozen=True, slots=True)
class LogitTransform:
    """The function that the model's forward applies to the output z of the head. The function is
    softcap * tanh(scale * z / softcap), or scale * z without a softcap.
    """

    scale: float
    softcap: float | None


class _TargetRequest:
    """Holds the targets of a running forward, and the loss after the head has computed it."""

    def __init__(self, targets: Targets, transform: LogitTransform) -> None:
        self.targets = targets
        self.transform = transform
        self.loss: Tensor | None = None

    def compute_loss(self, head: nn.Linear, hidden: Tensor) -> Tensor:
        """Computes the loss and stores it. Returns empty logits (0 classes). The rest of the
        forward can still apply a scale to them.
        """
        self.loss = self.targets.loss_from_hidden(
            head, hidden, self.transform.scale, self.transform.softcap
        )
        if type(head) is PackedLinear:
            dtype = hidden.dtype
        else:
            dtype = product_dtype(hidden, head.weight)
        return hidden.new_empty((*hidden.shape[:-1], 0), dtype=dtype)


def lm_forward(self: nn.Module, *args: Any, targets: Targets | None = None, **kwargs: Any) -> Any:
    """Replaces the forward of a causal LM. It runs the forward of the class. If targets are passed,
    the output contains the loss, so that wrappers such as DDP find the autograd graph in the
    output.
    """
    if targets is None:
        return type(self).forward(self, *args, **kwargs)
    request = _TargetRequest(targets, get_forward_settings(self))
    previous = getattr(_forwards, "request", None)
    _forwards.request = request
    try:
        output = type(self).forward(self, *args, **kwargs)
    finally:
        _forwards.request = previous
    # without a request to the head (it has a backward hook), the loss is computed from the real
    # logits
    output["loss"] = (
        targets.loss_from_logits(output.logits) if request.loss is None else request.loss
    )
    return output


class _BackboneOutput:
    """The output of the stub that replaces the backbone in a test. It has hidden states, and every
    other attribute is None.
    """

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, key: Any) -> Any:
        return (self.last_hidden_state,)[key]


class _BackboneStub(nn.Module):
    """Replaces the backbone for a test. If the forward calls a child of the backbone (OPT's
    decoder), the stub replaces this child too. The stub has the same attributes as the backbone,
    such as the scale of Falcon H1.
    """

    def __init__(self, hidden: Tensor, real: nn.Module) -> None:
        super().__init__()
        self.hidden = hidden
        self.real = (real,)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            value = super().__getattr__(name)
        else:
            value = getattr(self.real[0], name)
        return self if isinstance(value, nn.Module) else value

    def forward(self, *args: Any, **kwargs: Any) -> _BackboneOutput:
        return _BackboneOutput(self.hidden)


class _HeadStub(nn.Module):
    """Replaces the head for a test. It returns deferred logits, which record the operations that
    the model's forward applies to them.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, size), requires_grad=False)
        self.outputs: list[DeferredLogits] = []

    def forward(self, hidden: Tensor) -> Tensor:
        self.outputs.append(defer(hidden, self.weight, None))
        return self.outputs[-1]


def probe_logit_transform(model: Any, head: nn.Module) -> LogitTransform | str:
    """Finds the scale and the softcap that the forward of this causal LM applies to the head's
    output. It runs the forward of the class with a stub as backbone. Returns the reason as text if
    the model cannot take targets.
    """
    embeddings = find_input_embeddings(model)
    children = dict(model.named_children())
    name = next((name for name, child in children.items() if child is head), None)
    backbone = next(
        (name for name, child in children.items() if any(m is embeddings for m in child.modules())),
        None,
    )
    if name is None or backbone is None or backbone == name:
        return "head and backbone are not two children of the model"
    hidden = torch.ones(1, 3, 4)
    stub = _HeadStub(4)
    probe = make_probe_copy(
        model, {backbone: _BackboneStub(hidden, children[backbone]), name: stub}, {}
    )
    try:
        with torch.no_grad():
            output = type(model).forward(
                probe, input_ids=torch.zeros(1, 3, dtype=torch.long), use_cache=False
            )
    except Exception as error:
        return f"its forward fails for random inputs ({type(error).__name__})"
    if not isinstance(output, dict):
        return f"its forward gives a {type(output).__name__}, not one of transformers' outputs"
    logits = output.get("logits")
    if (
        not isinstance(logits, DeferredLogits)
        or len(stub.outputs) != 1
        or logits.computed is not None
    ):
        return "its forward does more to the logits than a scale and a softcap"
    if logits.recipe.hidden.shape != hidden.shape:
        return "its head is not given every row"
    return LogitTransform(*logits.recipe.scale_and_softcap)


def place_targets(model: nn.Module, head: nn.Module) -> str | None:
    """Makes the forward of this causal LM accept targets. Returns the reason if this is not
    possible.
    """
    transform = replacement_blocker(model) or probe_logit_transform(model, head)
    if isinstance(transform, str):
        return transform
    install_forward(model, lm_forward, transform, entries=0)
    return None
