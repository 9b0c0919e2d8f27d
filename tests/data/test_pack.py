"""Packing: every row once, none cut, little room left; labels such that no document is predicted
from another.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.api import TokenRows, TokenWriter, join_rows, pack_best_fit, pack_rows

from isotype.data.rows import IGNORE_INDEX, Row, Share


def block(*lengths: int, first: int = 1) -> TokenRows:
    writer = TokenWriter()
    for k, n in enumerate(lengths):
        ids = tuple(range(first + 100 * k, first + 100 * k + n))
        writer.add(
            Row(ids, (IGNORE_INDEX,) * (n // 3) + ids[n // 3 :], n // 3), example=k, cut=False
        )
    return TokenRows([writer.block({})])


@pytest.mark.full
@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=60), capacity=st.integers(40, 90))
def test_every_row_is_in_one_pack_and_fits(lengths: list[int], capacity: int) -> None:
    packs = pack_best_fit(np.array(lengths), capacity)
    assert sorted(i for one in packs for i in one) == list(range(len(lengths)))
    sums = [sum(lengths[i] for i in one) for one in packs]
    assert max(sums) <= capacity
    assert len(sums) == 1 or sum(sorted(sums)[:2]) > capacity, "the two emptiest would fit into one"


def test_a_packed_row_is_its_documents_one_after_the_other() -> None:
    rows = block(6, 9, 3)
    packed = pack_rows(rows, 18)
    (row,) = packed
    assert row.documents == (6, 9, 3)
    assert row.input_ids == sum((r.input_ids for r in rows), ())
    starts = {0, 6, 15}
    expected = [
        IGNORE_INDEX if k in starts else label
        for k, label in enumerate(sum((r.labels for r in rows), ()))
    ]
    assert list(row.labels) == expected
    assert row.supervised == sum(r.supervised for r in rows)
    assert packed.facts() == {"rows": 3, "packed_rows": 1, "filled": 1.0, "length": 18}
    assert packed.lengths.tolist() == [18]


def test_sources_are_packed_apart_and_counted() -> None:
    both = TokenRows([block(5, 5, 5).blocks[0], block(4, 4, first=7).blocks[0]])
    packed = pack_rows(both, 10)
    assert packed.shares([Share(3, 2.0), Share(2, 1.0)]) == [Share(2, 2.0), Share(1, 1.0)]
    assert [row.documents for row in packed] == [(5, 5), (5,), (4, 4)]
    assert join_rows([Row((5, 6), (5, 6), 0)]) == Row((5, 6), (IGNORE_INDEX, 6), 1, (2,))
