"""What several processes cost before any model: real processes of the World, without a model.

    python benchmarks/world.py [--processes 64] [--value-bytes 30000] [--json]

The processes are forks of this one, so that 64 of them run on a small machine. Printed are the time
of the start, of a gather and of a value from the first process to all; the processor time of the
first process, which holds the store; and the bytes that the first process and all together have
sent and received (from the kernel's counts of each TCP connection).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import struct
import sys
import time
from contextlib import suppress
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch.distributed as dist

from isotype.distributed.launch import LISTENING_SOCKET
from isotype.distributed.rank import LAUNCHED_BY
from isotype.distributed.world import World, join

TCP_INFO_SIZE = 256
# offsets of tcpi_bytes_acked and tcpi_bytes_received in the kernel's tcp_info
ACKED_OFFSET, RECEIVED_OFFSET = 120, 128
ROUNDS = 5


def count_bytes() -> int:
    """The bytes that this process has sent and received over its open TCP connections."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            connection = socket.socket(fileno=os.dup(int(name)))
            with connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_SIZE)
            if len(info) >= RECEIVED_OFFSET + 8:
                total += sum(struct.unpack_from("QQ", info, ACKED_OFFSET))
    return total


def count_keys() -> int:
    """The number of keys in the store of the processes."""
    return int(dist.distributed_c10d._get_default_store().num_keys())


class Meter:
    """Wall time, processor time and bytes of this process since the last call of `read`."""

    def __init__(self) -> None:
        self._previous = self._now()

    def _now(self) -> tuple[float, float, int]:
        return time.monotonic(), time.process_time(), count_bytes()

    def read(self) -> dict[str, float]:
        now = self._now()
        seconds, cpu, count = (new - old for new, old in zip(now, self._previous))
        self._previous = now
        return {"seconds": seconds, "cpu": cpu, "bytes": count}


def measure(world: World, value: str, begin: dict[str, float]) -> dict[str, Any]:
    """The figures of this process. Every process calls this."""
    readings: dict[str, Any] = {"start": begin}
    world.sum([0.0])
    meter = Meter()
    meter.read()
    phases = {
        "sum": lambda: world.sum([1.0]),
        "gather": lambda: world.gather({"rank": world.rank, "value": value}),
        "first to all": lambda: world.run_on_first(lambda: "x" * 100),
    }
    for name, phase in phases.items():
        keys_before = count_keys()
        for _ in range(ROUNDS):
            phase()
        world.sum([0.0])
        readings[name] = {key: figure / ROUNDS for key, figure in meter.read().items()}
        readings[name]["keys"] = count_keys() - keys_before
    wait = 3.0
    meter.read()
    world.run_on_first(lambda: time.sleep(wait))
    world.sum([0.0])
    readings["a wait of 3 s"] = meter.read()
    return readings


def run_process(rank: int, size: int, listening: socket.socket, value_bytes: int) -> None:
    os.environ.update(
        {
            "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listening.getsockname()[1]), LAUNCHED_BY: "isotype",
            LISTENING_SOCKET: str(listening.fileno() if rank == 0 else -1),
        }
    )  # fmt: skip
    meter = Meter()
    world = join("cpu", timeout=120.0)
    world.run_on_first(lambda: None)
    readings = measure(world, "v" * value_bytes, meter.read())
    all_readings = world.gather(readings)
    if world.is_first:
        report = {
            phase: {
                **{key: round(figure, 4) for key, figure in readings[phase].items()},
                "cpu of all": round(sum(r[phase]["cpu"] for r in all_readings), 3),
                "bytes of all": round(sum(r[phase]["bytes"] for r in all_readings) / 2),
            }
            for phase in readings
        }
        report["memory"] = {"peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10}
        print(json.dumps({"processes": size, "value_bytes": value_bytes, "first process": report}))
        sys.stdout.flush()
    world.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=64)
    parser.add_argument("--value-bytes", type=int, default=30_000)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    size = arguments.processes
    listening = socket.create_server(("127.0.0.1", 0), backlog=4 * size)
    children: list[int] = []
    read_end, write_end = os.pipe()
    for rank in range(size):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.dup2(write_end, 1)
                run_process(rank, size, listening, arguments.value_bytes)
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    listening.close()
    os.close(write_end)
    with os.fdopen(read_end) as lines:
        text = lines.read()
    statuses = [os.waitpid(child, 0)[1] for child in children]
    if any(statuses):
        print(f"{sum(map(bool, statuses))} of {size} processes failed", file=sys.stderr)
        return 1
    if arguments.json:
        print(text)
        return 0
    report = json.loads(text)["first process"]
    print(f"{size} processes, values of {arguments.value_bytes:,} bytes")
    print(f"{'':16}{'seconds':>10}{'cpu first':>11}{'cpu all':>10}{'MB first':>10}{'MB all':>10}")
    for phase, figures in report.items():
        if phase == "memory":
            continue
        print(
            f"{phase:16}{figures['seconds']:10.3f}{figures['cpu']:11.3f}{figures['cpu of all']:10.2f}"
            f"{figures['bytes'] / 1e6:10.2f}{figures['bytes of all'] / 1e6:10.1f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
