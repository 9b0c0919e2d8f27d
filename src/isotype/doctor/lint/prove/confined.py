"""The bounds of the process that executes strangers' functions: no network, no programs, no files written outside, little memory.

An audit hook cannot be taken off again. It stops Python code; the functions have no imports but torch and a few modules of the
standard library (`cut.py`), so that machine code of other packages is never loaded.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from typing import Any

MEMORY = 6 << 30  # bytes of data; torch itself needs about one
FILE_SIZE = 16 << 20  # bytes of one file
_REFUSED = (
    "socket.", "subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.kill", "ctypes.", "shutil.", "pty.",
)  # fmt: skip
_CHANGES = (
    "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown", "os.putenv",
    "os.unsetenv", "os.utime", "os.setxattr",
)  # fmt: skip
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def confine(folder: str) -> None:
    """Puts the limits of the module's docstring into force. folder: the only place where files may be written."""
    inside = os.path.realpath(folder) + os.sep
    for limit, most in ((resource.RLIMIT_DATA, MEMORY), (resource.RLIMIT_FSIZE, FILE_SIZE), (resource.RLIMIT_CORE, 0)):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(limit, (most, most))
    devices = {os.devnull}

    def within(path: Any) -> bool:
        if isinstance(path, int):
            return True  # a descriptor that was opened before
        return (os.path.realpath(os.fsdecode(path)) + os.sep).startswith(inside) or os.fsdecode(path) in devices

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = args
            writes = (isinstance(mode, str) and any(c in mode for c in "wax+")) or bool((flags or 0) & _WRITES)
            if writes and path is not None and not within(path):
                raise PermissionError(f"isotype: writing {path} is not allowed here")
        elif event.startswith(_REFUSED) or (event.startswith(_CHANGES) and not all(within(a) for a in args[:1])):
            raise PermissionError(f"isotype: {event} is not allowed here")

    sys.addaudithook(hook)
