"""Computes the weights of a run in fp32, both before and after training.

The weights are computed one tensor at a time, so that a caller needs memory for one tensor besides
the loaded model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..model.export import embedding_and_head
from ..model.load import load_base
from ..model.served import ServedFormat
from ..precision.apply import weight_shape
from .loaded import LoadedRun
from .merge import adapted_weights, dequantise, merged_weight, strip_adapter_name

_ORIGINAL = ".original_module."


class RunWeights:
    """Computes the weights of a run. Their names are those of the plain model, without PEFT's
    prefixes.

    changed_names  the weights that training could change
    """

    def __init__(self, run: LoadedRun) -> None:
        from peft import PeftModel

        model: Any = run.model
        self.has_adapter = isinstance(model, PeftModel)
        self.inner: Any = model.get_base_model() if self.has_adapter else model
        self.adapters: dict[str, Any] = {}
        self.original: dict[str, Tensor] = {}
        self.served: ServedFormat | None = None
        if run.precision.served and self.has_adapter:
            self.served = ServedFormat(run.precision.served, model)
        if self.has_adapter:
            self.adapters = adapted_weights(self.inner)
            self.parameters = plain_parameters(self.inner)
            self.original = {
                name.replace(_ORIGINAL, "."): parameter
                for name, parameter in self.inner.named_parameters()
                if _ORIGINAL in name
            }
            self.changed_names = frozenset(self.adapters) | frozenset(self.original)
        else:
            self.parameters = plain_parameters(self.inner)
            base = load_base(
                run.source,
                run.precision,
                attention=run.config.model.attention,
                device=torch.device("cpu"),
                trainable=True,
            )
            self.original = plain_parameters(base)
            self.changed_names = frozenset(self.parameters)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a weight, also of a packed weight."""
        return weight_shape(self.parameters[name])

    @torch.no_grad()
    def base(self, name: str) -> Tensor:
        """Returns a weight before training, in fp32."""
        return dequantise(self.original.get(name, self.parameters[name]))

    @torch.no_grad()
    def trained(self, name: str) -> Tensor:
        """Returns the fp32 value of a weight after training. It is the base's weight plus the exact
        change by the adapters. If the run was trained for a served format, matrices are rounded to
        this format.
        """
        value = self.unrounded(name)
        if self.served is None:
            return value
        return self.served.round(value, self.parameters[name])

    def trained_without_widening(self, name: str) -> Tensor:
        """Returns what `trained` returns, but in the dtype of the model if this needs no rounding.
        The weight is then not copied.
        """
        parameter = self.parameters[name]
        is_computed = self.served is not None or name in self.adapters
        if is_computed or getattr(parameter, "quant_state", None) is not None:
            return self.trained(name)
        return parameter.detach()

    def trained_values(self, parameter: Tensor) -> Tensor:
        """Returns what `trained` returns, for a parameter of the model in place of its name."""
        name = next(name for name, value in self.parameters.items() if value is parameter)
        return self.trained(name)

    @torch.no_grad()
    def unrounded(self, name: str) -> Tensor:
        """Returns the fp32 value of a weight after training, as `trained` does, but never rounds it
        to a served format.
        """
        value = dequantise(self.parameters[name])
        layer = self.adapters.get(name)
        return value if layer is None else merged_weight(layer, value)


def plain_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters and the persistent buffers by their names without PEFT's prefixes."""
    parameters: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        plain_name = strip_adapter_name(name)
        if plain_name is not None:
            parameters[plain_name] = parameter
    persistent = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        plain_name = strip_adapter_name(name)
        if name in persistent and plain_name is not None and buffer.is_floating_point():
            parameters[plain_name] = buffer
    return parameters


def is_tied(weights: RunWeights) -> bool:
    """Returns True if the trained head and embedding have the same values. If only one of them has
    an adapter, training can make them different.
    """
    names = embedding_and_head(weights.inner)
    if names is None:
        return False
    embedding, head = (name.replace(".base_layer.", ".") for name in names)
    if head not in weights.parameters:
        return True
    if embedding not in weights.parameters:
        return False
    if weights.parameters[embedding].shape != weights.parameters[head].shape:
        return False
    if head not in weights.adapters and embedding not in weights.adapters:
        return weights.parameters[embedding].data_ptr() == weights.parameters[head].data_ptr()
    return torch.equal(weights.trained(embedding), weights.trained(head))
