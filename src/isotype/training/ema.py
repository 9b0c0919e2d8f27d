"""An exponential moving average of the trained weights (`train.ema`), in `precision.ema`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..dtypes import name as dtype_name
from ..dtypes import to_torch
from ..errors import RunError
from .task import Sample

PREFIX = "ema."
FOLDER_SUFFIX = "_ema"
"""Of the folder of the averaged result beside the trained one's: `adapter_ema`."""


@dataclass(frozen=True)
class Averaged:
    """A sample that was made with the averages in the model's place; a round has it beside the trained weights' own. A `task.Sample`."""

    sample: Sample

    @property
    def file(self) -> tuple[str, bytes] | None:
        return self.sample.file

    def as_json(self) -> dict[str, Any]:
        return {**self.sample.as_json(), "weights": "average"}

    def lines(self) -> tuple[str, str]:
        asked, made = self.sample.lines()
        return f"{asked} (average of the weights)", made


class Ema:
    """averages  name -> the average of one trained weight

    After its n-th update an average has kept the share min(decay, (1 + n) / (10 + n)) of itself, so that the first steps are forgotten in
    short runs too (as diffusers' EMAModel).
    """

    def __init__(self, model: nn.Module, decay: float, dtype: str) -> None:
        self.decay, self.dtype = decay, dtype
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.averages = {name: p.detach().to(to_torch(dtype), copy=True) for name, p in self.parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Takes the weights after optimizer step `step`, from 1."""
        share = min(self.decay, (1 + step) / (10 + step))
        averages = list(self.averages.values())
        weights = [p.detach().to(average.dtype) for p, average in zip(self.parameters.values(), averages)]
        torch._foreach_lerp_(averages, weights, 1 - share)

    def observed(self) -> list[tuple[str, str, str]]:
        """(role, tensor, dtype), in which a task reports the dtypes of its own roles."""
        return [("ema", name, dtype_name(average.dtype)) for name, average in self.averages.items()]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model has the averages within this block, in its weights' own dtype."""
        with torch.no_grad():
            trained = {name: p.detach().clone() for name, p in self.parameters.items()}
            for name, p in self.parameters.items():
                p.copy_(self.averages[name])
            try:
                yield
            finally:
                for name, p in self.parameters.items():
                    p.copy_(trained[name])

    def tensors(self) -> dict[str, Tensor]:
        """For a checkpoint."""
        return {f"{PREFIX}{name}": average for name, average in self.averages.items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises  RunError CK003 for a checkpoint without these averages."""
        for name, average in self.averages.items():
            saved = tensors.get(f"{PREFIX}{name}")
            if saved is None or saved.shape != average.shape or saved.dtype != average.dtype:
                raise RunError(
                    f"this checkpoint has no average of {name} in {self.dtype}", code="CK003",
                    fix="resume with the train.ema and precision.ema it was made with",
                )  # fmt: skip
            average.copy_(saved)
