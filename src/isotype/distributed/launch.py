"""Implements `isotype train --processes N`. This module starts the processes of a run on this
machine, waits for them and returns their exit status. This module does not import torch.

The first process writes to the terminal. The output of the other processes is stored. The output of
such a process is shown only if the process ends without reporting an error to the first process.
Each signal is forwarded once. If the launcher itself is killed, the operating system closes a pipe
that it held open. The processes notice that the pipe is closed, and end.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any

from ..environment.hardware import count_cores
from .rank import LAUNCHED_BY

# environment variable with the descriptor of a pipe, which closes when the launcher ends
LIFELINE = "ISOTYPE_LIFELINE"
LISTENING_SOCKET = "ISOTYPE_LISTENS_AT"
# seconds that the other processes have to end by themselves after one has failed. This is longer
# than the search for a lost process takes
SHUTDOWN_SECONDS = 20.0
# how many of the last lines of output are shown for a process that ended without reporting its
# error
_PRINTED_LINES = 15


def launch(command: Sequence[str], processes: int) -> int:
    """Runs `command` in `processes` processes, and returns the exit status of the run.

    The status is 0 if the run is complete, and 130 if it was interrupted and saved. In all other
    cases, it is the exit status of the first process, or 1 if the first process was killed.
    """
    listening_socket = socket.create_server(("127.0.0.1", 0), backlog=4 * processes)
    lifeline_read_end, lifeline_write_end = os.pipe()
    outputs: list[IO[bytes]] = []
    processes_started: list[subprocess.Popen[bytes]] = []
    try:
        with _forward_signals(processes_started):
            for rank in range(processes):
                outputs.append(tempfile.TemporaryFile())  # noqa: SIM115  # closed below
                processes_started.append(
                    _start(
                        command, rank, processes, listening_socket, lifeline_read_end, outputs[-1]
                    )
                )
            os.close(lifeline_read_end)
            listening_socket.close()
            failed_rank = _wait(processes_started)
        _report_failure(processes_started, outputs, failed_rank)
    finally:
        os.close(lifeline_write_end)
        for process in processes_started:
            if process.poll() is None:
                process.kill()
            process.wait()
        for file in outputs:
            file.close()
    first_status = int(processes_started[0].returncode)
    if first_status > 0:
        return first_status
    return int(any(process.returncode for process in processes_started))


def watch_lifeline() -> None:
    """Ends this process when its launcher has ended. Does nothing in a process that `launch` did
    not start.
    """
    handle = os.environ.pop(LIFELINE, None)
    if handle is None:
        return

    def wait() -> None:
        os.read(int(handle), 1)  # no byte is ever written: the read returns when the pipe closes
        os._exit(1)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()


def _start(
    command: Sequence[str],
    rank: int,
    size: int,
    listening_socket: socket.socket,
    lifeline_read_end: int,
    output: IO[bytes],
) -> subprocess.Popen[bytes]:
    environ = os.environ | {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(listening_socket.getsockname()[1]),
        LAUNCHED_BY: "isotype",
        LIFELINE: str(lifeline_read_end),
        LISTENING_SOCKET: str(listening_socket.fileno() if rank == 0 else -1),
    }
    # without a limit each process would use every core
    environ.setdefault("OMP_NUM_THREADS", str(max(1, count_cores() // size)))
    inherited = (
        (lifeline_read_end, listening_socket.fileno()) if rank == 0 else (lifeline_read_end,)
    )
    if rank == 0:
        streams: dict[str, Any] = {}
    else:
        streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
    # in a separate session, the process receives Ctrl-C only once, from this launcher
    process: subprocess.Popen[bytes] = subprocess.Popen(
        list(command), env=environ, pass_fds=inherited, start_new_session=True, **streams
    )
    return process


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Waits until all processes have ended, and returns the rank of the first process that failed.
    After a failure, the other processes have SHUTDOWN_SECONDS to end by themselves; then they are
    killed.
    """
    failed_rank = None
    deadline = 0.0
    while any(process.poll() is None for process in processes):
        if failed_rank is None:
            failed_rank = next(
                (rank for rank, process in enumerate(processes) if process.poll() not in (None, 0)),
                None,
            )
            deadline = time.monotonic() + SHUTDOWN_SECONDS
        elif time.monotonic() > deadline:
            for process in processes:
                if process.poll() is None:
                    process.kill()  # a stopped process does not receive SIGTERM
        time.sleep(0.05)
    if failed_rank is not None:
        return failed_rank
    return next((rank for rank, process in enumerate(processes) if process.returncode), None)


def _report_failure(
    processes: Sequence[subprocess.Popen[bytes]],
    outputs: Sequence[IO[bytes]],
    failed_rank: int | None,
) -> None:
    """Prints an error that the first process could not report. Either the first process itself was
    killed, or another process failed after the first process had ended.
    """
    if failed_rank is None or processes[0].returncode > 0:
        return
    signal_number = -processes[failed_rank].returncode
    if signal_number > 0:
        ending = f"was killed by {signal.Signals(signal_number).name}"
    else:
        ending = f"ended with status {processes[failed_rank].returncode}"
    print(
        f"isotype: rank {failed_rank} on {socket.gethostname()} {ending}; the last good checkpoint is in"
        " the run's folder",
        file=sys.stderr,
    )
    outputs[failed_rank].seek(0)
    for line in outputs[failed_rank].read().decode(errors="replace").splitlines()[-_PRINTED_LINES:]:
        print(f"  {line}", file=sys.stderr)
    if signal_number == signal.SIGBUS:
        print(
            "  cause     a file that the run reads was truncated; isotype ls names it",
            file=sys.stderr,
        )
    print("  fix       isotype train --resume FOLDER continues from there", file=sys.stderr)


@contextmanager
def _forward_signals(processes: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Returns a context manager that forwards SIGINT, SIGTERM, SIGHUP and SIGUSR1 to every process.
    Each signal that arrives is forwarded once.
    """

    def forward(number: int, frame: object) -> None:
        for process in processes:
            with suppress(ProcessLookupError):
                process.send_signal(number)

    previous_handlers: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            # under nohup SIGHUP is ignored, and stays ignored
            if number != signal.SIGHUP or signal.getsignal(number) is signal.SIG_DFL:
                previous_handlers[number] = signal.signal(number, forward)
    try:
        yield
    finally:
        for number_, handler in previous_handlers.items():
            signal.signal(number_, handler)
