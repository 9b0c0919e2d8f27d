"""Shared cores are noticed by the load, and fewer threads are advised only where they are faster."""

from __future__ import annotations

import math
from dataclasses import replace

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
    assert "or OMP_WAIT_POLICY=PASSIVE, which changes no result" in str(found)
    assert "PASSIVE" not in str(replace(found, passive=True))


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


SHARED = module.Contention(load=9.0, cores=2.0, threads=2, seconds={1: 1.0, 2: 3.0}, cpu_seconds={1: 1.0, 2: 6.0})


def test_a_run_advises_fewer_threads_and_goes_on_with_those_that_it_has(configured, monkeypatch, capsys):
    from isotype.tasks.choose import train
    from isotype.training import run

    monkeypatch.setattr(run, "contention", lambda: SHARED)
    before = torch.get_num_threads()
    assert train(configured(train={"steps": 1}, run={"samples": [], "sample_every": 0})) == 0
    assert "OMP_NUM_THREADS=1" in capsys.readouterr().out
    assert torch.get_num_threads() == before


def test_the_quickstart_uses_fewer_threads(monkeypatch, capsys):
    from isotype.quickstart import stages

    taken = []
    monkeypatch.setattr(module, "contention", lambda *, load: SHARED if load() == math.inf else None)  # an idle last minute says nothing
    monkeypatch.setattr(torch, "set_num_threads", taken.append)
    stages.use_fewer_threads_where_faster()
    assert taken == [1]
    assert "1 of 2 threads: 3.0 times as fast as all" in capsys.readouterr().out
