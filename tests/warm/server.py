"""The process whose forks the commands are: `run(SOCKET)`. When its standard input ends, it and all
commands end.
"""

import atexit
import gc
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType


@dataclass
class Request:
    arguments: list[str]
    folder: str
    environment: dict[str, str]
    numbers: list[int]  # of the files there
    files: list[int]  # their numbers here


def imports() -> None:
    """What commands would import. Nothing is computed: threads do not survive a fork."""
    gc.disable()  # collections took 1.5 s of 10
    from tests.api import disable_hub_kernels

    disable_hub_kernels()  # as a run of the command line does: see tests/conftest.py
    import numpy.ma  # noqa: F401
    import peft  # noqa: F401
    from transformers import AutoTokenizer, LlamaForCausalLM  # noqa: F401

    from isotype.cli.app import build_app
    from isotype.tasks.language import task  # noqa: F401
    from isotype.training import run  # noqa: F401

    build_app()
    gc.enable()
    gc.collect()
    gc.freeze()  # a fork's collections leave it alone, and share its memory
    assert threading.active_count() == 1
    assert len(os.listdir("/proc/self/task")) == 1, "an import started a thread"


@dataclass
class Command:
    process: int
    file: int  # of the process: ready to be read when it has ended
    client: socket.socket


def serve(path: str) -> list[str]:
    """Forks for each request; returns only in a fork, which has become what was asked for: the
    arguments of `python`.
    """
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen(64)
    waiting = selectors.DefaultSelector()
    waiting.register(listening, selectors.EVENT_READ)
    waiting.register(sys.stdin, selectors.EVENT_READ)
    running: list[Command] = []
    os.write(1, b"ready\n")
    while True:
        for key, _ in waiting.select():
            if key.fileobj is sys.stdin:
                for command in running:
                    os.kill(command.process, signal.SIGKILL)
                shutil.rmtree(os.path.dirname(path), ignore_errors=True)
                os._exit(0)
            elif key.fileobj is listening:
                client, _ = listening.accept()
                request = receive(client)
                process = os.fork()
                if process == 0:
                    for command in running:
                        command.client.close()
                        os.close(command.file)
                    for own in (listening, client, waiting):
                        own.close()
                    return become(request)
                for file in request.files:
                    os.close(file)
                running.append(Command(process, os.pidfd_open(process), client))
                for ready in (running[-1].file, client):
                    waiting.register(ready, selectors.EVENT_READ, running[-1])
            elif key.data not in running:  # both were ready, and the first was its end
                continue
            elif key.fileobj is key.data.client:
                hand_on(key.data, waiting)
            else:
                running.remove(key.data)
                end(key.data, waiting)


def receive(client: socket.socket) -> Request:
    size, files, _, _ = socket.recv_fds(client, 8, 250)
    text = b""
    while len(text) < int.from_bytes(size, "big"):
        text += client.recv(1 << 16)
    return Request(*json.loads(text.decode("utf-8", "surrogateescape")), list(files))


def hand_on(command: Command, waiting: selectors.BaseSelector) -> None:
    """Signals that the client got. A client that is gone was killed, so the command is."""
    numbers = b""
    with suppress(ConnectionError):
        numbers = command.client.recv(64)
    for number in numbers or bytes([signal.SIGKILL]):
        os.kill(command.process, number)
    if not numbers:
        waiting.unregister(command.client)


def end(command: Command, waiting: selectors.BaseSelector) -> None:
    """Tells the client how the command ended."""
    status = os.waitstatus_to_exitcode(os.waitpid(command.process, 0)[1])
    with suppress(OSError):
        command.client.sendall(b"%d\n" % status)
    for file in (command.file, command.client):
        with suppress(KeyError):  # a client that is gone
            waiting.unregister(file)
    command.client.close()
    os.close(command.file)


def become(request: Request) -> list[str]:
    """In the fork: the caller's session of its own, files under the numbers that they had there,
    folder and environment.
    """
    os.setsid()
    above = 1 + max(*request.numbers, *request.files)
    for place, file in enumerate(request.files):  # out of the way of the numbers
        os.dup2(file, above + place)
        os.close(file)
    for place, number in enumerate(request.numbers):
        os.dup2(above + place, number)
        os.close(above + place)
    streams()
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    import numpy

    numpy.random.seed()
    return request.arguments


def streams() -> None:
    """New objects: these know whether their file is a terminal or has a position."""
    sys.stdin = sys.__stdin__ = os.fdopen(0)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w")
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", buffering=1, errors="backslashreplace")


def main(arguments: list[str]) -> None:
    """As `python ARGUMENTS` would."""
    own = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*own, *(path for path in sys.path if path not in own)]
    if arguments[0] == "-u":
        sys.stdout.reconfigure(write_through=True)
        arguments = arguments[1:]
    option, *rest = arguments
    if option == "-m":
        sys.path.insert(0, os.getcwd())
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif option == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *rest[1:]]
        sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(sys.modules["__main__"]))
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(option)))
        sys.argv = arguments
        runpy.run_path(option, run_name="__main__")


def status_of(arguments: list[str]) -> int:
    """The exit status of `main`, after what an interpreter does at its end."""
    status = 0
    try:
        main(arguments)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    return status


def run(path: str) -> None:
    # also where they were ignored when this process began, as under nohup; the client asks its own
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    imports()
    status = status_of(serve(path))
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status & 255)  # the many modules are not taken down one by one
