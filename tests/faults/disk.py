"""A disk that fills up: a tmpfs that holds a little more each time, or that another program fills
right before a file operation.

Without the right to mount there are no trials.
A run on too small a disk must end with one message and without a traceback, keep its last whole
checkpoint, and go on from it to the end of the undisturbed run once there is room. With the
preflight's disk check on, the run must be refused before it starts.
"""

import contextlib
import ctypes
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from .child import Ended, before_operation, elsewhere, run
from .trial import Trial
from .workshop import Workshop

ENOUGH = 1 << 14  # KiB
FILLER = "filler"


def disk_trials(workshop: Workshop, *, sizes: int, seed: int) -> Iterator[Trial]:
    """`sizes` disks from next to nothing to nearly enough, and as many filled at random moments."""
    if not can_mount(workshop.folder / "disk"):
        return
    whole, _ = workshop.undisturbed()
    # KiB, in pages
    needed = sum(-(-p.stat().st_size // 4096) * 4 for p in whole.rglob("*") if p.is_file())
    yield _mounted(workshop, needed // 2, checked=True)
    for i in range(sizes):
        yield _mounted(workshop, max(4, int(needed * (i + 1) / (sizes + 1))))
    moments, operations = random.Random(seed), workshop.operations()
    for i in range(sizes):
        yield _mounted(
            workshop,
            ENOUGH,
            filled_before=moments.randint(
                operations * i // sizes + 1, operations * (i + 1) // sizes
            ),
        )


def _mounted(
    workshop: Workshop, kib: int, *, checked: bool = False, filled_before: int = 0
) -> Trial:
    """In a fork with the small disk, which hands the trial back through a file; its namespace and
    the disk end with it.
    """
    back, disk = workshop.log(), workshop.folder / "disk"

    def work() -> None:
        small_disk(disk, kib)
        back.write_text(
            json.dumps(
                _on_disk(workshop, disk, kib, checked=checked, filled_before=filled_before).__dict__
            )
        )

    if elsewhere(work) != 0:
        return Trial(part="disk", what="ENOSPC", wrong=[f"the trial on {kib} KiB failed itself"])
    return Trial(**json.loads(back.read_text()))


def fill(disk: Path) -> None:
    """What another program does: takes all the space there is."""
    with contextlib.suppress(OSError), (disk / FILLER).open("wb", buffering=0) as file:
        for size in (1 << 20, 4096):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)) == size:
                    pass


def _on_disk(
    workshop: Workshop, disk: Path, kib: int, *, checked: bool, filled_before: int
) -> Trial:
    folder = disk / "run"
    settings = workshop.settings(folder)
    skip = [] if checked else ["--skip", "PF004=the campaign fills this disk on purpose"]
    before = before_operation(filled_before, lambda: fill(disk)) if filled_before else None
    ended = run(["train", str(settings), *skip], workshop.log(), before=before)
    wrong = _said_wrong(ended, checked)
    if filled_before:
        (disk / FILLER).unlink(missing_ok=True)
    else:  # what a user does who frees space: the same files, on a larger disk
        mount("-o", f"remount,size={ENOUGH}k", str(disk))
    _, stuck, different = workshop.ends_as_undisturbed(folder, workshop.undisturbed()[0], settings)
    # nothing but the report was left to write
    if filled_before and ended.status == 0 and not different:
        wrong = []
    kind = (
        "refused by the preflight"
        if checked
        else "ENOSPC, filled by another program"
        if filled_before
        else "ENOSPC, too small"
    )
    return Trial(
        part="disk", what=f"{kind}, {_moment(ended)}", wrong=[f"{kib} KiB: {w}" for w in wrong + stuck], different=different,
        message=ended.told("\n  fix").replace(str(workshop.folder), "..."),
    )  # fmt: skip


def _said_wrong(ended: Ended, checked: bool) -> list[str]:
    if checked:
        return (
            []
            if ended.status == 3 and "PF004" in ended.error
            else [f"not refused: exit {ended.status}: {ended.output[-1500:]}"]
        )
    if (
        ended.status not in (1, 2)
        or not ended.clear
        or not ("CK001" in ended.error or "No space" in ended.error)
    ):
        return [f"exit {ended.status}: {ended.output[-3000:]}"]
    return []


def _moment(ended: Ended) -> str:
    steps = [line for line in ended.output.splitlines() if line.startswith("step ")]
    if ended.status == 3 or not steps:
        return "before step 1"
    return (
        "at the result"
        if any(line.startswith("step 12/12  eval") for line in steps)
        else "in training"
    )


# --- A small disk for one process and its children: a tmpfs in a mount namespace of its own, gone
# when they are.


CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000


def can_mount(folder: Path) -> bool:
    """Tried in a fork, which takes its namespace with it."""
    return elsewhere(lambda: small_disk(folder, 64)) == 0


def small_disk(folder: Path, kib: int) -> None:
    """Puts this process into a mount namespace of its own, with an empty tmpfs of `kib` KiB at
    `folder`. Exits where the kernel refuses.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None, use_errno=True)
        user, group = os.geteuid(), os.getegid()
        if libc.unshare(CLONE_NEWNS | (CLONE_NEWUSER if user else 0)) == 0:
            if user:
                Path("/proc/self/setgroups").write_text("deny")
                Path("/proc/self/uid_map").write_text(f"0 {user} 1")
                Path("/proc/self/gid_map").write_text(f"0 {group} 1")
            mount("--make-rprivate", "/")
            folder.mkdir(parents=True, exist_ok=True)
            mount("-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(folder))
            return
    sys.exit(1)


def mount(*arguments: str) -> None:
    if subprocess.run(["mount", *arguments], capture_output=True, check=False).returncode != 0:
        sys.exit(1)
