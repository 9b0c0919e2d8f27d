"""The steps and evaluations of an attached trainer.

A non-finite loss or gradient stops the run, before any weight moves; Trainer's own filter, which logs 0.0 instead, is switched off. Logits
of a trainer's own loss are deferred, whether or not its forward has labels: `compute_loss` of ORPO, of CPO, of a user.

Trainer averages the batches' means, so that its evaluation loss depends on the batch size; here each batch counts with its tokens, where
the loss is known to be a mean over them: a loss of transformers' own, computed by a forward of transformers. Every other evaluation stays
the trainer's: a loss of the user's or of a TRL trainer (JSD, preferences), a CTC loss, one with a mixture's routing added.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers import Trainer, TrainerCallback

from ..errors import RunError, UsageError
from ..optimize import check_placed, deferring
from ..optimize.generation import from_training
from ..optimize.instances import library_of
from ..precision.apply import inner_model
from ..training.finite import non_finite_error
from ..training.step import sampled_elements, share_changed
from .attachment import Methods, defined_in, trainers_that_run
from .preflight import in_trainers_words
from .weights import PureWeights


class LastCall:
    """Forward pre-hook of the inner model: records its last inputs, to find the module in which a value became non-finite.

    Raises  UsageError where another trainer trains the model: it would have this one's precision, and neither its guards nor its record
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not module.training:
            return
        if not self.trainer.is_in_train and (running := trainers_that_run()):
            other = running[0]
            raise UsageError(
                f"this model is attached to {type(self.trainer).__name__}, and {type(other).__name__} trains it",
                fix=f"detach(the {type(self.trainer).__name__}) first; attach(the other) trains it under a precision",
            )
        self.arguments = args, kwargs


class Guards(TrainerCallback):
    """Wraps the methods of one trainer that make a step. `install` wraps them, `remove` gives them back.

    gradient  where a parameter's summed gradient is
    extra     metrics for the trainer's next training log
    """

    def __init__(self, trainer: Any, compute: str, gradient: Callable[[nn.Parameter], Tensor | None]) -> None:
        self.trainer, self.compute, self.gradient, self.methods = trainer, compute, gradient, Methods(trainer)
        self.extra: dict[str, float] = {}
        self._sampled: list[tuple[nn.Parameter, Tensor]] = []
        self._before: list[Tensor] = []
        self._filter = trainer.args.logging_nan_inf_filter
        self._last_call = LastCall(trainer)
        self._hook: Any = None

    def install(self) -> None:
        self.trainer.args.logging_nan_inf_filter = False
        self.methods.wrap("training_step", self._training_step)
        self.methods.wrap("compute_loss", self._compute_loss)
        self.methods.wrap("_clip_grad_norm", self._clip_grad_norm)
        self.methods.wrap("_get_grad_norm", self._get_grad_norm)
        self.methods.wrap("log", self._log)
        self._hook = inner_model(self.trainer.model).register_forward_pre_hook(self._last_call, with_kwargs=True)
        self.trainer.add_callback(self)

    def remove(self) -> None:
        self.trainer.remove_callback(self)
        if self._hook is not None:
            self._hook.remove()
        self.methods.restore()
        self.trainer.args.logging_nan_inf_filter = self._filter

    def _training_step(self, original: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        check_placed(self.trainer.model)
        # samples that a step trains on (GRPO, OnlineDPO) are drawn as in an unattached trainer
        with from_training():
            loss = original(*args, **kwargs)
        if not math.isfinite(float(loss)):
            raise self._not_finite("the loss")
        self._last_call.arguments = None
        return loss

    def _compute_loss(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Logits are deferred: a gather, a logsumexp and a cross-entropy do without all of them. For any other operation they are computed,
        and counted with the line that needed them."""
        with deferring(with_gradients=True):
            return original(*args, **kwargs)

    def _clip_grad_norm(self, original: Callable[..., Any], model: nn.Module) -> Any:
        """torch's two functions for clipping, with a check of the norm between them: clipping by nan would make every gradient nan."""
        trainer = self.trainer
        if self._scaled or type(trainer)._clip_grad_norm is not Trainer._clip_grad_norm:
            return original(model)
        if self._buffered:
            norm = original(model)
            self._check(norm)
            return norm
        norm = get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        self._check(norm)
        clip_grads_with_norm_(model.parameters(), trainer.args.max_grad_norm, norm)
        return norm

    def _get_grad_norm(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        norm = original(*args, **kwargs)
        self._check(norm)
        return norm

    @property
    def _buffered(self) -> bool:
        """Gradients are not in `.grad`: the object that holds them clips them."""
        return any(isinstance(callback, PureWeights) for callback in self.trainer.callback_handler.callbacks)

    @property
    def _scaled(self) -> bool:
        """Under loss scaling an overflow is expected occasionally: the scaler skips that update."""
        return getattr(self.trainer.accelerator, "scaler", None) is not None

    def _check(self, norm: Any) -> None:
        if not self._scaled and norm is not None and not math.isfinite(float(norm)):
            raise self._not_finite("the gradient")

    def _log(self, original: Callable[..., None], logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            logs.update(self.extra)
        original(logs, *args, **kwargs)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._sampled = sampled_elements([p for p in self.trainer.model.parameters() if p.requires_grad])

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._before = self._look()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.trainer.accelerator.optimizer_step_was_skipped:
            self.extra["share_changed"] = share_changed(self._before, self._look())
        self._before = []

    def _look(self) -> list[Tensor]:
        return [p.detach().flatten()[index] for p, index in self._sampled]

    def _not_finite(self, what: str) -> RunError:
        """NF001 with the step and where the first such number is; the fix names the trainer's own arguments."""
        called, model = self._last_call.arguments, inner_model(self.trainer.model)
        passes = [lambda: model(*called[0], **called[1])] if called is not None else []
        args = self.trainer.args
        error = non_finite_error(
            self.trainer.model, passes, step=self.trainer.state.global_step + 1, what=what, gradient=self.gradient,
            learning_rate=args.learning_rate, clip=args.max_grad_norm or None, compute=self.compute,
        )  # fmt: skip
        return RunError(error.message, code="NF001", fix=in_trainers_words(error.fix or ""))


# transformers' names of its losses that are means over the labels: how many of a row's first labels have no output to be compared with
_MEANS_OVER_TOKENS = {"ForCausalLM": 1, "ForConditionalGeneration": 1, "ForMaskedLM": 0, "ForTokenClassification": 0}
# where the methods that make and hand on this loss are written
_TRAINERS = ("transformers.trainer", "transformers.trainer_seq2seq", "trl.trainer.sft_trainer")
_FORWARDS = ("transformers", "trl", "liger_kernel")
# variables of these forwards that hold no other part of the loss; a mixture's is switched on by `output_router_logits`
_THE_LOSS = ("masked_lm_loss", "aux_loss")


class Evaluation:
    """Wraps `prediction_step` and `evaluation_loop` of one trainer. Made before the model's forward is replaced.

    shift  a row's first label that counts; None where the loss is not known to be a mean over tokens
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.methods = trainer, Methods(trainer)
        self.sums: Tensor | None = None  # fp64[2]: loss x tokens, tokens
        self.shift = _first_counted(trainer)

    def install(self) -> None:
        self.methods.wrap("prediction_step", self._prediction_step)
        self.methods.wrap("evaluation_loop", self._evaluation_loop)

    def remove(self) -> None:
        self.methods.restore()

    def _prediction_step(self, original: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        labels = inputs.get("labels") if hasattr(inputs, "get") else None
        result = original(model, inputs, *args, **kwargs)
        loss = result[0]
        if not isinstance(labels, Tensor) or labels.dim() != 2 or labels.is_floating_point() or _other_labels(inputs):
            self.sums = None
        if self.sums is None or not isinstance(labels, Tensor) or not isinstance(loss, Tensor) or loss.numel() != 1:
            self.sums = None  # one batch without token labels: the trainer's own mean stands
            return result
        counted = (labels[:, self.shift :] != -100).sum().to(loss.device, torch.float64)
        if counted:
            self.sums = self.sums.to(loss.device) + torch.stack([loss.detach().reshape(()).double() * counted, counted])
        return result

    def _evaluation_loop(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        arguments = self.trainer.args
        flags = {name: getattr(arguments, name) for name in ("bf16_full_eval", "fp16_full_eval")}
        self.sums = None if self.shift is None else torch.zeros(2, dtype=torch.float64)
        try:
            for name in flags:
                setattr(arguments, name, False)
            output = original(*args, **kwargs)
        finally:
            for name, value in flags.items():
                setattr(arguments, name, value)
        sums, self.sums = self.sums, None
        prefix = kwargs.get("metric_key_prefix", args[4] if len(args) > 4 else "eval")
        if sums is not None and f"{prefix}_loss" in output.metrics:
            total = self.trainer.accelerator.reduce(sums.to(self.trainer.args.device), reduction="sum")
            if float(total[1]):
                output.metrics[f"{prefix}_loss"] = float(total[0] / total[1])
        return output


def _first_counted(trainer: Any) -> int | None:
    """`Evaluation.shift`."""
    own = getattr(trainer, "compute_loss_func", None) is not None
    if own or any(defined_in(trainer, method) not in _TRAINERS for method in ("compute_loss", "prediction_step")):
        return None
    prompts = getattr(trainer.model, "active_peft_config", None)
    # PEFT's virtual tokens stand before a row's first label
    if getattr(prompts, "is_prompt_learning", False):
        return None
    if getattr(trainer, "aux_loss_enabled", False):
        return None
    return _first_label_of(inner_model(trainer.model))


def _first_label_of(model: nn.Module) -> int | None:
    """The same of the model's own loss, by what the code of its forward names."""
    forward = type(model).forward
    library = library_of(model.__dict__.get("forward", forward))
    if library not in _FORWARDS or hasattr(model, "_loss_function"):
        return None
    config = getattr(model, "config", None)
    configs = [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))]
    if any(getattr(c, "output_router_logits", False) for c in configs):
        return None
    code, loss_type = inspect.unwrap(forward).__code__, str(getattr(model, "loss_type", None))
    if any(name.endswith("_loss") and name not in _THE_LOSS for name in code.co_varnames):
        return None
    if "loss_function" in code.co_names or library == "liger_kernel":
        return _MEANS_OVER_TOKENS.get(loss_type)
    # older forwards write their cross-entropy out; of the older decoders some shift the labels and some do not
    if loss_type in ("ForMaskedLM", "ForTokenClassification"):
        return 0
    return 0 if getattr(config, "is_encoder_decoder", False) and type(model).__name__ in _sequence_to_sequence() else None


def _sequence_to_sequence() -> set[str]:
    """Names of transformers' encoder-decoders, whose `loss_type` is another or none; their labels are not shifted."""
    from transformers.models.auto import modeling_auto as auto

    tables = (auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES)
    return {name for table in tables for name in table.values() if isinstance(name, str)}


def _other_labels(inputs: Any) -> bool:
    """Whether the batch has labels of other kinds too, which a model adds to its loss."""
    return any("label" in name and name not in ("labels", "shift_labels") for name in inputs)
