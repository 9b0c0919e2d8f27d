"""Evaluation under the precision: the loss is a mean over tokens, and `bf16_full_eval` leaves the weights as they are.

Trainer averages the batches' means, so that its evaluation loss depends on the batch size; here each batch counts with its tokens, where
the loss is known to be a mean over them: a loss of transformers' own, computed by a forward of transformers. Every other evaluation stays
the trainer's: a loss of the user's or of a TRL trainer (JSD, preferences), a CTC loss, one with a mixture's routing added.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..optimize.instances import library_of
from ..precision.apply import inner_model
from .methods import Methods, defined_in

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
