"""TRL's distillation, answered by `linear_divergence`: DistillationTrainer, which compares two heads in tiles, and GKD, which compares
logits.

Where either has another form (a subclass's own loss, another release), TRL's code runs.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor

from ..ops.linear_divergence.op import divergence_and_entropy, linear_divergence
from ..optimize import deferring
from ..optimize.deferred import DeferredLogits
from ..optimize.deferred_values import answered
from .attachment import Methods

OP = "linear_divergence"
# the function of TRL's module that DistillationTrainer's loss calls
_TILES = "_chunked_divergence_loss"
_GKD = "trl.experimental.gkd.gkd_trainer"


class Distillation:
    """Wraps the methods of one trainer in which two heads are compared. `install` wraps them, `remove` gives them back."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.methods = trainer, Methods(trainer)

    def install(self) -> None:
        loss = getattr(type(self.trainer), "_compute_loss", None)
        if isinstance(loss, FunctionType) and _TILES in loss.__code__.co_names and loss.__module__.startswith("trl."):
            # TRL's own method with one name that means another function; its module stays as it is
            names = {**loss.__globals__, _TILES: of_hidden_states}
            own = FunctionType(loss.__code__, names, loss.__name__, loss.__defaults__, loss.__closure__)
            bound = MethodType(own, self.trainer)
            self.methods.wrap("_compute_loss", lambda original, *args, **kwargs: bound(*args, **kwargs))
        compared = getattr(type(self.trainer), "generalized_jsd_loss", None)
        if getattr(compared, "__module__", None) == _GKD == type(self.trainer).compute_loss.__module__:
            self.methods.wrap("compute_loss", _both_deferred)
            self.methods.wrap("generalized_jsd_loss", of_logits)

    def remove(self) -> None:
        self.methods.restore()


def of_hidden_states(
    student_hidden_states: Tensor, teacher_hidden_states: Tensor, student_lm_head_weight: Tensor, teacher_lm_head_weight: Tensor,
    completion_mask: Tensor, beta: float, num_items_in_batch: Tensor | int | None = None, student_lm_head_bias: Tensor | None = None,
    teacher_lm_head_bias: Tensor | None = None, student_logit_scale: float = 1.0, teacher_logit_scale: float = 1.0,
    student_final_logit_softcapping: float | None = None, teacher_final_logit_softcapping: float | None = None, temperature: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(loss, summed entropies of the student, tokens), in place of TRL's function, whose arguments and results these are."""
    answered[OP] += 1
    valid = completion_mask.reshape(-1) != 0
    heads = [x.reshape(-1, x.shape[-1])[valid] for x in (student_hidden_states, teacher_hidden_states)]
    found, entropy = divergence_and_entropy(
        heads[0], student_lm_head_weight, heads[1], teacher_lm_head_weight, bias=student_lm_head_bias, teacher_bias=teacher_lm_head_bias,
        beta=beta, temperature=temperature, logit_scale=student_logit_scale, softcap=student_final_logit_softcapping,
        teacher_logit_scale=teacher_logit_scale, teacher_softcap=teacher_final_logit_softcapping,
    )  # fmt: skip
    tokens = valid.sum()
    return _reduced(found, tokens, num_items_in_batch), entropy.sum(), tokens


def _both_deferred(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The teacher's logits too, which are made without gradients."""
    with deferring():
        return original(*args, **kwargs)


def of_logits(
    original: Callable[..., Tensor], student_logits: Tensor, teacher_logits: Tensor, labels: Tensor | None = None, beta: float = 0.5,
    temperature: float = 1.0, reduction: str = "batchmean", num_items_in_batch: Tensor | int | None = None,
) -> Tensor:  # fmt: skip
    """In place of GKD's function, whose arguments and result these are."""
    both = student_logits, teacher_logits
    plain = labels is not None and (reduction == "batchmean" or num_items_in_batch is not None)
    if not plain or not all(isinstance(z, DeferredLogits) and z.computed is None for z in both) or both[0].shape != both[1].shape:
        return original(student_logits, teacher_logits, labels, beta, temperature, reduction, num_items_in_batch)
    assert labels is not None
    answered[OP] += 1
    mask = labels != -100
    mine, theirs = (z[mask].recipe for z in both)  # type: ignore[attr-defined]  # deferred logits, of which a mask's rows are deferred
    (scale, cap), (teacher_scale, teacher_cap) = mine.scale_and_softcap, theirs.scale_and_softcap
    theirs.check()
    with mine.as_then():
        found = linear_divergence(
            mine.hidden, mine.weight, theirs.hidden, theirs.weight, bias=mine.bias, teacher_bias=theirs.bias, beta=beta,
            temperature=temperature, logit_scale=scale, softcap=cap, teacher_logit_scale=teacher_scale, teacher_softcap=teacher_cap,
        )  # fmt: skip
    return _reduced(found, mask.sum(), num_items_in_batch)


def _reduced(found: Tensor, tokens: Tensor, items: Tensor | int | None) -> Tensor:
    """TRL's: the sum over the step's items, or the mean over these tokens."""
    return found.sum() / (tokens.clamp(min=1) if items is None else items.to(found.device) if isinstance(items, Tensor) else items)
