"""Answers with a label, and for each a partner: its prompt with the answer to another prompt, for KTO's reference point."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, overload

import numpy as np

from ..errors import UsageError
from .rows import IGNORED, Row
from .tokens import TokenRows


class Answer(NamedTuple):
    """reference  log-probabilities of the answer and of its partner under the model as the run starts, once they are known"""

    row: Row
    partner: Row
    wanted: bool
    reference: tuple[float, float] | None = None

    @property
    def input_ids(self) -> tuple[int, ...]:
        """Of the longer one, with its prompt."""
        return max(self.row.input_ids, self.partner.input_ids, key=len)


class Labelled(Sequence[Answer]):
    """The answers of a side. Partners are drawn once, by the seed: they have the answers of rows of `pool` with another prompt.

    reference  fp32[2 N]  two values an answer, once they are known
    Raises     UsageError where no row has another prompt
    """

    def __init__(
        self, rows: TokenRows, pool: TokenRows, *, seed: int, max_length: int, partners: np.ndarray | None = None,
        reference: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        self.rows, self.pool, self.seed, self.max_length, self.reference = rows, pool, seed, max_length, reference
        self.partners = drawn_partners(rows.column("prompt"), pool.column("prompt"), seed) if partners is None else partners

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, i: int) -> Answer: ...
    @overload
    def __getitem__(self, i: slice) -> Labelled: ...
    def __getitem__(self, i: int | slice) -> Answer | Labelled:
        if isinstance(i, slice):
            start, stop, step = i.indices(len(self))
            assert step == 1, "answers are sliced without a step"
            known = None if self.reference is None else self.reference[2 * start : 2 * stop]
            return Labelled(self.rows[i], self.pool, seed=self.seed, max_length=self.max_length, partners=self.partners[i], reference=known)
        row = self.rows[i]
        block, place = self.rows.place(i)
        both = None if self.reference is None else (float(self.reference[2 * i]), float(self.reference[2 * i + 1]))
        partner = with_answer_of(row, self.pool[int(self.partners[i])], self.max_length)
        return Answer(row, partner, bool(self.rows.blocks[block].wanted[place]), both)

    @property
    def lengths(self) -> np.ndarray:
        return self.rows.lengths


def drawn_partners(prompts: np.ndarray, pool: np.ndarray, seed: int) -> np.ndarray:
    """int64[R]: for each prompt a row of the pool with another one, each as likely.

    prompts, pool  uint64[R], uint64[P]  digests of the rows' prompts
    """
    order = np.argsort(pool, kind="stable")
    begin, end = (np.searchsorted(pool[order], prompts, side) for side in ("left", "right"))
    others = len(pool) - (end - begin)
    if len(prompts) and not others.min():
        raise UsageError(
            "every training row has the same prompt: kto compares answers with those to other prompts",
            fix="rows of at least two prompts; train.objective: dpo learns from pairs",
        )
    drawn = np.random.default_rng(seed).integers(0, np.maximum(others, 1))
    chosen: np.ndarray = order[drawn + (drawn >= begin) * (end - begin)]
    return chosen


def with_answer_of(row: Row, other: Row, max_length: int) -> Row:
    """The prompt of a row with another's answer, cut at `max_length`."""
    at = row.prompt_length
    ids, labels = row.input_ids[:at] + other.input_ids[other.prompt_length :], (IGNORED,) * at + other.labels[other.prompt_length :]
    return Row(ids[:max_length], labels[:max_length], at)


def label_note(rows: TokenRows) -> str:
    wanted = rows.column("wanted")
    share = float(wanted.mean()) if len(wanted) else 0.0
    return f"{int(wanted.sum()):,} answers are labelled as wanted ({share:.0%}), {int((~wanted).sum()):,} as unwanted"
