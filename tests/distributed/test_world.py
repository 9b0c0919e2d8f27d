"""What processes do one after the other, and the errors of exchanges that no meeting knows of."""

from __future__ import annotations

import json
import re
import threading

import pytest
import torch.distributed

from isotype.distributed.world import _is_of_an_exchange
from isotype.tasks.choose import train
from tests.distributed.processes import ended, start

EXCHANGING = re.compile("reduce|gather|scatter|all_to_all|broadcast|barrier|send|recv|Store|init_process_group|new_group|rendezvous")
IN_TURN = """
import json, sys, time
from pathlib import Path
from isotype.distributed.world import join

world = join("cpu", timeout=600)

def work():
    begin = time.monotonic()
    time.sleep(0.3)
    return begin, time.monotonic()

begin, end = world.in_turn(work)
spans = world.gather([begin, end])
if world.first:
    Path(sys.argv[1]).write_text(json.dumps(spans))
world.close()
"""

LEAVE = """
import json, sys, time
from pathlib import Path
import torch.distributed
from isotype.distributed.world import join

world = join("cpu", timeout=600)
destroys = torch.distributed.destroy_process_group

def destroy():
    Path(sys.argv[1], f"closed_{world.rank}").write_text(str(time.monotonic()))
    destroys()

torch.distributed.destroy_process_group = destroy
world.sum([1.0])
if world.rank == int(sys.argv[2]):
    time.sleep(1.0)
Path(sys.argv[1], f"through_{world.rank}").write_text(str(time.monotonic()))
world.close()
"""


def test_one_process_exchanges_nothing(configured, monkeypatch):
    """Neither a group nor a store is made, and no function of torch.distributed that communicates is called."""
    called = []
    exchanging = [name for name, f in vars(torch.distributed).items() if callable(f) and EXCHANGING.search(name)]
    assert {"init_process_group", "all_reduce", "all_gather_single", "reduce_scatter_single", "TCPStore", "send"} <= set(exchanging)
    for name in exchanging:
        monkeypatch.setattr(torch.distributed, name, lambda *_, name=name, **__: called.append(name))
    assert train(configured("run", train={"steps": 2, "accumulate": 2})) == 0
    assert called == []
    assert not torch.distributed.is_initialized()
    assert not [one for one in threading.enumerate() if one.name in ("signs of life", "lifeline")]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("late", [0, 2])
def test_no_process_closes_its_connections_before_all_are_through(late, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(LEAVE)
    status, said = ended(start(3, str(script), str(tmp_path), str(late)))
    assert status == 0, said
    through, closed = ([float((tmp_path / f"{what}_{rank}").read_text()) for rank in range(3)] for what in ("through", "closed"))
    assert max(through) <= min(closed)


@pytest.mark.timeout(900)
def test_processes_of_a_machine_work_one_after_the_other(tmp_path):
    script, spans = tmp_path / "script.py", tmp_path / "spans.json"
    script.write_text(IN_TURN)
    status, said = ended(start(3, str(script), str(spans)))
    assert status == 0, said
    (_, first), (second, last), (third, _) = json.loads(spans.read_text())
    assert first <= second
    assert last <= third


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4321", True),
        ("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)", False),
    ],
)
def test_an_error_of_ones_own_is_not_one_of_an_exchange(text, is_one):
    assert _is_of_an_exchange(RuntimeError(text)) == is_one
    assert _is_of_an_exchange(torch.distributed.DistBackendError("NCCL"))
