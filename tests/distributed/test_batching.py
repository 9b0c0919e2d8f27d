"""The rows of a step are the same on any number of processes; rows of several shapes take a micro-batch for each shape."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count, groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isotype.config.schema import TrainSection
from isotype.distributed.rank import Batching
from isotype.errors import UsageError
from isotype.training.task import Idle, batches_of_rank


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
    if accumulate % size == 0:  # the micro-batches are those of one process
        assert (shares[0].rows, shares[0].total) == (batch_size, accumulate)


def test_the_nearest_numbers_are_named():
    with pytest.raises(UsageError, match=r"5 processes cannot share 12 rows.*\n.*4 or 6 processes can"):
        Batching.of(TrainSection(batch_size=4, accumulate=3), size=5)
    with pytest.raises(UsageError, match="4 processes can"):
        Batching.of(TrainSection(batch_size=4), size=8)
    with pytest.raises(UsageError, match="1 process can"):
        Batching.of(TrainSection(batch_size=1), size=2)


@dataclass
class Letters:
    rows: int
    text: str

    def to(self, device):
        return Letters(self.rows, self.text + str(device))


class OneLetterEach:
    """Rows are letters, which are their shapes."""

    def one_shape_each(self, rows):
        return [list(same) for _, same in groupby(sorted(rows))]

    def collate(self, rows):
        assert len(set(rows)) == 1
        return Letters(len(rows), "".join(rows))


class Given:
    def __init__(self, rows):
        self.rows, self.at = rows, count()

    def take(self, number):
        return [self.rows[next(self.at)] for _ in range(number)]


def batching_of(rows, *, rank, size, together, batch=2):
    batching = Batching(batch, len(rows) // batch, range(rank * len(rows) // batch // size, (rank + 1) * len(rows) // batch // size))
    stream = Given(rows)
    found = batches_of_rank(OneLetterEach(), stream, batching, together=together)
    assert next(stream.at) == len(rows)  # every process passes over the rows of all
    return [f"({one.batch.text})" if isinstance(one, Idle) else one.text for one in found]


def test_processes_that_share_a_model_make_as_many_micro_batches_as_the_one_with_most():
    assert batching_of("aaab", rank=0, size=2, together=True) == ["aa", "(a)"]
    assert batching_of("aaab", rank=1, size=2, together=True) == ["a", "b"]
    assert batching_of("abaaaaac", rank=0, size=2, together=True) == ["a", "b", "aa"]
    assert batching_of("abaaaaac", rank=1, size=2, together=True) == ["aa", "a", "c"]
