"""Casts weights to the dtypes of a precision, and restores them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..dtypes import to_torch
from ..precision.apply import is_quantised
from ..precision.precision import Precision


@dataclass
class Weights:
    """What `cast` changed.

    dtypes     parameter -> its dtype before
    originals  id of a narrowed parameter -> the wide tensor, in host memory
    rounded    how many were narrowed without keeping it
    """

    dtypes: list[tuple[nn.Parameter, torch.dtype]] = field(default_factory=list)
    originals: dict[int, Tensor] = field(default_factory=dict)
    rounded: int = 0

    def cast(self, model: nn.Module, precision: Precision, *, frozen: bool, keep: bool) -> None:
        """Frozen floating parameters become `base`, trainable ones `trainable`; quantised ones and buffers stay as they are.

        frozen  the whole model is only read (a reference model), whatever requires_grad says
        keep    keeps what narrowing would lose
        """
        base, trainable = to_torch(precision.unquantised), to_torch(precision.trainable)
        for parameter in model.parameters():
            if not parameter.is_floating_point() or is_quantised(parameter):
                continue
            dtype = trainable if parameter.requires_grad and not frozen else base
            if parameter.dtype == dtype:
                continue
            self.dtypes.append((parameter, parameter.dtype))
            made = parameter.data.to(dtype)
            if not torch.equal(made.to(parameter.dtype), parameter.data):
                if keep:
                    self.originals[id(parameter)] = parameter.data.cpu()
                else:
                    self.rounded += 1
            parameter.data = made

    @property
    def kept_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.originals.values())

    def restore(self) -> list[str]:
        """Gives every parameter its dtype back, and its value where nothing changed it since; returns a line for each thing that was not
        restored."""
        for parameter, dtype in reversed(self.dtypes):
            original = self.originals.get(id(parameter))
            if original is not None and torch.equal(original.to(parameter.dtype), parameter.data.cpu()):
                parameter.data = original.to(parameter.device)
            else:
                parameter.data = parameter.data.to(dtype)
        said = f"{self.rounded} tensors keep the rounding of the precision that was attached (reversible=False)"
        self.dtypes.clear()
        self.originals.clear()
        return [said] if self.rounded else []
