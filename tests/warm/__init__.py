"""Python processes with the libraries imported: for tests of commands and of several processes,
which would spend their time on imports.

`interpreter()` is the path of a program that takes the arguments of `python`: `-m MODULE`, `-c
CODE` or a script. A server, one for all workers of a run of pytest, has torch, transformers and PEFT
imported and computes nothing; each command is a fork of it, with the caller's arguments,
environment, folder and open files. What a test says about imports, about start-up or about
variables that are read while libraries are imported needs `sys.executable`.
"""

import fcntl
import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CLIENT = Path(__file__).with_name("client.py")


@functools.cache
def interpreter() -> str:
    """The program's path. The first worker that calls this starts the server, which ends when every
    worker that called it has ended: then nobody has its standard input open for writing.
    """
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is None:
        folder = Path(tempfile.mkdtemp(prefix="isotype-warm-"))
    else:
        folder = Path(tempfile.gettempdir(), f"isotype-warm-{os.getuid()}-{run}")
        folder.mkdir(mode=0o700, exist_ok=True)
    program, server_input = folder / "python", folder / "input"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if program.exists():
            # without O_NONBLOCK this would wait for ever for a server that was killed
            os.open(server_input, os.O_WRONLY | os.O_NONBLOCK)
        else:
            start_server(folder, server_input)
            # -S: the program only hands on what it was given
            program.write_text(f"#!{sys.executable} -SE\n" + CLIENT.read_text())
            program.chmod(0o755)
    return str(program)


def start_server(folder: Path, server_input: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT / "src"), str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    )
    os.mkfifo(server_input)
    # this process's end, open until it ends; a pipe's only writer would wait for a reader
    os.open(server_input, os.O_RDWR)
    with open(server_input, "rb") as reading:
        server = subprocess.Popen(
            [sys.executable, "-c", "import sys; from tests.warm.server import run; run(sys.argv[1])", str(folder / "socket")],
            cwd=ROOT, env=environment, stdin=reading, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
    if server.stdout.readline() != b"ready\n":
        raise RuntimeError("the server of tests.warm did not start; what it said stands above")
    server.returncode = 0  # nobody waits for it
