"""Stands for one command of the server in the folder of this file: hands on signals, ends as the
command ends, and the command with it.
"""

import array
import json
import os
import signal
import socket
import sys


def open_files():
    listed = [int(name) for name in os.listdir("/proc/self/fd")]
    # without the one that listed them
    return [number for number in listed if os.path.exists(f"/proc/self/fd/{number}")]


def main():
    files = open_files()
    server = socket.socket(socket.AF_UNIX)
    server.connect(os.path.join(os.path.dirname(os.path.abspath(sys.argv[0])), "socket"))
    ignored = [
        number
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE)
        if signal.getsignal(number) == signal.SIG_IGN
    ]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        if number not in ignored:
            signal.signal(number, lambda number, _: server.sendall(bytes([number])))
    asked = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ), files]).encode(
        "utf-8", "surrogateescape"
    )
    server.sendmsg(
        [len(asked).to_bytes(8, "big")],
        [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))],
    )
    server.sendall(asked)
    for number in files:
        os.close(number)  # a pipe is to end when the command closes it
    try:
        status = int(server.makefile().readline())
    except (OSError, ValueError):
        os._exit(70)  # the server is gone
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


main()
