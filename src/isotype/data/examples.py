"""Three training rows as a person can read them, with what is learnt of each: `examples.json` of a run, shown in its report."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, islice
from typing import Any

from .rows import IGNORED, Row

LOOKED_AT = 1000  # rows among which the median and the longest are found: a run's rows may be a stream
MOST_TOKENS = 512  # shown of a row


def examples(rows: Sequence[Row], tokenizer: Any) -> list[dict[str, Any]]:
    """The first row, one of median length and the longest, each cut into parts that are learnt or not.

    A part is `{"text", "learnt"}`, special tokens written out. `tokens` and `learnt` count the whole row, `left_out` what is not shown.
    """
    seen = list(islice(rows, LOOKED_AT))
    by_length = sorted(range(len(seen)), key=lambda i: len(seen[i].input_ids))
    chosen: dict[int, str] = {}
    for which, i in (("the first row", 0), ("of median length", by_length[len(seen) // 2]), ("the longest", by_length[-1])) if seen else ():
        chosen.setdefault(i, which)
    return [{"which": which, "row": i, **_example(seen[i], tokenizer)} for i, which in chosen.items()]


def _example(row: Row, tokenizer: Any) -> dict[str, Any]:
    shown = list(zip(row.input_ids, row.labels))[:MOST_TOKENS]
    parts = []
    for learnt, pairs in groupby(shown, key=lambda pair: pair[1] != IGNORED):
        ids = [token for token, _ in pairs]
        parts.append({"text": tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False), "learnt": learnt})
    return {"tokens": len(row.input_ids), "learnt": row.supervised, "left_out": len(row.input_ids) - len(shown), "parts": parts}
