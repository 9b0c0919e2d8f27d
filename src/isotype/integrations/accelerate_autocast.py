"""Moves autocast to the inner model. accelerate wraps the forward of one object only, and `generate` bypasses that wrapper.

Which wrapper accelerate would build is decided by `Accelerator.native_amp`, an attribute of this trainer's accelerator. fp16 keeps it: the
gradient scaler asks for the same attribute when it unscales.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..precision.apply import inner_model
from ..precision.precision import Precision


class WideLogits:
    """Forward hook of the inner model: returns logits in fp32, as accelerate's wrapper does. Deferred logits only record the dtype."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        logits = getattr(output, "logits", None)
        if isinstance(logits, Tensor) and logits.dtype in (torch.bfloat16, torch.float16):
            output.logits = logits.float()
        return output


class Autocast:
    """Takes autocast from the accelerator and gives it back."""

    def __init__(self, accelerator: Any) -> None:
        self.accelerator, self.native_amp = accelerator, accelerator.native_amp
        self.prepared: list[tuple[nn.Module, Any]] = []
        self.hooks: list[Any] = []

    def take(self, models: list[nn.Module], precision: Precision) -> None:
        """Reference models were prepared when the trainer was built: their forward is unwrapped."""
        if precision.loss_scaling == "none":
            self.accelerator.native_amp = False
        for model in models:
            original = model.__dict__.get("_original_forward")
            if original is not None and "forward" in model.__dict__:
                self.prepared.append((model, model.__dict__["forward"]))
                if getattr(original, "__func__", None) is type(model).forward:
                    del model.__dict__["forward"]
                else:
                    model.__dict__["forward"] = original
            if precision.compute != "fp32":
                self.hooks.append(inner_model(model).register_forward_hook(WideLogits()))

    def give_back(self) -> None:
        self.accelerator.native_amp = self.native_amp
        for hook in self.hooks:
            hook.remove()
        for model, forward in self.prepared:
            model.__dict__["forward"] = forward
        self.hooks.clear()
        self.prepared.clear()
