"""Wraps the steps, losses and evaluations of an attached trainer.

A non-finite loss or gradient stops the run before any weight changes. By default, Trainer replaces
such a loss in its log by another value (`logging_nan_inf_filter`). This filter is switched off. The
computation of the logits is delayed in every `compute_loss`, whether or not the forward gets
labels. Examples are the `compute_loss` of TRL's ORPO and CPO trainers, and a `compute_loss` that a
user wrote. `linear_divergence` computes the loss of TRL's distillation.

With `bf16_full_eval` or `fp16_full_eval`, a Trainer casts the weights before an evaluation. In an
attached trainer the weights keep their dtype, and the evaluation computes in `precision.compute`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers import Trainer, TrainerCallback

from ..errors import RunError, UsageError
from ..ops.linear_divergence.op import divergence_and_entropy, linear_divergence
from ..optimize import check_placed, deferring
from ..optimize.deferred import DeferredLogits
from ..optimize.deferred_values import op_counts
from ..optimize.generation import sample_from_training_state
from ..precision.apply import inner_model
from ..training.finite import non_finite_error
from ..training.step import choose_sampled_elements, measure_share_changed, read_elements
from .attachment import Attachment, MethodWrappers, running_trainers
from .preflight import ARGUMENT_NAMES
from .recorder import StepRecorder


class Guards(TrainerCallback):
    """Wraps the methods that make a step of one trainer. `install` wraps them, `remove` unwraps
    them.

    extra  metrics for the trainer's next training log
    """

    def __init__(self, attachment: Attachment) -> None:
        self.attachment = attachment
        self.trainer = attachment.trainer
        self.methods = MethodWrappers(attachment.trainer)
        self.extra: dict[str, float] = {}
        self.recorder: StepRecorder | None = None
        self._sampled: list[tuple[nn.Parameter, Tensor]] = []
        self._samples_before_update: list[Tensor] = []
        self._nan_filter_setting = self.trainer.args.logging_nan_inf_filter
        # the inputs of the last forward of a training step
        self._last_inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._hook: Any = None

    def install(self) -> None:
        self.trainer.add_callback(self)
        self.trainer.args.logging_nan_inf_filter = False
        self.methods.wrap("training_step", self._training_step)
        self.methods.wrap("compute_loss", self._compute_loss)
        self.methods.wrap("_clip_grad_norm", self._clip_grad_norm)
        self.methods.wrap("_get_grad_norm", self._get_grad_norm)
        self.methods.wrap("log", self._log)
        self.methods.wrap("evaluation_loop", self._evaluation_loop)
        self._hook = inner_model(self.trainer.model).register_forward_pre_hook(
            self._record_inputs, with_kwargs=True
        )
        defer_teacher_logits(self.trainer, self.methods)

    def remove(self) -> None:
        self.trainer.remove_callback(self)
        if self._hook is not None:
            self._hook.remove()
        self.methods.restore()
        self.trainer.args.logging_nan_inf_filter = self._nan_filter_setting

    def _training_step(self, original: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        if self._is_replaying:
            return original(*args, **kwargs)
        check_placed(self.trainer.model)
        # samples that a step trains on (GRPO, OnlineDPO) are drawn with the same random numbers as
        # in an unattached trainer
        with sample_from_training_state():
            loss = original(*args, **kwargs)
        if not math.isfinite(float(loss)):
            raise self._non_finite_error("the loss")
        self._last_inputs = None
        return loss

    def _record_inputs(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Stores the inputs. `_non_finite_error` uses them to find the module with the first
        non-finite number.

        Raises  UsageError if another trainer trains the model, because the model would then be
                trained with this trainer's precision, but without its checks and its record
        """
        if not module.training:
            return
        if not self.trainer.is_in_train and (trainers := running_trainers()):
            attached_trainer = type(self.trainer).__name__
            training_trainer = type(trainers[0]).__name__
            raise UsageError(
                f"this model is attached to {attached_trainer}, and {training_trainer} trains it",
                fix=f"detach(the {attached_trainer}) first; attach(the other) trains it under a precision",
            )
        self._last_inputs = args, kwargs

    def _compute_loss(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Delays the computation of the logits. If the loss only needs a gather, a logsumexp or a
        cross-entropy of the logits, the logits of all tokens never exist at once. Any other
        operation needs all logits. The trainer counts these cases and stores the line of code that
        needed the logits.
        """
        if self._is_replaying:
            return original(*args, **kwargs)
        with deferring(with_gradients=True):
            return original(*args, **kwargs)

    def _clip_grad_norm(self, original: Callable[..., Any], model: nn.Module) -> Any:
        """Clips gradients, and checks the norm before it is applied, because clipping by a NaN norm
        makes every gradient NaN.
        """
        trainer = self.trainer
        if self._has_loss_scaling or type(trainer)._clip_grad_norm is not Trainer._clip_grad_norm:
            return original(model)
        # the gradients are in the accumulator, not in `.grad`; `original` clips them there
        if self.attachment.accumulator is not None:
            norm = original(model)
            self._check_norm(norm)
            return norm
        norm = get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        self._check_norm(norm)
        clip_grads_with_norm_(model.parameters(), trainer.args.max_grad_norm, norm)
        return norm

    def _get_grad_norm(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        norm = original(*args, **kwargs)
        self._check_norm(norm)
        return norm

    @property
    def _is_replaying(self) -> bool:
        return self.recorder is not None and self.recorder.is_replaying

    @property
    def _has_loss_scaling(self) -> bool:
        """Returns True if the trainer scales the loss. An occasional overflow is then normal, and
        the scaler skips that update.
        """
        return getattr(self.trainer.accelerator, "scaler", None) is not None

    def _check_norm(self, norm: Any) -> None:
        if not self._has_loss_scaling and norm is not None and not math.isfinite(float(norm)):
            raise self._non_finite_error("the gradient")

    def _log(
        self, original: Callable[..., None], logs: dict[str, float], *args: Any, **kwargs: Any
    ) -> None:
        if "loss" in logs:
            logs.update(self.extra)
        original(logs, *args, **kwargs)

    def _evaluation_loop(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        arguments = self.trainer.args
        flags = {name: getattr(arguments, name) for name in ("bf16_full_eval", "fp16_full_eval")}
        try:
            for name in flags:
                setattr(arguments, name, False)
            return original(*args, **kwargs)
        finally:
            for name, value in flags.items():
                setattr(arguments, name, value)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._sampled = choose_sampled_elements(
            [p for p in self.trainer.model.parameters() if p.requires_grad]
        )

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._samples_before_update = read_elements(self._sampled)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.trainer.accelerator.optimizer_step_was_skipped:
            self.extra["share_changed"] = float(
                measure_share_changed(self._samples_before_update, read_elements(self._sampled))
            )
        self._samples_before_update = []

    def _non_finite_error(self, quantity: str) -> RunError:
        """Returns the error NF001 with the step and the place of the first non-finite number."""
        last_inputs = self._last_inputs
        model = inner_model(self.trainer.model)
        passes: list[Callable[[], object]] = []
        if last_inputs is not None:
            args, kwargs = last_inputs
            passes = [lambda: model(*args, **kwargs)]
        settings = self.trainer.args
        error = non_finite_error(
            self.trainer.model,
            passes,
            step=self.trainer.state.global_step + 1,
            quantity=quantity,
            gradient=self.attachment.gradient,
            learning_rate=settings.learning_rate,
            clip=settings.max_grad_norm or None,
            compute=self.attachment.precision.compute,
            names=ARGUMENT_NAMES,
        )
        return error if self.recorder is None else self.recorder.explain(error)


# --- TRL's distillation: DistillationTrainer compares two heads in tiles, GKD compares logits. If
# their code has another form (a subclass with another loss, another release), TRL's code runs

OP = "linear_divergence"
# the name of the function in TRL's module that the loss of DistillationTrainer calls
_TRL_TILED_LOSS = "_chunked_divergence_loss"
_GKD_MODULE = "trl.experimental.gkd.gkd_trainer"


def defer_teacher_logits(trainer: Any, methods: MethodWrappers) -> None:
    """Wraps the methods in which a trainer compares the output of the student with the output of
    the teacher.
    """
    loss = getattr(type(trainer), "_compute_loss", None)
    if (
        isinstance(loss, FunctionType)
        and _TRL_TILED_LOSS in loss.__code__.co_names
        and loss.__module__.startswith("trl.")
    ):
        # TRL's method is rebuilt over a copy of its globals in which this name is Isotype's
        # function; TRL's module is unchanged
        names = {**loss.__globals__, _TRL_TILED_LOSS: divergence_from_hidden_states}
        bound = MethodType(
            FunctionType(loss.__code__, names, loss.__name__, loss.__defaults__, loss.__closure__),
            trainer,
        )
        methods.wrap("_compute_loss", lambda original, *args, **kwargs: bound(*args, **kwargs))
    jsd_loss = getattr(type(trainer), "generalized_jsd_loss", None)
    if (
        getattr(jsd_loss, "__module__", None)
        == _GKD_MODULE
        == type(trainer).compute_loss.__module__
    ):
        methods.wrap("compute_loss", _compute_loss_with_deferred_teacher)
        methods.wrap("generalized_jsd_loss", divergence_from_logits)


def divergence_from_hidden_states(
    student_hidden_states: Tensor,
    teacher_hidden_states: Tensor,
    student_lm_head_weight: Tensor,
    teacher_lm_head_weight: Tensor,
    completion_mask: Tensor,
    beta: float,
    num_items_in_batch: Tensor | int | None = None,
    student_lm_head_bias: Tensor | None = None,
    teacher_lm_head_bias: Tensor | None = None,
    student_logit_scale: float = 1.0,
    teacher_logit_scale: float = 1.0,
    student_final_logit_softcapping: float | None = None,
    teacher_final_logit_softcapping: float | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Replaces TRL's loss function. It has the same arguments as that function, and computes the
    same results with `linear_divergence`. Returns (loss, summed entropies of the student, tokens).
    """
    op_counts[OP] += 1
    is_supervised = completion_mask.reshape(-1) != 0
    hidden_states = [
        x.reshape(-1, x.shape[-1])[is_supervised]
        for x in (student_hidden_states, teacher_hidden_states)
    ]
    divergence, entropy = divergence_and_entropy(
        hidden_states[0],
        student_lm_head_weight,
        hidden_states[1],
        teacher_lm_head_weight,
        bias=student_lm_head_bias,
        teacher_bias=teacher_lm_head_bias,
        beta=beta,
        temperature=temperature,
        logit_scale=student_logit_scale,
        softcap=student_final_logit_softcapping,
        teacher_logit_scale=teacher_logit_scale,
        teacher_softcap=teacher_final_logit_softcapping,
    )
    tokens = is_supervised.sum()
    return _reduce_divergence(divergence, tokens, num_items_in_batch), entropy.sum(), tokens


def _compute_loss_with_deferred_teacher(
    original: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Also delays the computation of the teacher's logits. They are computed without gradients."""
    with deferring():
        return original(*args, **kwargs)


def divergence_from_logits(
    original: Callable[..., Tensor],
    student_logits: Tensor,
    teacher_logits: Tensor,
    labels: Tensor | None = None,
    beta: float = 0.5,
    temperature: float = 1.0,
    reduction: str = "batchmean",
    num_items_in_batch: Tensor | int | None = None,
) -> Tensor:
    """Replaces GKD's loss function. It has the same arguments as that function, and computes the
    same loss with `linear_divergence`.
    """
    logits = student_logits, teacher_logits
    is_supported = labels is not None and (
        reduction == "batchmean" or num_items_in_batch is not None
    )
    if (
        not is_supported
        or not all(isinstance(z, DeferredLogits) and z.computed is None for z in logits)
        or logits[0].shape != logits[1].shape
    ):
        return original(
            student_logits, teacher_logits, labels, beta, temperature, reduction, num_items_in_batch
        )
    assert labels is not None
    op_counts[OP] += 1
    mask = labels != -100
    student, teacher = (z[mask].recipe for z in logits)  # type: ignore[attr-defined]  # indexed deferred logits stay deferred
    (scale, cap), (teacher_scale, teacher_cap) = (
        student.scale_and_softcap,
        teacher.scale_and_softcap,
    )
    teacher.check()
    with student.head_context():
        divergence = linear_divergence(
            student.hidden,
            student.weight,
            teacher.hidden,
            teacher.weight,
            bias=student.bias,
            teacher_bias=teacher.bias,
            beta=beta,
            temperature=temperature,
            logit_scale=scale,
            softcap=cap,
            teacher_logit_scale=teacher_scale,
            teacher_softcap=teacher_cap,
        )
    return _reduce_divergence(divergence, mask.sum(), num_items_in_batch)


def _reduce_divergence(divergence: Tensor, tokens: Tensor, items: Tensor | int | None) -> Tensor:
    """Returns the divergence as one number, which is computed in the same way as in TRL. It is the
    sum divided by the step's number of items, or the mean over these tokens if this number is not
    known.
    """
    if items is None:
        items = tokens.clamp(min=1)
    elif isinstance(items, Tensor):
        items = items.to(divergence.device)
    return divergence.sum() / items
