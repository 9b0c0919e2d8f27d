"""A batch of pairs, and the log-probabilities of its answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....data.pairs import Pair
from ....optimize.head import loss_of
from ....wording import counted
from ..batches import Batch, collate, model_inputs, next_tokens


class OfAnswers:
    """What a batch shows of its `answers`, which are the rows of the model; `rows` are those of the data."""

    answers: Batch

    @property
    def rows(self) -> int:
        raise NotImplementedError

    @property
    def weight(self) -> int:
        return self.rows

    @property
    def units(self) -> int:
        return self.answers.tokens

    @property
    def input_ids(self) -> Tensor:
        return self.answers.input_ids

    @property
    def labels(self) -> Tensor:
        return self.answers.labels

    @property
    def inputs(self) -> dict[str, Any]:
        return self.answers.inputs


@dataclass(frozen=True)
class PairBatch(OfAnswers):
    """answers    2 B rows: the chosen and the rejected one of each pair in turn
    lengths    fp32[2 B]  learnt tokens of each
    reference  fp32[2 B]  log-probabilities under the model as the run starts; None where they are not known or not used
    """

    answers: Batch
    lengths: Tensor
    reference: Tensor | None

    @property
    def rows(self) -> int:
        return len(self.lengths) // 2

    def __str__(self) -> str:
        return f"{counted(self.rows, 'pair')} of {counted(self.input_ids.shape[1], 'token')}"

    def to(self, device: torch.device) -> PairBatch:
        reference = None if self.reference is None else self.reference.to(device, non_blocking=True)
        return replace(self, answers=self.answers.to(device), lengths=self.lengths.to(device, non_blocking=True), reference=reference)


def collate_pairs(pairs: Sequence[Pair], *, pad_id: int, device_type: str = "cpu") -> PairBatch:
    rows = [row for pair in pairs for row in (pair.chosen, pair.rejected)]
    known = [pair.reference for pair in pairs if pair.reference is not None]
    return PairBatch(
        collate(rows, pad_id=pad_id, device_type=device_type),
        torch.tensor([row.supervised for row in rows], dtype=torch.float32),
        torch.tensor(known, dtype=torch.float32).flatten() if len(known) == len(pairs) else None,
    )


def answer_log_probs(model: nn.Module, batch: Batch, *, dtype: str) -> Tensor:
    """The log-probability of each row's learnt tokens, summed: fp32[B]. Only rows of learnt tokens reach the head.

    inside  `dtype` for a token, fp32 for the sum
    """
    targets = next_tokens(batch, every_row=False)
    log_probs_N = loss_of(model, model_inputs(model, batch), replace(targets, each=True, dtype=dtype))
    assert batch.counted is not None
    by_place = torch.zeros(batch.labels.numel(), device=log_probs_N.device).index_copy(0, batch.counted, log_probs_N.float())
    return row_sums(by_place.view(batch.labels.shape))


def row_sums(values_BT: Tensor) -> Tensor:
    """fp32[B]. Halves are added, so that zeros behind a row change no bit of its sum: a row has one sum however long its batch is."""
    length = values_BT.shape[1]
    half = 1 << max(0, length - 1).bit_length()
    values = F.pad(values_BT, (0, half - length))
    while half > 1:
        half //= 2
        values = values[:, :half] + values[:, half:]
    return values.squeeze(1)
