"""Which process is named when a run of several ends, and that no wait is for ever."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict

import pytest

from tests.api import (
    ENDED_KEY,
    BoundedStore,
    Heartbeat,
    StoreTimeoutError,
    find_lost_processes,
    read_lost_message,
)

from .processes import ended, start


class Dictionary:
    """A store in this process, which can be frozen."""

    def __init__(self):
        self.values, self.answers = {}, threading.Event()
        self.answers.set()

    def set(self, key, value):
        self.answers.wait()
        self.values[key] = value.encode()

    def get(self, key):
        self.answers.wait()
        return self.values[key]

    def check(self, keys):
        self.answers.wait()
        return all(key in self.values for key in keys)

    def clone(self):
        return self


def test_every_call_of_a_frozen_store_ends():
    frozen = Dictionary()
    store = BoundedStore(frozen, 0.2)
    store.set("a", "b")
    other = store.clone()
    assert store.get("a") == b"b"
    assert store.check(["a"])
    assert not store.check(["a", "c"])
    with pytest.raises(KeyError):
        store.get("c")
    frozen.answers.clear()
    calls = (lambda: store.set("c", "d"), lambda: store.check(["a"]), lambda: other.get("a"))
    for call in calls:
        begin = time.monotonic()
        with pytest.raises(StoreTimeoutError, match=r"did not answer within 0\.2 s"):
            call()
        assert time.monotonic() - begin < 5
    frozen.answers.set()
    begin = time.monotonic()
    with pytest.raises(StoreTimeoutError):  # it would answer the call before
        store.get("a")
    assert time.monotonic() - begin < 0.1


def ended_process() -> int:
    """The number of a process that has ended."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def test_of_several_ended_processes_the_one_that_was_lost_is_named():
    store, host = BoundedStore(Dictionary(), 5.0), socket.gethostname()
    for rank in range(6):
        pid = os.getpid() if rank == 0 else ended_process()
        store.set(f"sign/{rank}", json.dumps(asdict(Heartbeat(rank, host, pid, exchanges=3))))
    own = Heartbeat(0, host, os.getpid(), exchanges=3)
    for rank in (1, 2):
        store.set(f"{ENDED_KEY}/{rank}", "")
    store.set(f"{ENDED_KEY}/3", "step 4: rank 5 died")
    store.set("left/4", "")
    (lost,) = find_lost_processes(store, own, 6, timeout=1.0)
    assert (lost.heartbeat.rank, lost.is_dead, lost.symptom) == (5, True, "died")
    assert read_lost_message(store, range(6)) == "step 4: rank 5 died"
    # on other machines nothing is known but their signs
    for rank in range(1, 6):
        store.set(
            f"sign/{rank}", json.dumps(asdict(Heartbeat(rank, "another machine", 1, exchanges=3)))
        )
    (lost,) = find_lost_processes(store, own, 6, timeout=0.5)
    assert (lost.heartbeat.rank, lost.symptom) == (5, "gave no sign of life for 0.5 s")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.full
def test_of_four_processes_the_killed_one_alone_is_named(configured, tmp_path):
    configured("run")
    process = start(4, "-m", "tests.distributed.worker",
                    json.dumps({"config": str(tmp_path / "run.yaml"), "fault": [3, 4, "die"]}))  # fmt: skip
    status, said = ended(process)
    assert status == 1, said
    assert "rank 3 on " in said
    assert not [rank for rank in range(3) if f"rank {rank} on" in said], said


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.full
def test_the_others_end_when_the_first_process_is_frozen(count, configured, tmp_path):
    configured("run", parallel={"timeout": 10})
    begin = time.monotonic()
    process = start(count, "-m", "tests.distributed.worker",
                    json.dumps({"config": str(tmp_path / "run.yaml"), "fault": [0, 4, "stop"]}),
                    farewell=5.0)  # fmt: skip
    status, said = ended(process)
    assert status == 1, said
    assert time.monotonic() - begin < 300
    assert "MP002 step 4: rank 0 on " in said
    assert "where all processes meet, does not answer; waited 10 s (parallel.timeout)" in said
