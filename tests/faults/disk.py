"""A disk that fills up: a tmpfs that holds a little more each time, or that another program fills right before a file operation.

Without the right to mount there are no trials.
A run on too small a disk must end with one message and without a traceback, keep its last whole checkpoint, and go on from it to the end
of the undisturbed run once there is room. With the preflight's disk check on, the run must be refused before it starts.
"""

import contextlib
import ctypes
import json
import os
import random
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from .child import Ended, run
from .operations import before_operation, operations_of
from .trial import Trial
from .workshop import FIRST, Workshop

ENOUGH = 1 << 14  # KiB
FILLER = "filler"


def disk_trials(workshop: Workshop, *, sizes: int, seed: int) -> Iterator[Trial]:
    """`sizes` disks from next to nothing to nearly enough, and as many filled at random moments."""
    if not can_mount(workshop.folder / "disk"):
        return
    whole, _ = workshop.undisturbed(FIRST)
    needed = sum(-(-p.stat().st_size // 4096) * 4 for p in whole.rglob("*") if p.is_file())  # KiB, in pages
    yield _mounted(workshop, needed // 2, checked=True)
    for i in range(sizes):
        yield _mounted(workshop, max(4, int(needed * (i + 1) / (sizes + 1))))
    moments, operations = random.Random(seed), operations_of(workshop, FIRST)
    for i in range(sizes):
        yield _mounted(workshop, ENOUGH, filled_before=moments.randint(operations * i // sizes + 1, operations * (i + 1) // sizes))


def _mounted(workshop: Workshop, kib: int, *, checked: bool = False, filled_before: int = 0) -> Trial:
    """In a fork with the small disk, which hands the trial back through a file; its namespace and the disk end with it."""
    back = workshop.log()
    pid = os.fork()
    if pid == 0:
        try:
            mount = workshop.folder / "disk"
            if not (isolate() and mount_small(mount, kib)):
                os._exit(1)
            before = before_operation(filled_before, lambda: fill(mount)) if filled_before else None
            trial = _on_disk(
                workshop, mount / "run", kib, checked=checked, before=before, filled=bool(filled_before),
                make_room=lambda: (mount / FILLER).unlink(missing_ok=True) if filled_before else enlarge(mount, ENOUGH),
            )  # fmt: skip
            back.write_text(json.dumps(trial.__dict__))
            os._exit(0)
        finally:
            os._exit(1)
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0:
        return Trial(part="disk", what="ENOSPC", survived=False, identical=None, wrong=f"the trial on {kib} KiB failed itself")
    return Trial(**json.loads(back.read_text()))


def fill(disk: Path) -> None:
    """What another program does: takes all the space there is."""
    with contextlib.suppress(OSError), (disk / FILLER).open("wb", buffering=0) as file:
        for size in (1 << 20, 4096):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)) == size:
                    pass


def _on_disk(
    workshop: Workshop, folder: Path, kib: int, *, checked: bool, make_room: Callable[[], object],
    before: Callable[[], None] | None = None, filled: bool = False,
) -> Trial:  # fmt: skip
    settings = workshop.settings(folder)
    skip = [] if checked else ["--skip", "PF004=the campaign fills this disk on purpose"]
    ended = run(["train", str(settings), *skip], workshop.log(), before=before)
    wrong = _said_wrong(ended, checked)
    make_room()
    _, different = workshop.ends_as_undisturbed(folder, workshop.undisturbed(FIRST)[0], settings)
    if filled and ended.status == 0 and not different:  # nothing but the report was left to write
        wrong = []
    kind = "refused by the preflight" if checked else "ENOSPC, filled by another program" if filled else "ENOSPC, too small"
    return Trial(
        part="disk", what=f"{kind}, {_moment(ended)}", survived=not wrong, identical=not different,
        message=" ".join(ended.error.removeprefix("isotype: ").partition("\n  fix")[0].split()).replace(str(workshop.folder), "..."),
        wrong="; ".join(f"{kib} KiB: {w}" for w in wrong + different),
    )  # fmt: skip


def _said_wrong(ended: Ended, checked: bool) -> list[str]:
    if checked:
        return [] if ended.status == 3 and "PF004" in ended.error else [f"not refused: exit {ended.status}: {ended.output[-1500:]}"]
    if ended.status not in (1, 2) or not ended.clear or not ("CK001" in ended.error or "No space" in ended.error):
        return [f"exit {ended.status}: {ended.output[-3000:]}"]
    return []


def _moment(ended: Ended) -> str:
    if ended.status == 3:
        return "before step 1"
    steps = [line for line in ended.output.splitlines() if line.startswith("step ")]
    if not steps:
        return "before step 1"
    return "at the result" if any(line.startswith("step 12/12  eval") for line in steps) else "in training"


# --- A small disk for one process and its children: a tmpfs in a mount namespace of its own, gone when they are.


CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000


def isolate() -> bool:
    """Puts this process into a mount namespace of its own. False where the kernel refuses."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if os.geteuid() != 0:
            user, group = os.getuid(), os.getgid()
            if libc.unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0:
                return False
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"0 {user} 1")
            Path("/proc/self/gid_map").write_text(f"0 {group} 1")
        elif libc.unshare(CLONE_NEWNS) != 0:
            return False
    except (OSError, AttributeError):
        return False
    return _mount("--make-rprivate", "/")


def mount_small(folder: Path, kib: int) -> bool:
    """An empty tmpfs of `kib` KiB at `folder`. False where it cannot be mounted."""
    folder.mkdir(parents=True, exist_ok=True)
    return _mount("-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(folder))


def enlarge(folder: Path, kib: int) -> None:
    """What a user does who frees space: the same files, on a disk of `kib` KiB."""
    if not _mount("-o", f"remount,size={kib}k", str(folder)):
        raise RuntimeError(f"{folder} could not be enlarged")


def can_mount(folder: Path) -> bool:
    """Tried in a fork, which takes its namespace with it."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if isolate() and mount_small(folder, 64) else 1)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def _mount(*arguments: str) -> bool:
    try:
        return subprocess.run(["mount", *arguments], capture_output=True, check=False).returncode == 0
    except OSError:
        return False
