"""The numbers of one AdamW update."""

from __future__ import annotations

from typing import NamedTuple


class AdamwNumbers(NamedTuple):
    """Of Loshchilov and Hutter 2019; `step` counts from 1."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int

    @property
    def decay(self) -> float:
        """The factor of the weight decay."""
        return 1 - self.lr * self.weight_decay

    @property
    def size(self) -> float:
        """The size of the step, with the first moment's bias correction."""
        return self.lr / (1 - self.beta1**self.step)

    @property
    def correction(self) -> float:
        """The bias correction of the second moment."""
        return 1 / (1 - self.beta2**self.step)
