"""What processes do one after the other, and the errors of exchanges that no meeting knows of."""

from __future__ import annotations

import json

import pytest
import torch.distributed

from isotype.distributed.world import _is_of_an_exchange
from tests.distributed.processes import ended, start

IN_TURN = """
import json, sys, time
from pathlib import Path
from isotype.distributed.world import join

world = join("cpu", timeout=60)

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
