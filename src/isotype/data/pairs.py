"""Preference pairs as a view of flat rows: rows 2i and 2i + 1 are the chosen and the rejected answer of pair i."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, overload

import numpy as np

from .encode import Tally
from .formats import Example
from .rows import Row
from .tokens import TokenRows

Encoded = tuple[Example, Row, bool]
_FEW, _NEARLY_ALWAYS = 10, 0.9  # pairs below which nothing is said of their lengths; the share in which one side is longer


class Pair(NamedTuple):
    """reference  log-probabilities of both answers under the model as the run starts, once they are known"""

    chosen: Row
    rejected: Row
    reference: tuple[float, float] | None = None

    @property
    def input_ids(self) -> tuple[int, ...]:
        """Of the longer answer, with its prompt."""
        return max(self.chosen.input_ids, self.rejected.input_ids, key=len)


class Pairs(Sequence[Pair]):
    """The pairs of a side. reference: fp32[2 N], a value a row, where an objective has one and it is known."""

    def __init__(self, rows: TokenRows, reference: np.ndarray | None = None) -> None:
        self.rows, self.reference = rows, reference

    def __len__(self) -> int:
        return len(self.rows) // 2

    @overload
    def __getitem__(self, i: int) -> Pair: ...
    @overload
    def __getitem__(self, i: slice) -> Pairs: ...
    def __getitem__(self, i: int | slice) -> Pair | Pairs:
        if isinstance(i, slice):
            start, stop, step = i.indices(len(self))
            assert step == 1, "pairs are sliced without a step"
            rows = slice(2 * start, 2 * max(start, stop))
            return Pairs(self.rows[rows], None if self.reference is None else self.reference[rows])
        both = None if self.reference is None else (float(self.reference[2 * i]), float(self.reference[2 * i + 1]))
        return Pair(self.rows[2 * i], self.rows[2 * i + 1], both)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of the longer answer of each pair, with its prompt."""
        longer: np.ndarray = self.rows.lengths.reshape(-1, 2).max(1)
        return longer


def whole_pairs(encoded: Iterable[Encoded], tally: Tally) -> Iterator[tuple[Encoded, ...]]:
    """Pairs of which both answers have tokens to learn, and other ones; the others are left out and counted."""
    chosen: Encoded | None = None
    for one in encoded:
        if one[0].rejected is not None:
            chosen = one
        elif chosen is not None and chosen[0].rejected is one[0]:
            if chosen[1].input_ids == one[1].input_ids:
                tally.drop("chosen and rejected are the same within data.max_length", one[0].place)
            else:
                yield chosen, one


def pair_digests(rows: TokenRows) -> np.ndarray:
    """uint64[N]: of the tokens of both answers of each pair."""
    chosen, rejected = rows.column("digest").reshape(-1, 2).T
    with np.errstate(over="ignore"):
        both: np.ndarray = chosen * np.uint64(3) + rejected
    return both


def pair_facts(rows: TokenRows) -> dict[str, Any]:
    """What data.json has of a side's pairs: their number, how long the answers are, and how many are cut on one side only."""
    answers = rows.column("supervised").reshape(-1, 2)
    cut = rows.column("cut").reshape(-1, 2)
    digests = pair_digests(rows)
    mean = answers.mean(0).tolist() if len(answers) else [0.0, 0.0]
    return {
        "pairs": len(answers),
        "duplicates": len(digests) - len(np.unique(digests)),
        "chosen_tokens": mean[0],
        "rejected_tokens": mean[1],
        "chosen_longer": float((answers[:, 0] > answers[:, 1]).mean()) if len(answers) else 0.0,
        "rejected_longer": float((answers[:, 0] < answers[:, 1]).mean()) if len(answers) else 0.0,
        "cut_on_one_side": int((cut[:, 0] != cut[:, 1]).sum()),
    }


def pair_notes(facts: dict[str, Any]) -> list[str]:
    """Notes on the training pairs."""
    said = [
        f"answers have {facts['chosen_tokens']:.0f} tokens on average where chosen, {facts['rejected_tokens']:.0f} where rejected; "
        f"the chosen one is longer in {facts['chosen_longer']:.0%} of the pairs, the rejected one in {facts['rejected_longer']:.0%}"
    ]
    if facts["pairs"] > _FEW and max(facts["chosen_longer"], facts["rejected_longer"]) > _NEARLY_ALWAYS:
        said.append("the length of an answer nearly tells which one is chosen: margins may show that length was learnt, and little else")
    if facts["cut_on_one_side"]:
        said.append(f"of {facts['cut_on_one_side']:,} pairs one answer is cut at data.max_length and the other is not")
    return said
