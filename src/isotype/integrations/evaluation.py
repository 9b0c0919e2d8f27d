"""Evaluation under the precision: the loss is a mean over tokens, and `bf16_full_eval` leaves the weights as they are.

Trainer averages the batches' means, so that its evaluation loss depends on the batch size; here each batch counts with its tokens. Only
where batches have `labels` of tokens (a preference trainer's loss is per row already), and not for a user's own `compute_loss` or
`compute_loss_func`, since what they average over is not known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .methods import Methods, overridden

# transformers' names of the losses that compare each output with the label at its own place, as an encoder-decoder's does too
_OF_THE_SAME_TOKEN = ("ForMaskedLM", "ForTokenClassification")


class Evaluation:
    """Wraps `prediction_step` and `evaluation_loop` of one trainer."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.methods = trainer, Methods(trainer)
        self.sums: Tensor | None = None  # fp64[2]: loss x tokens, tokens
        self.own_loss = overridden(trainer, "compute_loss") is not None or getattr(trainer, "compute_loss_func", None) is not None
        own_token = getattr(trainer.model, "loss_type", None) in _OF_THE_SAME_TOKEN
        self.shift = 0 if own_token or getattr(getattr(trainer.model, "config", None), "is_encoder_decoder", False) else 1

    def install(self) -> None:
        self.methods.wrap("prediction_step", self._prediction_step)
        self.methods.wrap("evaluation_loop", self._evaluation_loop)

    def remove(self) -> None:
        self.methods.restore()

    def _prediction_step(self, original: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        labels = inputs.get("labels") if hasattr(inputs, "get") else None
        result = original(model, inputs, *args, **kwargs)
        loss = result[0]
        if not isinstance(labels, Tensor) or labels.dim() != 2 or labels.is_floating_point():
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
        self.sums = None if self.own_loss else torch.zeros(2, dtype=torch.float64)
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
