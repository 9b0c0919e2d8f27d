"""Counts of a run's rows."""

from itertools import pairwise

import pytest

from isotype.data.facts import histogram


@pytest.mark.parametrize("lengths", [[1], [5, 5, 5], [1, 16], [1, 17], list(range(1, 1025)), [100_000, 3, 70]])
def test_bars_of_one_width_hold_every_row(lengths):
    bars = histogram(lengths)
    assert 1 <= len(bars) <= 16
    assert sum(bar["rows"] for bar in bars) == len(lengths)
    edges = [bar["up_to"] for bar in bars]
    assert min(lengths) <= edges[0]
    assert max(lengths) <= edges[-1]
    width = edges[-1] - edges[-2] if len(edges) > 1 else 1
    assert all(b - a == width for a, b in pairwise(edges))
    assert width & (width - 1) == 0


def test_no_rows_no_bars():
    assert histogram([]) == []
