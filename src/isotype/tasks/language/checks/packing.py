"""PF018: in a packed row, one document changes what the model predicts in another.

Attention is kept apart by positions, which every attention back end of transformers turns into a mask or into cumulative lengths. A
layer that carries a state along the row (a convolution, a recurrence) does not look at them, and neither does an attention of a
model's own, or a model that has its mask made without them (GPT-OSS).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from ....data.pack import joined
from ....data.rows import Row
from ....finding import Finding, Place, Severity
from ....training.preflight.rehearsal import STEP_ERRORS, undone
from ..batches import collate
from ..loss import takes_one_row
from .subject import LanguageSubject

LONGEST = 64  # tokens of each document in the trial: a leak is there from the first token on
APART = 1e-3  # of the largest logit; masked attention gives exactly 0


def packed_documents_apart(subject: LanguageSubject) -> Iterator[Finding]:
    if not subject.config.data.packing:
        return
    prepared = subject.prepared
    with undone(prepared):
        prepared.model.eval()
        try:
            leak = leakage(prepared.model, subject.longest_rows, pad_id=subject.task.tokenizer.pad_token_id, device=prepared.device)
        except STEP_ERRORS:  # the rehearsed step has said it
            return
    if leak <= APART:
        return
    yield Finding(
        code="PF018", severity=Severity.ERROR, place=Place(symbol="data.packing"),
        message="packed documents see each other: other words in the first change what the model says in the second",
        observed=f"logits of the second move by {leak:.2g} of the largest",
        cause="position ids do not keep them apart here: a convolution, a recurrence, an attention of its own, or a mask made without them",
        fix="data.packing: false",
    )  # fmt: skip


@torch.no_grad()
def leakage(model: nn.Module, rows: Sequence[Row], *, pad_id: int, device: torch.device) -> float:
    """By how much the logits of a document move when the tokens of the one before it in a packed row change, relative to the largest."""
    first, second = (_beginning(rows[k % len(rows)]) for k in (0, 1))
    other = (
        Row(first.input_ids[::-1], first.labels, 0)
        if len(set(first.input_ids)) > 1
        else Row((pad_id,) * len(first.input_ids), first.labels, 0)
    )
    as_is, changed = (_logits(model, joined([begin, second]), pad_id, device) for begin in (first, other))
    n = len(first.input_ids)
    ours, theirs = (logits_TV[n : n + len(second.input_ids)].float() for logits_TV in (as_is, changed))
    return float((ours - theirs).abs().max() / ours.abs().max().clamp_min(1e-9))


def _beginning(row: Row) -> Row:
    n = min([LONGEST, *row.documents[:1], len(row.input_ids)])
    return Row(row.input_ids[:n], row.labels[:n], 0)


def _logits(model: nn.Module, row: Row, pad_id: int, device: torch.device) -> Tensor:
    batch = collate([row], pad_id=pad_id, device_type=device.type).to(device)
    batch = batch.as_one_row() if takes_one_row(model) else batch
    logits: Tensor = model(**batch.inputs).logits[0]
    return logits
