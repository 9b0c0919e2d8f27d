"""A small disk for one process and its children: a tmpfs in a mount namespace of its own, gone when they are.

Works for root, and for other users where the kernel lets them make user namespaces.
"""

import ctypes
import os
import subprocess
from pathlib import Path

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
