"""Hostile inputs by the thousand, in a process that is watched: no crash, no hang, no write
outside, no code, no network.

Input `i` of a target is a function of seed, target and `i`, so that each can be given again.
"""

import json
import mmap
import os
import random
import resource
import shutil
import signal
import struct
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from isotype.errors import IsotypeError

from .child import WRITES, fork
from .hostile import TARGETS, Material, Target
from .trial import Trial
from .workshop import Workshop

# seconds of computing after which an input is interrupted, and of waiting after which its process
# is killed
SLOW, HUNG = 20, 180
MEMORY = 4 << 30  # bytes an input may take beyond what the process holds
CHUNK = 1000  # inputs in one process
_PATHS = {
    "os.mkdir": 1,
    "os.rename": 2,
    "os.remove": 1,
    "os.rmdir": 1,
    "os.truncate": 1,
    "os.symlink": 2,
    "os.link": 2,
    "os.chmod": 1,
}
_NEVER = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "subprocess.Popen", "pty.spawn", "socket.connect",
          "socket.bind", "pickle.find_class", "shutil.chown")  # fmt: skip


class Slow(BaseException):
    """Not an Exception: nothing under test may catch it."""


def fuzz_trials(workshop: Workshop, *, inputs: int, seed: int) -> Iterator[Trial | int]:
    """How many inputs were done, again and again; a trial for each fault, and one for each target
    that counts its inputs.
    """
    material = Material(workshop)
    material.run  # made by a child, before anything is computed here  # noqa: B018
    for name, (target, share) in TARGETS.items():
        total, done, refused, faults = max(1, round(inputs * share)), 0, 0, []
        while done < total:
            count, told, found = _chunk(
                material, name, target, seed, done, min(CHUNK, total - done)
            )
            faults += found
            refused += told
            done += count
            yield count
        for cause in dict.fromkeys(what for _, what in faults):
            numbers = [number for number, what in faults if what == cause]
            again = f"{cause} ({len(numbers)} inputs, the first {name}:{numbers[0]})"
            yield Trial(part="fuzz", what=f"{name}: a fault", wrong=[again])
        wrong = ["faults"] if faults else []
        yield Trial(
            part="fuzz",
            what=f"{name}, {done:,} inputs",
            wrong=wrong,
            message=f"{refused:,} refused with one message",
        )


def _chunk(
    material: Material, name: str, target: Target, seed: int, first: int, count: int
) -> tuple[int, int, list[tuple[int, str]]]:
    """(inputs done, refused, [(input, fault)]) of a process that ran to its end, died or hung; the
    input it died on is done too.
    """
    shared = mmap.mmap(-1, 16)  # inputs done, inputs refused
    log = material.workshop.log()
    pid = fork(lambda: _inputs(material, name, target, seed, first, count, shared, log))
    at, since, died = 0, time.monotonic(), ""
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        done, _ = struct.unpack("qq", shared[:16])
        if done != at:
            at, since = done, time.monotonic()
        elif time.monotonic() - since > HUNG and not died:
            os.kill(pid, signal.SIGKILL)
            died = f"hung for {HUNG} s"
        time.sleep(0.01)
    done, refused = struct.unpack("qq", shared[:16])
    shutil.rmtree(material.workshop.folder / "fuzz", ignore_errors=True)
    faults = (
        [(f["input"], f["what"]) for f in map(json.loads, log.read_text().splitlines())]
        if log.exists()
        else []
    )
    if ended[1] == 0:
        return done, refused, faults
    return (
        done + 1,
        refused,
        [
            *faults,
            (first + done, died or f"the process died with {os.waitstatus_to_exitcode(ended[1])}"),
        ],
    )


def _inputs(
    material: Material,
    name: str,
    target: Target,
    seed: int,
    first: int,
    count: int,
    shared: mmap.mmap,
    log: Path,
) -> None:
    """In the child: one input after another, each in an empty folder."""
    place = material.workshop.folder / "fuzz"
    folder, violations = place / "input", list[str]()
    place.mkdir(parents=True, exist_ok=True)
    _quiet()
    if name.startswith("data"):
        material.tokenizer  # loaded before the watch begins  # noqa: B018
    watching = [False]
    sys.addaudithook(
        lambda event, arguments: _watch(event, arguments, str(place), watching, violations)
    )
    refused = 0
    for number in range(first, first + count):
        folder.mkdir()
        violations.clear()
        wrong = ""
        watching[0] = True
        signal.setitimer(signal.ITIMER_PROF, SLOW)
        try:
            target(material, folder, random.Random(f"{seed}:{name}:{number}"))
        except IsotypeError as error:
            refused += 1
            if not str(error).strip() or len(str(error)) > 20_000:
                wrong = f"a message of {len(str(error))} characters"
        except Slow:
            wrong = f"took more than {SLOW} s of computing"
        except BaseException as error:
            where = traceback.extract_tb(error.__traceback__)
            ours = next((f for f in reversed(where) if "isotype" in f.filename), where[-1])
            wrong = f"{type(error).__name__}: {str(error)[:200]} at {Path(ours.filename).name}:{ours.lineno}"
        signal.setitimer(signal.ITIMER_PROF, 0)
        watching[0] = False
        wrong = wrong or "; ".join(dict.fromkeys(violations))
        if wrong:
            with log.open("a") as file:
                file.write(json.dumps({"input": number, "what": wrong}) + "\n")
        shutil.rmtree(folder)
        shared[:16] = struct.pack("qq", number - first + 1, refused)


def _quiet() -> None:
    def slow(*_: Any) -> None:
        raise Slow

    signal.signal(signal.SIGPROF, slow)
    warnings.simplefilter("ignore")
    sys.dont_write_bytecode = True
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    held = (
        int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        if Path("/proc/self/statm").exists()
        else 0
    )
    resource.setrlimit(
        resource.RLIMIT_AS, (held + MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1])
    )


def _watch(
    event: str, arguments: tuple[Any, ...], place: str, watching: list[bool], violations: list[str]
) -> None:
    """Notes what no input may cause."""
    if not watching[0]:
        return
    if event in _NEVER:
        violations.append(f"{event} {str(arguments)[:100]}")
        return
    paths: tuple[Any, ...] = ()
    if event == "open":
        path, mode, flags = arguments
        writes = (isinstance(mode, str) and any(c in mode for c in "wax+")) or (
            isinstance(flags, int) and flags & WRITES
        )
        paths = (path,) if writes else ()
    elif event in _PATHS:
        paths = arguments[: _PATHS[event]]
        if event in ("os.symlink", "os.link"):
            paths = arguments[1:2]
        elif (
            event in ("os.remove", "os.rmdir", "os.mkdir")
            and isinstance(arguments[-1], int)
            and arguments[-1] != -1
        ):
            return  # relative to an open folder, as rmtree does: that one was opened by its path
    for path in paths:
        if isinstance(path, bytes):
            path = os.fsdecode(path)
        if isinstance(path, str | Path) and not (real := os.path.realpath(path)).startswith(
            (place, "/dev/null")
        ):
            violations.append(f"{event} of {real}, outside")
