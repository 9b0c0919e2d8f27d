"""Runs `isotype` as another system would have it: `python pretend.py win32 check PATH`.

The standard library and the packages of the command line are imported first, as they are here. Then
`sys.platform` is the other system's, and what that system lacks is gone: modules (`fcntl`,
`resource`), functions (`os.fork`, `os.getuid`, ...), /proc. This cannot show another file system:
separators, locks, line ends.
"""

import builtins
import io
import os
import pathlib
import signal
import sys
import sysconfig

# the standard library and the packages decide while they are imported; Isotype must decide when it
# is asked
PRELOADED = (
    "asyncio", "concurrent.futures.process", "ctypes", "difflib", "email", "importlib.metadata", "importlib.resources", "inspect", "json",
    "multiprocessing.connection", "packaging.version", "pathlib", "platform", "pydantic", "rich.console", "rich.markdown", "rich.table",
    "ruamel.yaml", "shutil", "socket", "subprocess", "sysconfig", "tempfile", "typer", "typer.rich_utils", "uuid", "zipfile", "zoneinfo",
)  # fmt: skip
GONE = {
    "win32": (
        ["fcntl", "resource", "pwd", "grp", "termios"],
        [
            "fork",
            "getuid",
            "geteuid",
            "sysconf",
            "killpg",
            "setsid",
            "sched_getaffinity",
            "getpgid",
        ],
    ),
    "darwin": ([], ["sched_getaffinity"]),
}


def pretend(system: str) -> None:
    for module in PRELOADED:
        __import__(module)
    sysconfig.get_config_vars()  # reads a file with the system's name in its own
    modules, functions = GONE[system]
    for name in (*modules, "torch"):  # torch: the doctor must run without it
        sys.modules[name] = None
    for name in functions:
        if hasattr(os, name):
            delattr(os, name)
    if system == "win32":
        for name in ("setitimer", "SIGALRM", "SIGKILL", "SIGVTALRM"):
            if hasattr(signal, name):
                delattr(signal, name)
    sys.platform = system
    for owner in (builtins, io):
        _without_proc(owner)


def _without_proc(owner: object) -> None:
    real = owner.open

    def opened(file, *args, **kwargs):
        if isinstance(file, (str, os.PathLike)) and str(file).startswith("/proc/"):
            raise FileNotFoundError(2, "No such file or directory", str(file))
        return real(file, *args, **kwargs)

    owner.open = opened


if __name__ == "__main__":
    assert pathlib.Path  # imported before anything is changed
    pretend(sys.argv[1])
    sys.argv = ["isotype", *sys.argv[2:]]
    from isotype.__main__ import main

    main()
