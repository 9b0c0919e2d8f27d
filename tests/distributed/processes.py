"""Runs of several real processes, for the tests."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.api import SHUTDOWN_SECONDS
from tests.warm import ROOT, interpreter

# seconds: only a hang takes so long, also on a machine that has much else to do; tests that wait
# have `timeout(900)`
GUARD = 850

_LAUNCH = """import sys
import isotype.distributed.launch as module
module.FAREWELL = float(sys.argv[1])
sys.exit(module.launch(sys.argv[3:], int(sys.argv[2])))"""


def environment() -> dict[str, str]:
    """That of a shell that nobody launched."""
    kept = {
        k: v
        for k, v in os.environ.items()
        if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    }
    return kept | {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
    }


def start(count: int, *arguments: str, farewell: float = SHUTDOWN_SECONDS) -> subprocess.Popen[str]:
    """`python ARGUMENTS` as so many processes, under the launcher of `isotype train --processes`.

    farewell  seconds that the others have after one has failed: few where they are known not to end
              by themselves
    """
    command = [sys.executable, "-c", _LAUNCH, str(farewell), str(count), interpreter(), *arguments]
    return subprocess.Popen(
        command,
        env=environment(),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """(exit status, everything it said)."""
    try:
        out, err = process.communicate(timeout=GUARD)
    except subprocess.TimeoutExpired:
        process.terminate()
        out, err = process.communicate(timeout=60)
        raise AssertionError(f"hung: {out}\n{err}") from None
    return process.returncode, out + err


def run(count: int, config: Path | None = None, **given: Any) -> tuple[int, str]:
    """A run of `worker` on so many processes."""
    paths = {
        name: str(value) if isinstance(value, Path) else value for name, value in given.items()
    }
    return ended(
        start(
            count,
            "-m",
            "tests.distributed.worker",
            json.dumps({"config": config and str(config), **paths}),
        )
    )


def succeeds(count: int, config: Path | None = None, **given: Any) -> str:
    """Everything that such a run said, which ends well."""
    status, said = run(count, config, **given)
    assert status == 0, said
    return said


def children_of(pid: int) -> list[int]:
    """Processes whose parent this is."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
        except (OSError, IndexError, ValueError):
            continue
    return found
