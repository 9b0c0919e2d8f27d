"""The rows of a step are the same on any number of processes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isotype.config.schema import TrainSection
from isotype.distributed.rank import Batching
from isotype.errors import UsageError


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 16))
def test_every_row_is_computed_once(batch_size, accumulate, size):
    train = TrainSection(batch_size=batch_size, accumulate=accumulate)
    if batch_size * accumulate % size:
        with pytest.raises(UsageError):
            Batching.of(train, size=size)
        return
    shares = [Batching.of(train, rank=rank, size=size) for rank in range(size)]
    assert [n for share in shares for n in share.own] == list(range(shares[0].total))
    assert all(share.rows * share.total == batch_size * accumulate and share.rows <= batch_size for share in shares)
    if accumulate % size == 0:  # the passes are those of one process
        assert (shares[0].rows, shares[0].total) == (batch_size, accumulate)


def test_one_process_has_the_passes_of_the_file():
    assert Batching.of(TrainSection(batch_size=3, accumulate=5)) == Batching(3, 5, range(5))


def test_the_nearest_numbers_are_named():
    with pytest.raises(UsageError, match=r"5 processes cannot share 12 rows.*\n.*4 or 6 processes can"):
        Batching.of(TrainSection(batch_size=4, accumulate=3), size=5)
    with pytest.raises(UsageError, match="4 processes can"):
        Batching.of(TrainSection(batch_size=4), size=8)
    with pytest.raises(UsageError, match="1 process can"):
        Batching.of(TrainSection(batch_size=1), size=2)
