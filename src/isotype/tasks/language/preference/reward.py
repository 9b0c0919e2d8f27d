"""`reward`: a score head on the model learns to score chosen answers above rejected ones. Source: Bradley and Terry 1952.

loss  -ln sigmoid(s - t) + center_rewards_coefficient (s + t)^2
s, t  scores of the chosen and the rejected answer, at their last tokens
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....errors import UsageError
from ....training.task import Check, Words
from ..batches import model_inputs
from ..checks import CHECKS, end_never_learnt
from .batch import PairBatch
from .objective import Preference

MEASURES = ("accuracy", "margin", "mean_reward")


class Reward(Preference):
    """Learns scores from pairs. A step's loss is the mean over its pairs."""

    words = Words(
        units="tokens", unit="tok", weight="pairs", row="pair", evaluated="pairs", measures=MEASURES, live=("margin", "accuracy")
    )  # fmt: skip
    scored = True

    def check(self) -> None:
        super().check()
        config = self.config
        if config.run.samples:
            raise UsageError("run.samples has no effect: a reward model gives scores, and writes nothing", fix="leave out run.samples")
        if config.model.add_tokens:
            raise UsageError("model.add_tokens with train.objective: reward is not offered: the tokens were never trained")

    def loss_sum(self, model: nn.Module, batch: PairBatch, divisor: int = 1, *, dtype: str) -> Tensor:
        scores = model(**model_inputs(model, batch.answers)).logits.squeeze(-1).float()
        chosen, rejected = scores[::2], scores[1::2]
        margin = chosen - rejected
        losses = -F.logsigmoid(margin)
        if coefficient := self.config.preference.center_rewards_coefficient:
            losses = losses + coefficient * (chosen + rejected).square()
        measures = ((margin > 0).float(), margin, (chosen + rejected) / 2)
        return torch.stack([losses.sum(), *(values.detach().sum() for values in measures)]) / divisor

    def checks(self) -> Mapping[str, tuple[Check, ...]]:
        """Those of rows and tokens; nothing is generated, and the trials of packing and padding read logits of every position."""
        return {"data": tuple(check for check in CHECKS["data"] if check.run is not end_never_learnt)}
