"""Determines how much memory this process may use. This is the machine's memory, or a limit that is
smaller. Imports no torch.

Source  cgroups(7), getrlimit(2), proc_pid_status(5)
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
PROCESS = Path("/proc/self")
# the file of a group's limit in each version of control groups
_LIMIT_FILES = ("memory.max", "memory.limit_in_bytes")


def usable_memory() -> int:
    """Returns the memory of the machine in bytes, or the smallest limit if a limit is smaller. The
    limits come from the process's control group, from all groups around this group, and from
    `ulimit -v` and `ulimit -d`. The result is 0 if the machine's memory is unknown.
    """
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0
    return min([total, *_group_limits(), *_process_limits()])


def _group_limits() -> Iterator[int]:
    """Yields the limits of the control group of this process and of all groups around it. In a
    container, the container's own group may be mounted as the root of all groups. In this case, the
    path of the process's group does not exist.
    """
    for folder in _group_folders():
        for name in _LIMIT_FILES:
            try:
                yield int((folder / name).read_text())
            except (OSError, ValueError):  # no such file, or "max"
                continue


def _group_folders() -> set[Path]:
    folders = {GROUPS, GROUPS / "memory"}
    try:
        lines = (PROCESS / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return folders
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2 has one tree for all controllers
            root = GROUPS
        elif "memory" in controllers.split(","):
            root = GROUPS / "memory"
        else:
            continue
        group = root / path.lstrip("/")
        folders |= {group, *(parent for parent in group.parents if parent.is_relative_to(root))}
    return folders


def _process_limits() -> Iterator[int]:
    """Yields the limits that `ulimit -v` and `ulimit -d` set, converted to limits of memory. Both
    limit the address space of the process, which is larger than its memory. The current difference
    between address space and memory is therefore subtracted from each limit.
    """
    try:
        import resource
    except ImportError:  # not on Windows
        return
    for kind, used_field in (("RLIMIT_AS", "VmSize"), ("RLIMIT_DATA", "VmData")):
        limit, _ = resource.getrlimit(getattr(resource, kind))
        if limit == resource.RLIM_INFINITY:
            continue
        unused_addresses = status_bytes(used_field) - status_bytes("VmRSS")
        yield max(1, limit - max(0, unused_addresses))


def status_bytes(name: str) -> int:
    """Returns a size in /proc/self/status; 0 on systems that have no such file."""
    try:
        lines = (PROCESS / "status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:")), 0)
