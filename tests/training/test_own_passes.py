"""The passes of a process in a step: rows of several shapes, and processes that make theirs together."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count, groupby

import torch

from isotype.distributed.rank import Batching
from isotype.training.task import Idle, batches_of_rank


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


def test_each_process_makes_its_own_passes():
    assert batching_of("aaab", rank=0, size=1, together=False) == ["aa", "a", "b"]
    assert batching_of("aaab", rank=0, size=2, together=False) == ["aa"]
    assert batching_of("aaab", rank=1, size=2, together=False) == ["a", "b"]


def test_processes_that_share_a_model_make_as_many_passes_as_the_one_with_most():
    assert batching_of("aaab", rank=0, size=2, together=True) == ["aa", "(a)"]
    assert batching_of("aaab", rank=1, size=2, together=True) == ["a", "b"]
    assert batching_of("abaaaaac", rank=0, size=2, together=True) == ["a", "b", "aa"]
    assert batching_of("abaaaaac", rank=1, size=2, together=True) == ["aa", "a", "c"]


def test_an_idle_pass_counts_nothing_and_moves_to_the_device():
    idle = Idle(Letters(2, "aa"))
    assert (idle.rows, idle.weight, idle.units) == (0, 0, 0)
    assert idle.to(torch.device("cpu")) == Idle(Letters(2, "aacpu"))
