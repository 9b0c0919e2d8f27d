"""Python processes with the libraries imported: for tests of commands and of several processes,
which would spend their time on imports.

`interpreter()` is the path of a program that takes the arguments of `python`: `-m MODULE`, `-c
CODE` or a script. A server, one for each process that runs tests, has torch, transformers and PEFT
imported and computes nothing; each command is a fork of it, with the caller's arguments,
environment, folder and open files. What a test says about imports, about start-up or about
variables that are read while libraries are imported needs `sys.executable`.
"""

import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CLIENT = Path(__file__).with_name("client.py")


@functools.cache
def interpreter() -> str:
    """The program's path; the first call starts the server."""
    folder = Path(tempfile.mkdtemp(prefix="isotype-warm-"))
    program = folder / "python"
    # -S: the program only hands on what it was given
    program.write_text(f"#!{sys.executable} -SE\n" + CLIENT.read_text())
    program.chmod(0o755)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT / "src"), str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    )
    server = subprocess.Popen(
        [sys.executable, "-c", "import sys; from tests.warm.server import run; run(sys.argv[1])", str(folder / "socket")],
        cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    atexit.register(_end, server, folder)
    if server.stdout.readline() != b"ready\n":
        raise RuntimeError("the server of tests.warm did not start; what it said stands above")
    return str(program)


def _end(server: subprocess.Popen[bytes], folder: Path) -> None:
    server.stdin.close()  # it ends, and with it what it started
    server.wait()
    shutil.rmtree(folder, ignore_errors=True)
