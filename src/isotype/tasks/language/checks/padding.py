"""PF022: padding behind a row changes what the model predicts in it.

Rows of a batch are padded on the right. A model that counts on padding on the left, as CPMAnt does, masks a row's own beginning then and
reads the padding in its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from ....data.rows import Row
from ....finding import Finding, Place, Severity
from ....training.preflight.rehearsal import STEP_ERRORS, undone
from ..batches import Batch, collate
from ..loss import model_inputs
from .subject import LanguageSubject

LONGEST = 64  # tokens of the row in the trial
# of the largest logit, at half of the positions: other shapes round otherwise, by at most 0.4% in bf16 in the families that were tried
APART, APART_IN_FP32 = 2e-2, 1e-3


def padding_changes_nothing(subject: LanguageSubject) -> Iterator[Finding]:
    if subject.config.data.packing:
        return
    prepared = subject.prepared
    row = min(subject.longest_rows, key=lambda row: len(row.input_ids))
    with undone(prepared):
        prepared.model.eval()
        try:
            moved = moved_by_padding(prepared.model, row, pad_id=subject.task.tokenizer.pad_token_id, device=prepared.device)
        except STEP_ERRORS:  # the rehearsed step has said it
            return
    if moved <= (APART_IN_FP32 if prepared.resolved.precision.compute == "fp32" else APART):
        return
    yield Finding(
        code="PF022", severity=Severity.WARNING, place=Place(symbol="data.train"),
        message="padding behind a row changes what the model says in it: rows are learnt otherwise beside longer ones",
        observed=f"logits move by {moved:.2g} of the largest at half of the row's positions",
        cause="this model finds the beginning or the length of a row by itself, and not as padding on the right has them",
        fix="data.packing: true has no padding, where the model can keep rows apart; rows of one length have none; or take a model that "
        "reads its attention mask",
    )  # fmt: skip


@torch.no_grad()
def moved_by_padding(model: nn.Module, row: Row, *, pad_id: int, device: torch.device) -> float:
    """By how much a row's logits move when padding is put behind it, relative to the largest; the median of its positions.

    0.0 for a model that draws random numbers in evaluation too: its logits move by themselves.
    """
    n = min(LONGEST, len(row.input_ids))
    ids = row.input_ids[:n]
    padded = collate([Row(ids, ids, 0), Row((*ids, ids[0]), (*ids, ids[0]), 0)], pad_id=pad_id, device_type=device.type).to(device)
    alone = replace(
        padded, input_ids=padded.input_ids[:1, :n], labels=padded.labels[:1, :n], attention_mask=torch.ones_like(padded.input_ids[:1, :n])
    )  # fmt: skip
    as_is, moved = (_logits(model, batch)[:n] for batch in (alone, padded))

    def apart(other: Tensor) -> float:
        return float((as_is - other).abs().amax(-1).median() / as_is.abs().max().clamp_min(1e-9))

    by = apart(moved)
    return by if by < APART_IN_FP32 or apart(_logits(model, alone)[:n]) < APART_IN_FP32 else 0.0


def _logits(model: nn.Module, batch: Batch) -> Tensor:
    logits: Tensor = model(**model_inputs(model, batch)).logits[0].float()
    return logits
