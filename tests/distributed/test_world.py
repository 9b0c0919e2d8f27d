"""What processes do one after the other, and the errors of exchanges that no meeting knows of."""

from __future__ import annotations

import pytest

from tests.distributed.processes import ended, start

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


@pytest.mark.timeout(900)
@pytest.mark.parametrize("late", [0, 2])
def test_no_process_closes_its_connections_before_all_are_through(late, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(LEAVE)
    status, said = ended(start(3, str(script), str(tmp_path), str(late)))
    assert status == 0, said
    through, closed = ([float((tmp_path / f"{what}_{rank}").read_text()) for rank in range(3)] for what in ("through", "closed"))
    assert max(through) <= min(closed)
