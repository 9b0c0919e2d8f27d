"""Exchanges data between the processes of a run. A `World` object also contains the number of
processes and the rank of this process.

Only this file and `shard.py` use torch.distributed. `shard.py` needs it because a sharded model
gathers its own weights. `World()` represents a single process. Its methods exchange nothing and
return their arguments.

A process that waits finds out why another process does not answer. If one process has an error, all
processes raise it. If a process has died or is late, the error contains its rank, machine and step.
While a process waits for a value in the store, it checks whether another process has failed.
Gradients, sums and gathered values are exchanged by a process group of torch. The errors of this
process group do not say which process failed, so they are replaced by errors that do.

The store holds only results of the first process, heartbeats, errors, and keys that show which
process may continue next. A single thread in one process serves the store. So a method of `World`
must not cause work in the store that grows with the number of pairs of processes
(`benchmarks/world.py`).
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import IsotypeError, RunError, UsageError
from ..wording import first_line
from .bounded_store import BoundedStore, StoreTimeoutError
from .heartbeat import (
    ENDED_KEY,
    FAILED_KEY,
    HEARTBEAT_TIMEOUT,
    HeartbeatThread,
    LostProcess,
    error_from_json,
    error_to_json,
    find_lost_processes,
    read_failure,
    read_lost_message,
)
from .launch import LISTENING_SOCKET, watch_lifeline
from .rank import Rank, find_rank

Result = TypeVar("Result")
AnyError = TypeVar("AnyError", bound=IsotypeError)
CHECK_INTERVAL = 0.5  # seconds between two checks for failures while waiting
MAX_PAUSE = 0.05  # longest pause in seconds between two reads of the awaited key
# the pause per process where it is longer: together the processes read 500 times a second
PAUSE_PER_PROCESS = 0.002
# seconds without a heartbeat after which `find_lost_processes` is asked about a process
SUSPECT_AFTER = 2.0
# numbers the runs of these processes, so that each run has its own keys in the store
_RUNS = itertools.count()
# seconds that the first process waits after an error until the others have read it, because the
# store ends with this process
LEAVE_TIMEOUT = 10.0


class World:
    """Represents a run of a single process, which exchanges no data. `JoinedWorld` has the same
    methods for several processes.
    """

    rank = local_rank = 0
    size = local_size = nodes = 1
    launcher = backend = ""
    prints_errors = True  # whether this process prints the error of a failed run

    @property
    def is_first(self) -> bool:
        """True if this process writes the run folder, the console output and the report."""
        return self.rank == 0

    def record_progress(self, step: int, activity: str) -> None:
        """Records the step and the activity of this process for the error messages of the others."""

    def sum(self, values: Sequence[float]) -> list[float]:
        """Returns the sum of each value over all processes, computed in fp64."""
        return list(values)

    def any(self, flag: bool) -> bool:
        """Returns True if `flag` is true in at least one process."""
        return flag

    def begin_sum(self, tensor: Tensor) -> Callable[[], None]:
        """Begins to sum a tensor over all processes, in place and in its dtype. Returns a function
        that waits for the sum.
        """
        return lambda: None

    def collect(self, part: Tensor, full_tensor: Tensor | None, row_counts: Sequence[int]) -> None:
        """Fills `full_tensor` with the rows of all processes, in the order of their ranks. Only the
        first process passes `full_tensor`; the other processes pass None. All tensors are on the
        CPU.

        row_counts  the number of rows of each rank
        """
        if full_tensor is not None:
            full_tensor.copy_(part)

    def explain_exchange_errors(self) -> AbstractContextManager[None]:
        """Returns a context manager for code in which processes exchange data without calling this
        class, such as the forward of a sharded model. If the exchange fails, the error is replaced
        by an error that names the failed process.
        """
        return nullcontext()

    def gather(self, value: Any) -> list[Any]:
        """Returns the values of all processes, in the order of their ranks. It must be possible to
        write a value as JSON.
        """
        return [value]

    def run_on_first(self, work: Callable[[], Result], *, without_timeout: bool = False) -> Result:
        """Runs `work` in the first process and returns its result in all processes. It must be
        possible to write the result as JSON.

        without_timeout  if true, the other processes wait for the first process without a time
                         limit
        """
        return work()

    def run_on_first_then_others(self, work: Callable[[], Result]) -> Result:
        """Runs `work` in every process. The first process runs it before the other processes do, so
        that they find the files that it wrote.
        """
        return work()

    def run_sequentially(self, work: Callable[[], Result]) -> Result:
        """Runs `work` in every process. On each machine, the processes run it one after the other,
        so that the temporary memory of `work` is needed only once per machine.
        """
        return work()

    def report_failure(self, error: BaseException) -> None:
        """Reports to the other processes why this process ends."""

    def close(self) -> None:
        """Closes the connections of this process to the other processes at the end of the run."""


ALONE = World()


class JoinedWorld(World):
    """Represents a run of several processes, which share a store and a process group.

    Raises  RunError MP001 if another process died, RunError MP002 if another process did not answer
            in time, or the error that another process raised
    """

    def __init__(
        self, position: Rank, store: BoundedStore, *, timeout: float, backend: str
    ) -> None:
        self.rank = position.rank
        self.size = position.size
        self.local_rank = position.local_rank
        self.local_size = position.local_size
        self.nodes = max(1, position.size // max(1, position.local_size))
        self.launcher = position.launcher
        self.backend = backend
        self._store = store
        self._timeout = timeout
        self._exchange_count = 0
        self._published_keys: list[str] = []  # since the last exchange that all processes entered
        self._max_pause = max(MAX_PAUSE, PAUSE_PER_PROCESS * position.size)
        self.prints_errors = position.rank == 0
        self._stored_error: IsotypeError | None = None
        self._has_reported_failure = False
        self._lost_ranks: set[int] = set()
        self._host_of_first = store.get("here/0").decode()
        self._heartbeats = HeartbeatThread(store.clone(), position.rank)
        self._heartbeats.write()
        self._heartbeats.start()
        # the group for tensors on the CPU: the sums of a step are exchanged without the GPU
        on_cpu = "gloo" in str(dist.get_backend_config())
        if on_cpu:
            self._cpu_group = None
        else:
            self._cpu_group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))

    def record_progress(self, step: int, activity: str) -> None:
        self._heartbeats.heartbeat.step = step
        self._heartbeats.heartbeat.activity = activity

    def sum(self, values: Sequence[float]) -> list[float]:
        # the observer must not count this fp64 sum as arithmetic of the model
        with self._collective(), _disable_current_modes():
            summed = torch.tensor(values, dtype=torch.float64)
            dist.all_reduce(summed, group=self._cpu_group)
        self._delete_published_keys()
        return summed.tolist()

    def any(self, flag: bool) -> bool:
        return self.sum([float(flag)])[0] > 0

    def begin_sum(self, tensor: Tensor) -> Callable[[], None]:
        with self._collective(), _disable_current_modes():
            work = dist.all_reduce(tensor, async_op=True)

        def wait() -> None:
            with self._collective(), _disable_current_modes():
                work.wait()

        return wait

    def collect(self, part: Tensor, full_tensor: Tensor | None, row_counts: Sequence[int]) -> None:
        # sent as bytes, because gloo does not support every dtype
        if full_tensor is None:
            if len(part):
                with self._collective():
                    dist.send(
                        part.contiguous().view(-1).view(torch.uint8), 0, group=self._cpu_group
                    )
            return
        begin = 0
        for rank, count in enumerate(row_counts):
            rows_of_rank = full_tensor[begin : begin + count]
            begin += count
            if rank == 0:
                rows_of_rank.copy_(part)
            elif count:
                with self._collective():
                    dist.recv(rows_of_rank.view(-1).view(torch.uint8), rank, group=self._cpu_group)

    def explain_exchange_errors(self) -> AbstractContextManager[None]:
        return self._collective(has_other_work=True)

    def gather(self, value: Any) -> list[Any]:
        text = json.dumps(value).encode()
        with self._collective(), _disable_current_modes():
            texts = self._gather_bytes(text)
        self._delete_published_keys()
        return [json.loads(text) for text in texts]

    def _gather_bytes(self, text: bytes) -> list[bytes]:
        """Returns the texts of all processes in the order of their ranks. Before the exchange, all
        texts are padded with spaces to the same length. The first process collects the texts and
        sends them to all processes.
        """
        longest = torch.tensor([len(text)])
        dist.all_reduce(longest, dist.ReduceOp.MAX, group=self._cpu_group)
        length = int(longest)
        texts = torch.empty(self.size, length, dtype=torch.uint8)
        row = torch.frombuffer(bytearray(text.ljust(length)), dtype=torch.uint8)
        rows = list(texts.unbind()) if self.is_first else None
        dist.gather(row, rows, group=self._cpu_group)
        dist.broadcast(texts, src=0, group=self._cpu_group)
        return [row.numpy().tobytes() for row in texts]

    def run_on_first(self, work: Callable[[], Result], *, without_timeout: bool = False) -> Result:
        key = self._begin_exchange()
        if not self.is_first:
            received: Result = json.loads(
                self._wait_for_key(key, owner_rank=0, without_timeout=without_timeout)
            )
            return received
        result = work()
        self._publish(key, json.dumps(result, default=str))
        return result

    def run_on_first_then_others(self, work: Callable[[], Result]) -> Result:
        results: list[Result] = []
        self.run_on_first(lambda: results.append(work()), without_timeout=True)
        return results[0] if self.is_first else work()

    def run_sequentially(self, work: Callable[[], Result]) -> Result:
        key = self._begin_exchange()
        if self.local_rank:  # launchers give the processes of a machine consecutive ranks
            self._wait_for_key(
                f"{key}/{self.rank - 1}", owner_rank=self.rank - 1, without_timeout=True
            )
        result = work()
        self._publish(f"{key}/{self.rank}", "")
        return result

    def report_failure(self, error: BaseException) -> None:
        if self._has_reported_failure or error is self._stored_error:
            return  # another process failed and has reported it
        self._has_reported_failure = True
        with suppress(Exception):  # the store may be gone, and the original error matters more
            self._store.set(f"{FAILED_KEY}/{self.rank}", json.dumps(error_to_json(error)))
            self._store.set(FAILED_KEY, "")

    def close(self) -> None:
        """Waits until all processes have reached the end of the run, and then closes the
        connection. If it were closed earlier, an exchange of another process could fail.
        """
        # another process may be gone; if it is the first, the store is gone too
        with suppress(Exception):
            self._store.set(f"left/{self.rank}", "")
            if self._stored_error is None and not self._has_reported_failure:
                dist.all_reduce(torch.zeros(1), group=self._cpu_group)
            elif self.is_first:
                self._destroy_group()  # ends the exchanges in which the others wait
                # the store may end with this process, so the others must read the error first
                remaining_ranks = set(range(self.size)) - self._lost_ranks
                deadline = time.monotonic() + LEAVE_TIMEOUT
                while time.monotonic() < deadline and not self._store.check(
                    [f"left/{rank}" for rank in remaining_ranks]
                ):
                    time.sleep(0.05)
        self._heartbeats.stop()
        self._destroy_group()

    def _destroy_group(self) -> None:
        if dist.is_initialized():
            with suppress(Exception):
                dist.destroy_process_group()

    def _publish(self, key: str, value: str) -> None:
        try:
            self._store.set(key, value)
        except StoreTimeoutError as error:
            raise self._explain_failure(error) from error
        self._published_keys.append(key)

    def _delete_published_keys(self) -> None:
        """Deletes the keys that this process has published. If they were not deleted, the store
        would grow during the whole run. When all processes have begun a later exchange, all have
        read these keys.
        """
        published_keys = self._published_keys
        self._published_keys = []
        for key in published_keys:
            try:
                self._store.delete(key)
            except RuntimeError as error:
                raise self._explain_failure(error) from error

    def _begin_exchange(self) -> str:
        self._exchange_count += 1
        self._heartbeats.heartbeat.exchanges += 1
        return f"turn/{self._exchange_count}"

    @contextmanager
    def _collective(self, *, has_other_work: bool = False) -> Iterator[None]:
        """Returns a context manager for a collective operation. If the operation fails, the error
        is replaced by an error that names the failed process.

        has_other_work  whether the block also does work that exchanges no data. Errors of this work
                        are raised unchanged
        """
        self._heartbeats.heartbeat.exchanges += 1
        try:
            yield
        except RuntimeError as error:
            # gloo's errors have no class of their own, and begin with the file of its source
            if (
                has_other_work
                and not isinstance(error, dist.DistError)
                and "/gloo/" not in str(error)
            ):
                raise
            raise self._explain_failure(error) from error

    def _wait_for_key(self, key: str, *, owner_rank: int, without_timeout: bool = False) -> bytes:
        """Waits until the process `owner_rank` has set a key in the store, and returns its value.
        This method asks the store again and again and does not use torch's own method `wait`, which
        logs a warning when it times out.
        """
        start_time = last_check = last_heartbeat_time = time.monotonic()
        last_heartbeat = b""
        pause = 0.001
        while True:
            try:
                if self._store.check([key]):
                    value: bytes = self._store.get(key)
                    return value
                time.sleep(pause)
                pause = min(self._max_pause, pause * 1.5)
                current_time = time.monotonic()
                if current_time - last_check < CHECK_INTERVAL:
                    continue
                last_check = current_time
                failed = read_failure(self._store, range(self.size)) is not None
                if self._store.check([f"sign/{owner_rank}"]):
                    newest_heartbeat = self._store.get(f"sign/{owner_rank}")
                else:
                    newest_heartbeat = b""
                if newest_heartbeat != last_heartbeat:
                    last_heartbeat = newest_heartbeat
                    last_heartbeat_time = current_time
                # a process with heartbeats may work for hours; one without is looked up by
                # `find_lost_processes`
                is_dead = current_time - last_heartbeat_time > SUSPECT_AFTER and any(
                    lost_process.is_dead and lost_process.heartbeat.rank == owner_rank
                    for lost_process in find_lost_processes(
                        self._store, self._heartbeats.heartbeat, self.size
                    )
                )
            except RuntimeError as error:
                raise self._explain_failure(error) from error
            if (
                failed
                or is_dead
                or (not without_timeout and current_time - start_time > self._timeout)
            ):
                raise self._explain_failure(
                    TimeoutError(f"waited {current_time - start_time:.0f} s")
                )

    def _explain_failure(self, error: BaseException) -> BaseException:
        """Takes an error that does not say which process failed, and returns an error that names
        this process.
        """
        self._heartbeats.heartbeat.activity = "ending"
        # after a failure a store that does not answer belongs to it, so it is given less time
        self._store.timeout = min(self._timeout, HEARTBEAT_TIMEOUT)
        self._heartbeats.store.timeout = self._store.timeout
        try:
            self._store.set(f"{ENDED_KEY}/{self.rank}", "")
            self._heartbeats.write()
            lost: list[LostProcess] = []
            failure = read_failure(self._store, range(self.size))
            if failure is None:
                lost = find_lost_processes(self._store, self._heartbeats.heartbeat, self.size)
                failure = read_failure(self._store, range(self.size))  # reported meanwhile
        except Exception as store_error:
            # isotype's launcher shows the output of the process that ends first
            self.prints_errors = self.rank == 1 or self.launcher == "isotype"
            return self._remember(self._store_error(store_error))
        if failure is not None:
            rank, report = failure
            reported_error = error_from_json(
                report,
                process_name=None
                if rank == 0 or report["kind"] == "PreflightError"
                else f"rank {rank}",
            )
            if isinstance(reported_error, IsotypeError):
                self._remember(reported_error)
            return reported_error
        self._lost_ranks = {process.heartbeat.rank for process in lost}
        dead_ranks = {process.heartbeat.rank for process in lost if process.is_dead}
        self.prints_errors = self.rank == min(
            rank for rank in range(self.size) if rank not in dead_ranks
        )
        # processes are never more than one exchange apart, and the last heartbeat of a dead process
        # may be older
        step = self._heartbeats.heartbeat.step
        position = "" if dead_ranks else " (it is at step {0.step}: {0.doing})"
        message = f"step {step}: " + "; ".join(
            f"{process.heartbeat} {process.symptom}{position.format(process.heartbeat)}"
            for process in lost
        )
        if not lost:
            # another process has already found the lost process, and has ended itself
            reported = read_lost_message(self._store, range(self.size))
            message = reported or f"the connection between processes broke: {first_line(error)}"
        elif not dead_ranks:
            message += f"; waited {self._timeout:g} s (parallel.timeout)"
        with suppress(Exception):
            self._store.set(f"{ENDED_KEY}/{self.rank}", message)
        return self._remember(
            RunError(message, code="MP002" if lost and not dead_ranks else "MP001", fix=_RESUME_FIX)
        )

    def _store_error(self, error: Exception) -> RunError:
        """Returns the error to raise if the store no longer exists or does not answer."""
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            location = "torchrun's agent, where all processes meet,"
        else:
            location = f"rank 0 on {self._host_of_first}, where all processes meet,"
        step = self._heartbeats.heartbeat.step
        if isinstance(error, StoreTimeoutError):
            message = f"step {step}: {location} does not answer; waited {self._timeout:g} s"
            return RunError(f"{message} (parallel.timeout)", code="MP002", fix=_RESUME_FIX)
        return RunError(f"step {step}: {location} is gone", code="MP001", fix=_RESUME_FIX)

    def _remember(self, error: AnyError) -> AnyError:
        self._stored_error = error
        return error


_RESUME_FIX = (
    "see what ended it, then isotype train --resume FOLDER continues, on any number of processes that"
    " share a step's rows"
)


def join(device: str, *, timeout: float) -> World:
    """Connects the processes that a launcher started. If there is no launcher, returns a `World`
    with a single process.

    device   `cpu`, `cuda` or `auto`, as in the setting model.device
    timeout  how many seconds to wait for another process
    Raises   UsageError if the environment variables contradict each other, or if there are fewer
             GPUs than processes
    """
    watch_lifeline()
    rank = find_rank()
    if rank.size == 1:
        return ALONE
    if not dist.is_available():
        raise UsageError(
            f"{rank.size} processes were started, and this torch has no torch.distributed",
            fix="install another build",
        )
    on_gpu = _select_gpu(device, rank)
    wait_time = timedelta(seconds=timeout)
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    run_number = next(_RUNS)
    bounded_store = None
    try:
        shared_store = _create_store(rank, wait_time)
        store = dist.PrefixStore(f"group {run_number}", shared_store)
        bounded_store = BoundedStore(
            dist.PrefixStore(f"isotype {run_number}", shared_store), timeout
        )
        bounded_store.set(f"here/{rank.rank}", socket.gethostname())
        dist.init_process_group(
            backend, store=store, rank=rank.rank, world_size=rank.size, timeout=wait_time
        )
    except RuntimeError as error:
        raise _join_error(rank, bounded_store, timeout, error) from error
    return JoinedWorld(rank, bounded_store, timeout=timeout, backend=backend)


_SLOW_FIX = (
    "see why they did not start or reach one another; a higher parallel.timeout if they are only"
    " slow"
)


def _join_error(position: Rank, store: Any, timeout: float, error: Exception) -> RunError:
    """Returns the error to raise if the processes could not connect. If it is known which processes
    are missing, the error names them.

    store  the store; None if it could not be created
    """
    deadline_text = f"within {timeout:g} s (parallel.timeout)"
    # the store is created only when all processes have connected
    if store is None and position.rank == 0:
        return RunError(
            f"not all of {position.size} processes came {deadline_text}",
            code="MP002",
            fix=_SLOW_FIX,
        )
    try:
        missing = ", ".join(
            f"rank {rank}" for rank in range(position.size) if not store.check([f"here/{rank}"])
        )
    except Exception:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        return RunError(
            f"rank 0, where all processes meet, does not answer at {address}",
            code="MP002",
            fix=_SLOW_FIX,
        )
    if missing:
        message = f"{missing} did not come {deadline_text}"
    else:
        message = f"the {position.size} processes could not connect: {first_line(error)}"
    return RunError(message, code="MP002", fix=_SLOW_FIX)


def _create_store(position: Rank, wait_time: timedelta) -> Any:
    """Creates the key-value store that the processes share. `isotype train --processes` opens the
    listening socket and passes it to the first process, so that no other program can take the port.
    """
    handle = os.environ.get(LISTENING_SOCKET)
    if handle is None:
        return next(
            iter(dist.rendezvous("env://", position.rank, position.size, timeout=wait_time))
        )[0]
    address = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    listening: dict[str, Any] = {"master_listen_fd": int(handle)} if position.rank == 0 else {}
    return dist.TCPStore(
        address,
        port,
        position.size,
        is_master=position.rank == 0,
        timeout=wait_time,
        wait_for_workers=False,
        **listening,
    )


def _select_gpu(device: str, position: Rank) -> bool:
    """Selects the GPU whose number is the local rank of this process. Returns whether the run uses
    GPUs.
    """
    if device == "cpu" or not torch.cuda.is_available():
        return False
    if position.local_size > torch.cuda.device_count():
        raise UsageError(
            f"{position.local_size} processes on a machine with {torch.cuda.device_count()} GPUs",
            fix=f"start {torch.cuda.device_count()}, or model.device: cpu",
        )
    torch.cuda.set_device(position.local_rank)
    return True
