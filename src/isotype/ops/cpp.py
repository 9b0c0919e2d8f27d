"""Builds and calls an op's C++ kernels on a CPU. They are built once per machine, when they are
first needed. If the build fails, plain PyTorch runs instead, and the manifest (the list of what
`optimize` replaced) says so.

A formula such as a norm consists of several operations. In plain PyTorch, each operation reads and
writes whole fp32 tensors. A fused kernel reads and writes each bf16 tensor only once. The built
libraries are stored on disk and shared by processes.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..environment.private_folder import NotPrivateError, open_private_folder, read_private_file
from . import trust
from .kernel_folder import BuildError, library_folder

HEADERS = Path(__file__).parent
# the ops that `optimize` gives every model, those first whose build takes longest
COMMON_OPS = ("cross_entropy", "gated", "rms_norm", "attention", "rope")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-shared", "-Wno-psabi")
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


# source -> its library, which a thread is building or will build
_early_builds: dict[Path, Future[ctypes.CDLL]] = {}
# running compilers and the incomplete files that they write
_running_builds: dict[subprocess.Popen[str], Path] = {}


def op_source(op: str) -> Path:
    """Returns the path of an op's C++ source."""
    return HEADERS / op / "cpu.cpp"


def start_builds(sources: Iterable[Path]) -> None:
    """Loads or builds these libraries one after the other in a thread, while this process imports
    packages and reads data. `load_or_build_library` waits for a library that is being built. It
    builds a library itself if the thread has not begun it. It raises the error of a build that
    failed.

    A build takes 1 to 6 s of CPU time. All libraries of a language model together take 16 s.
    """
    finished = {
        kernels.source
        for op, kernels in _kernels.copy().items()  # imports in other threads add kernels
        if kernels.library is not None or op in _fallback_reasons
    }
    builds = {
        source: Future[ctypes.CDLL]()
        for source in sources
        if source not in finished | _early_builds.keys()
    }
    _early_builds.update(builds)

    def build_all() -> None:
        for source, future in builds.items():
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(_load_or_build(source))
                except Exception as error:
                    future.set_exception(error)

    # not joined when the process ends, since a compiler may take seconds
    threading.Thread(target=build_all, name="isotype-builds", daemon=True).start()


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
    early_build = _early_builds.pop(source, None)
    if early_build is not None and not early_build.cancel():
        return early_build.result()
    return _load_or_build(source)


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


def _load_or_build(source: Path) -> ctypes.CDLL:
    compiler = cpu_compiler()
    if compiler is None:
        raise BuildError("no C++ compiler (g++ or clang++) was found")
    folder = library_folder()
    stem = library_stem(source, compiler)
    try:
        handle = load_library(folder, stem)
        if handle is None:
            with hold_file_lock(folder / f"{stem}.lock"):
                handle = load_library(folder, stem)
                if handle is None:
                    build(compiler, source, folder, stem)
                    handle = load_library(folder, stem)
    except NotPrivateError as error:
        raise BuildError(str(error)) from error
    if handle is None:
        raise BuildError(f"{folder}: the library that was built is gone, or was changed")
    return handle


def load_library(folder: Path, stem: str) -> ctypes.CDLL | None:
    """Loads the stored library of this name, or returns None if there is none.

    The file's name ends with a checksum of its content. A file whose content does not match the
    checksum is removed. Such a file may be incomplete, because the machine stopped while it was
    written. A file to which other users can write is removed too. A file that the system cannot
    load is not removed.

    Raises  BuildError, NotPrivateError
    """
    with open_private_folder(folder) as opened_folder:
        for file in sorted(opened_folder.glob(f"{stem}-*.so")):
            try:
                is_whole = checksum(read_private_file(file)) == file.stem.rpartition("-")[2]
            except FileNotFoundError:
                continue
            except NotPrivateError:
                is_whole = False
            if not is_whole:
                file.unlink(missing_ok=True)
                continue
            try:
                return ctypes.CDLL(str(file))
            except OSError as error:
                raise BuildError(f"{folder / file.name} does not load: {error}") from error
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


# the kernels' numbers of dtypes. fp64 has no number, since it runs in plain PyTorch
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

# op -> the reason why its kernels do not run: they were not built, or they are wrong here
_fallback_reasons: dict[str, str] = {}
_wrong_kernels: dict[str, str] = {}
# op -> its kernels
_kernels: dict[str, CppKernels] = {}


def fallback_reasons() -> dict[str, str]:
    """Returns the ops that run in plain PyTorch on this CPU, each with the reason. The manifest
    (the list of what `optimize` replaced) shows each reason.
    """
    return dict(_fallback_reasons)


def wrong_kernels() -> dict[str, str]:
    """Returns the ops whose kernels give wrong results on this CPU. Each op is mapped to a text
    that describes its error.
    """
    return dict(_wrong_kernels)


class CppKernels:
    """Calls the functions of the C++ source that is in the same folder as the module `file`. Each
    function is declared as a string with one letter per argument:

    p  a tensor, or None for a null pointer
    a  an array or address
    d  a dtype
    i  an int
    f  a float

    The last argument of every C++ function is the number of threads that torch uses.

    in_graphs  whether compiled graphs call the kernels too, if these are already built. It is False
               for row-wise formulas such as norms, since PyTorch's compiler fuses them with the
               operations before and after them.
    """

    def __init__(
        self, file: str, *, source: str = "cpu.cpp", in_graphs: bool = False, **functions: str
    ) -> None:
        self.in_graphs = in_graphs
        self.is_built = False
        self.source = Path(file).with_name(source)
        self.op = self.source.parent.name
        _kernels[self.op] = self
        self.functions = functions
        # positions of the arguments that a call must convert to numbers. They are not computed for
        # each call, since a layer makes 16 calls
        self.pointers = {
            name: [i for i, kind in enumerate(kinds) if kind == "p"]
            for name, kinds in functions.items()
        }
        self.dtypes = {
            name: [i for i, kind in enumerate(kinds) if kind == "d"]
            for name, kinds in functions.items()
        }
        self.library: ctypes.CDLL | None = None
        self.calls: dict[str, Any] = {}
        self.is_being_checked = False
        self._has_bf16_instructions: bool | None = None

    def has_bf16_instructions(self) -> bool:
        """Whether this processor has instructions for bf16. The library's function `native` detects
        this. Returns False if no library can be built.
        """
        if not self.load():
            return False
        if self._has_bf16_instructions is None:
            # not a tensor, since a tensor has no data while memory is planned
            answer = ctypes.c_int64()
            self("native", ctypes.addressof(answer))
            self._has_bf16_instructions = bool(answer.value)
        return self._has_bf16_instructions

    def load(self) -> bool:
        """Builds the library or loads it, and checks its kernels if they were not checked on this
        machine. Returns whether the kernels can be used.
        """
        if self.library is not None or self.is_being_checked:
            return True
        if self.op in _fallback_reasons:
            return False
        try:
            library = load_or_build_library(self.source)
        except (BuildError, OSError) as error:
            _fallback_reasons[self.op] = str(error)
            return False
        self._declare_functions(library)
        self.is_being_checked = True
        try:
            reason = trust.find_disagreement(
                self.op,
                [library_stem(self.source, cpu_compiler() or "")],
                torch.device("cpu"),
                list(DTYPES),
            )
        finally:
            self.is_being_checked = False
        if reason:
            _wrong_kernels[self.op] = reason
            _fallback_reasons[self.op] = reason
            trust.warn_of_wrong_kernel(self.op, "cpu", reason)
            return False
        self.library = library
        self.is_built = True
        return True

    def _declare_functions(self, library: ctypes.CDLL) -> None:
        kinds = {
            "p": ctypes.c_void_p,
            "a": ctypes.c_void_p,
            "d": ctypes.c_int64,
            "i": ctypes.c_int64,
            "f": ctypes.c_float,
        }
        for name, arguments in self.functions.items():
            function = getattr(library, name)
            function.argtypes = [*(kinds[kind] for kind in arguments), ctypes.c_int]
            function.restype = None
            self.calls[name] = function

    def __call__(self, name: str, *arguments: Any) -> None:
        values = list(arguments)
        for i in self.pointers[name]:
            if values[i] is not None:
                values[i] = values[i].data_ptr()
        for i in self.dtypes[name]:
            values[i] = DTYPES[values[i]]
        self.calls[name](*values, torch.get_num_threads())


def missing_kernels_reason(*ops: str) -> str:
    """Returns the reason why one of these ops has no C++ kernels on this machine, or "" if all have
    them. Libraries that do not exist yet are built in parallel, which takes 2 to 5 s. Kernels with
    wrong results are not among these reasons: only the ops of these kernels then run in plain
    PyTorch.
    """
    waiting = [
        _kernels[op].source
        for op in ops
        if _kernels[op].library is None and op not in _fallback_reasons
    ]
    with ThreadPoolExecutor() as pool:
        for build in [pool.submit(load_or_build_library, source) for source in waiting]:
            with suppress(BuildError, OSError):  # `load` meets the error again
                build.result()
    # one after the other, because the check of an op may use the kernels of another op
    for op in ops:
        _kernels[op].load()
    reasons = _fallback_reasons.items()
    return next((reason for op, reason in reasons if op in ops and op not in _wrong_kernels), "")


def view_as_rows(*tensors: Tensor) -> list[Tensor]:
    """Returns views [rows, columns] of tensors that have the same shape. In each view, the values
    of a row are adjacent in memory. If all tensors are contiguous, each view is a single long row.
    """
    are_contiguous = True
    for t in tensors:
        are_contiguous = are_contiguous and t.is_contiguous()
    views: list[Tensor] = []
    for t in tensors:
        rows = t.view(1, -1) if are_contiguous else t.reshape(-1, t.shape[-1])
        views.append(rows if rows.stride(-1) == 1 else rows.contiguous())
    return views
