"""Builds the C++ libraries of the ops, once per machine. They are stored in the user's folder for
compiled kernels and shared by processes. This module does not import torch, so that compilers can start
before torch is imported.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import platform
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from ..environment.hardware import count_cores
from ..environment.private_folder import NotPrivateError, open_private_folder, read_private_file
from .kernel_folder import BuildError, library_folder

HEADERS = Path(__file__).parent
# the ops that `optimize` gives every model, those first whose build takes longest
COMMON_OPS = ("cross_entropy", "gated", "attention", "rms_norm", "rope")
# -O3 takes a quarter more time to compile, and its libraries are as fast as those of -O2, except for
# attention (2 to 4%), which asks for -O3 in its source
FLAGS = ("-std=c++17", "-O2", "-march=native", "-fopenmp", "-fPIC", "-shared", "-Wno-psabi")
# seconds; a build that takes longer prints a message
BUILD_MESSAGE_DELAY_S = 5.0


@cache
def cpu_compiler() -> str | None:
    """Returns the path of the C++ compiler (CXX, or g++, clang++ or c++), or None."""
    return shutil.which(os.environ.get("CXX", "")) or next(
        filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None
    )


@cache
def machine_signature(compiler: str) -> str:
    """Returns a text that identifies the compiler and the processor. Two machines with different
    texts may need different builds of the same source.
    """
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, check=False
    ).stdout
    try:
        features = next(
            line
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith(("flags", "Features"))
        )
    except (OSError, StopIteration):
        features = platform.processor()
    return "\n".join((version, platform.machine(), platform.system(), features))


# source -> the build that a thread does or will do
_early_builds: dict[Path, Future[None]] = {}
# running compilers and the incomplete files that they write
_running_builds: dict[subprocess.Popen[str], Path] = {}


def op_source(op: str) -> Path:
    """Returns the path of an op's C++ source."""
    return HEADERS / op / "cpu.cpp"


def start_builds(sources: Iterable[Path]) -> None:
    """Builds the libraries that are not stored yet, while this process imports packages and reads
    data. As many compilers run at a time as this process has processors.

    `load_or_build_library` waits for a library that is being built, and raises the error of a build
    that failed. If no thread has begun to build the library, `load_or_build_library` builds it.

    The threads do not load the libraries, because torch must be loaded first: each library uses the
    OpenMP runtime that is already in the process. A build takes 0.7 to 4 s of CPU time. All
    libraries of a language model together take 10 s.
    """
    new_sources = [source for source in sources if source not in _early_builds]
    waiting: queue.SimpleQueue[Path] = queue.SimpleQueue()
    for source in new_sources:
        _early_builds[source] = Future()
        waiting.put(source)

    def build_waiting() -> None:
        while True:
            try:
                source = waiting.get_nowait()
            except queue.Empty:
                return
            future = _early_builds[source]
            if not future.set_running_or_notify_cancel():
                continue
            try:
                _build_if_missing(source)
                future.set_result(None)
            except Exception as error:
                future.set_exception(error)

    for _ in range(min(len(new_sources), count_cores())):
        # not joined when the process ends, since a compiler may take seconds
        threading.Thread(target=build_waiting, name="isotype-builds", daemon=True).start()


@atexit.register
def _stop_builds() -> None:
    """Ends the compiler processes that still run, and removes their incomplete files."""
    for process, file in list(_running_builds.items()):
        with suppress(OSError):
            process.kill()
            process.wait()
        file.unlink(missing_ok=True)


def load_or_build_library(source: Path) -> ctypes.CDLL:
    """Loads the library of `source`. If there is no stored build for the same source text, headers,
    compiler and processor, the library is built first.

    Raises  BuildError
    """
    early_build = _early_builds.get(source)
    if early_build is not None and not early_build.cancel():
        early_build.result()
    _build_if_missing(source)
    folder = library_folder()
    try:
        handle = load_library(folder, library_stem(source, cpu_compiler() or ""))
    except NotPrivateError as error:
        raise BuildError(str(error)) from error
    if handle is None:
        raise BuildError(f"{folder}: the library that was built is gone, or was changed")
    return handle


def library_stem(source: Path, compiler: str) -> str:
    """Returns the name of a library. The name contains a hash of the source, the headers, the
    compiler and the processor.
    """
    text = source.read_bytes() + b"".join(
        header.read_bytes() for header in sorted(HEADERS.glob("*.h"))
    )
    key = hashlib.sha256(
        text + "\n".join((*FLAGS, machine_signature(compiler))).encode()
    ).hexdigest()[:16]
    return f"{source.parent.name}-{key}"


def _build_if_missing(source: Path) -> None:
    compiler = cpu_compiler()
    if compiler is None:
        raise BuildError("no C++ compiler (g++ or clang++) was found")
    folder = library_folder()
    stem = library_stem(source, compiler)
    try:
        if _is_stored(folder, stem):
            return
        with hold_file_lock(folder / f"{stem}.lock"):
            if not _is_stored(folder, stem):
                build(compiler, source, folder, stem)
    except NotPrivateError as error:
        raise BuildError(str(error)) from error


def _is_stored(folder: Path, stem: str) -> bool:
    with open_private_folder(folder) as opened_folder:
        return _find_whole_file(opened_folder, stem) is not None


def load_library(folder: Path, stem: str) -> ctypes.CDLL | None:
    """Loads the stored library of this name, or returns None if there is none. A file that the
    system cannot load is not removed.

    Raises  BuildError, NotPrivateError
    """
    with open_private_folder(folder) as opened_folder:
        file = _find_whole_file(opened_folder, stem)
        if file is None:
            return None
        try:
            return ctypes.CDLL(str(file))
        except OSError as error:
            raise BuildError(f"{folder / file.name} does not load: {error}") from error


def _find_whole_file(opened_folder: Path, stem: str) -> Path | None:
    """Returns the file of the stored library of this name, or None if there is none.

    The file's name ends with a checksum of its content. A file whose content does not match the
    checksum is removed. Such a file may be incomplete, because the machine stopped while it was
    written. A file to which other users can write is removed too.
    """
    for file in sorted(opened_folder.glob(f"{stem}-*.so")):
        try:
            is_whole = checksum(read_private_file(file)) == file.stem.rpartition("-")[2]
        except FileNotFoundError:
            continue
        except NotPrivateError:
            is_whole = False
        if is_whole:
            return file
        file.unlink(missing_ok=True)
    return None


def checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


@contextmanager
def hold_file_lock(path: Path) -> Iterator[None]:
    """Holds a file lock within the block, so that one process builds while other processes of the
    machine (ranks of a run, test workers) wait.

    Without `flock` (on Windows) every process builds the library itself. Each process writes to a
    temporary file and then renames it. If several processes build the same library, the file that
    is renamed last replaces the others, and no file is incomplete.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@cache
def announce_build(folder: Path) -> None:
    print(
        f"isotype: compiling C++ kernels for this processor, once; they are kept in {folder}",
        file=sys.stderr,
        flush=True,
    )


def build(compiler: str, source: Path, folder: Path, stem: str) -> None:
    """Compiles the source into the folder, as `STEM-CHECKSUM.so`. Raises BuildError."""
    # written to a temporary file and renamed, so that no process loads an incomplete file
    temporary_path = folder / f"{stem}.{os.getpid()}.tmp"
    command = [compiler, *FLAGS, f"-I{HEADERS}", str(source), "-o", str(temporary_path)]
    start = time.monotonic()
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    _running_builds[process] = temporary_path
    try:
        _, errors = process.communicate(timeout=BUILD_MESSAGE_DELAY_S)
    except subprocess.TimeoutExpired:
        announce_build(folder)
        _, errors = process.communicate()
    finally:
        del _running_builds[process]
    if process.returncode:
        temporary_path.unlink(missing_ok=True)
        lines = (
            [line for line in errors.splitlines() if "error" in line]
            or errors.splitlines()
            or [f"exit code {process.returncode}"]
        )
        raise BuildError(
            f"{Path(compiler).name} failed after {time.monotonic() - start:.0f} s: {lines[0][:160]}"
        )
    temporary_path.chmod(0o700)
    temporary_path.replace(folder / f"{stem}-{checksum(temporary_path.read_bytes())}.so")
