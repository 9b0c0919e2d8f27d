"""Defines preference pairs and labelled answers. The objects of this module do not copy any rows;
they refer to tokenised rows.

Rows 2i and 2i + 1 are the chosen and the rejected answer of pair i. For each labelled answer, KTO
also needs a row that combines the same prompt with the answer to another prompt. We call this row
the partner of the answer. KTO needs the partners to estimate its reference point.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from ..errors import UsageError
from .encode import Tally
from .formats import Example
from .rows import IGNORE_INDEX, Row
from .tokens import LazyRowSequence, TokenRows

# the rows of `Encoder.encode_rows`; the last value is whether the row was cut
EncodedExample = tuple[Example, Row, bool]
# a note on the answers' lengths is given if there are more than _MIN_PAIRS pairs, and if the same
# side (chosen or rejected) is longer in more than the share _LENGTH_SHARE of them
_MIN_PAIRS = 10
_LENGTH_SHARE = 0.9  # the warning's limit for the share of pairs with the longer answer on one side


class Pair(NamedTuple):
    """A chosen and a rejected answer to one prompt.

    reference  log-probabilities of both answers under the initial model; None until they are
               computed
    """

    chosen: Row
    rejected: Row
    reference: tuple[float, float] | None = None

    @property
    def input_ids(self) -> tuple[int, ...]:
        """Returns the tokens of the prompt and of the longer of the two answers."""
        return max(self.chosen.input_ids, self.rejected.input_ids, key=len)


class Pairs(LazyRowSequence[Pair]):
    """The preference pairs of the training or the evaluation rows.

    reference  fp32[2 N]  the log-probability of each row under the initial model; None if the
               objective does not need it or if it is not computed yet
    """

    def __init__(self, rows: TokenRows, reference: np.ndarray | None = None) -> None:
        self.rows = rows
        self.reference = reference

    def __len__(self) -> int:
        return len(self.rows) // 2

    def build_row(self, i: int) -> Pair:
        if self.reference is None:
            reference = None
        else:
            reference = (float(self.reference[2 * i]), float(self.reference[2 * i + 1]))
        return Pair(self.rows[2 * i], self.rows[2 * i + 1], reference)

    @property
    def lengths(self) -> np.ndarray:
        """Returns the number of tokens of the prompt and the longer answer, for each pair."""
        longer: np.ndarray = self.rows.lengths.reshape(-1, 2).max(1)
        return longer


def complete_pairs(
    encoded: Iterable[EncodedExample], tally: Tally
) -> Iterator[tuple[EncodedExample, ...]]:
    """Yields the pairs that can be used. The two answers of a pair must have different tokens, and
    each answer must have tokens to learn. Other pairs are left out. Pairs whose two answers have
    the same tokens are counted in `tally`.
    """
    chosen: EncodedExample | None = None
    for encoded_row in encoded:
        if encoded_row[0].rejected is not None:
            chosen = encoded_row
        elif chosen is not None and chosen[0].rejected is encoded_row[0]:
            if chosen[1].input_ids == encoded_row[1].input_ids:
                tally.drop(
                    "chosen and rejected are the same within data.max_length",
                    encoded_row[0].location,
                )
            else:
                yield chosen, encoded_row


def pair_digests(rows: TokenRows) -> np.ndarray:
    """Returns a hash of both answers of each pair, uint64[N]."""
    chosen, rejected = rows.column("digest").reshape(-1, 2).T
    with np.errstate(over="ignore"):
        digests: np.ndarray = chosen * np.uint64(3) + rejected
    return digests


def pair_facts(rows: TokenRows) -> dict[str, Any]:
    """Returns what data.json says about the pairs: their number, the lengths of the answers, and
    the number of pairs in which only one of the two answers is cut.
    """
    chosen, rejected = rows.column("supervised").reshape(-1, 2).T
    cut = rows.column("cut").reshape(-1, 2)
    count = len(chosen)
    digests = pair_digests(rows)
    sums = {
        "chosen_tokens": chosen.sum(),
        "rejected_tokens": rejected.sum(),
        "chosen_longer": (chosen > rejected).sum(),
        "rejected_longer": (chosen < rejected).sum(),
    }
    means = {name: float(total) / max(1, count) for name, total in sums.items()}
    cut_on_one_side = int((cut[:, 0] != cut[:, 1]).sum())
    return {
        "pairs": count,
        "duplicates": count - len(np.unique(digests)),
        **means,
        "cut_on_one_side": cut_on_one_side,
    }


def pair_notes(facts: dict[str, Any]) -> list[str]:
    """Returns messages for the user about the training pairs."""
    notes = [
        f"answers have {facts['chosen_tokens']:.0f} tokens on average where chosen,"
        f" {facts['rejected_tokens']:.0f} where rejected; the chosen one is longer in"
        f" {facts['chosen_longer']:.0%} of the pairs, the rejected one in"
        f" {facts['rejected_longer']:.0%}"
    ]
    if (
        facts["pairs"] > _MIN_PAIRS
        and max(facts["chosen_longer"], facts["rejected_longer"]) > _LENGTH_SHARE
    ):
        notes.append(
            "the length of an answer nearly tells which one is chosen: margins may show that length"
            " was learnt, and little else"
        )
    if facts["cut_on_one_side"]:
        notes.append(
            f"of {facts['cut_on_one_side']:,} pairs one answer is cut at data.max_length and the"
            " other is not"
        )
    return notes


class Answer(NamedTuple):
    """Contains a labelled answer and its partner. The partner is the same prompt with the answer to
    another prompt.

    reference  log-probabilities of the answer and of its partner under the initial model; None
               until they are computed
    """

    row: Row
    partner: Row
    is_wanted: bool
    reference: tuple[float, float] | None = None

    @property
    def input_ids(self) -> tuple[int, ...]:
        """Returns the tokens of the answer or of its partner, whichever is longer, with the prompt."""
        return max(self.row.input_ids, self.partner.input_ids, key=len)


class LabelledAnswers(LazyRowSequence[Answer]):
    """The labelled answers of the training or the evaluation rows. The partner of an answer is
    chosen at random among the rows of `pool` that have another prompt. The choice depends only on
    the seed and stays the same during the whole run.

    reference  fp32[2 N]  two log-probabilities for each answer; None until they are computed
    Raises     UsageError if no row of `pool` has another prompt
    """

    def __init__(self, rows: TokenRows, pool: TokenRows, *, seed: int, max_length: int) -> None:
        self.rows = rows
        self.pool = pool
        self.max_length = max_length
        self.reference: np.ndarray | None = None
        self.partners = draw_partners(rows.column("prompt"), pool.column("prompt"), seed)
        self._is_wanted = rows.column("wanted")

    def __len__(self) -> int:
        return len(self.rows)

    def build_row(self, i: int) -> Answer:
        row = self.rows[i]
        if self.reference is None:
            reference = None
        else:
            reference = (float(self.reference[2 * i]), float(self.reference[2 * i + 1]))
        partner = swap_answer(row, self.pool[int(self.partners[i])], self.max_length)
        return Answer(row, partner, bool(self._is_wanted[i]), reference)

    @property
    def lengths(self) -> np.ndarray:
        return self.rows.lengths


def draw_partners(prompts: np.ndarray, pool: np.ndarray, seed: int) -> np.ndarray:
    """For each prompt, draws a row of the pool at random. The row must have another prompt, and all
    such rows are equally likely.

    prompts  uint64[R]  hashes of the rows' prompts
    pool     uint64[P]  hashes of the prompts of the rows in the pool
    ->       int64[R]   for each row, the number of the drawn row in the pool
    """
    order = np.argsort(pool, kind="stable")
    begin, end = (np.searchsorted(pool[order], prompts, side) for side in ("left", "right"))
    candidates = len(pool) - (end - begin)
    if len(prompts) and not candidates.min():
        raise UsageError(
            "every training row has the same prompt: kto compares answers with those to other"
            " prompts",
            fix="rows of at least two prompts; train.objective: dpo learns from pairs",
        )
    drawn = np.random.default_rng(seed).integers(0, np.maximum(candidates, 1))
    chosen: np.ndarray = order[drawn + (drawn >= begin) * (end - begin)]
    return chosen


def swap_answer(row: Row, partner: Row, max_length: int) -> Row:
    """Returns a row that consists of the prompt of `row` and the answer of `partner`. The new row
    is cut at `max_length` tokens.
    """
    prompt_length = row.prompt_length
    ids = row.input_ids[:prompt_length] + partner.input_ids[partner.prompt_length :]
    labels = (IGNORE_INDEX,) * prompt_length + partner.labels[partner.prompt_length :]
    return Row(ids[:max_length], labels[:max_length], prompt_length)


def label_note(rows: TokenRows) -> str:
    is_wanted = rows.column("wanted")
    return (
        f"{int(is_wanted.sum()):,} answers are labelled as wanted ({float(is_wanted.mean()):.0%}),"
        f" {int((~is_wanted).sum()):,} as unwanted"
    )
