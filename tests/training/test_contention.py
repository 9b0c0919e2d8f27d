"""Shared cores are noticed by the load, and fewer threads are advised only where they are faster."""

from __future__ import annotations

import pytest
import torch

from isotype.training import contention as module
from isotype.training.contention import contention


@pytest.fixture
def four_threads(monkeypatch):
    monkeypatch.setattr(module, "available_cores", lambda: 4.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)


def test_idle_cores_are_not_measured(four_threads):
    def never(threads):
        raise AssertionError("measured")

    assert contention(load=lambda: 1.0, measure=never) is None


def test_fewer_threads_are_advised_where_they_are_faster(four_threads):
    times = {1: (1.0, 1.0), 2: (1.4, 2.8), 4: (2.0, 4.9)}
    found = contention(load=lambda: 9.8, measure=times.__getitem__)
    assert found is not None
    assert found.best == 1
    assert "a load of 9.8 on 4 cores" in str(found)
    assert "1 thread is 2.0 times as fast as 4, for 1/4.9 of the processor time: OMP_NUM_THREADS=1" in str(found)


def test_busy_cores_on_which_threads_still_help(four_threads):
    times = {1: (1.0, 1.0), 2: (0.6, 1.2), 4: (0.5, 2.0)}
    found = contention(load=lambda: 9.8, measure=times.__getitem__)
    assert found is not None
    assert found.best == 4
    assert "OMP_NUM_THREADS" not in str(found)


def test_more_threads_than_the_container_may_use(monkeypatch, tmp_path):
    quota = tmp_path / "cpu.max"
    quota.write_text("50000 100000\n")
    monkeypatch.setattr(module, "_QUOTA", quota)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert module.available_cores() == 0.5
    assert contention(load=lambda: 0.0, measure=lambda n: (float(n), float(n))).best == 1


def test_the_measurement_leaves_the_number_of_threads_as_it_was():
    before = torch.get_num_threads()
    wall, _ = module._measured(1)
    assert wall > 0
    assert torch.get_num_threads() == before
