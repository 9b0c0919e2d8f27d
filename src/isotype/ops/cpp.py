"""An op's C++ kernels on a CPU: built when first needed, once per machine, and called. Where that
fails, plain PyTorch runs, and the manifest says so.

A row-wise formula in plain PyTorch reads and writes wide tensors at every step; a fused kernel
reads and writes each narrow tensor once. Libraries are stored on disk and shared by processes.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..environment.private import (
    NotPrivateError,
    make_private,
    open_private,
    read_private,
    temporary_folder,
)

HEADERS = Path(__file__).parent
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-shared", "-Wno-psabi")
# a build that takes longer says so, while it runs
PATIENCE_S = 5.0


class BuildError(Exception):
    """Why there is no library, in one line."""


@cache
def cpu_compiler() -> str | None:
    """The C++ compiler, from CXX or by its name, or None."""
    return shutil.which(os.environ.get("CXX", "")) or next(
        filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None
    )


def library_folder() -> Path:
    """Where libraries are kept: ISOTYPE_CACHE, or `isotype` in the user's cache folder, or a
    temporary one. A folder that cannot be written, or that others can change, is passed over.

    ISOTYPE_CACHE=none, which keeps no tokens (`data.cache`), stores them in the temporary one,
    since a library must be a file.

    Raises  BuildError
    """
    setting = os.environ.get("ISOTYPE_CACHE", "")
    candidates: list[Path] = []
    if setting not in ("", "none"):
        candidates.append(Path(setting).expanduser())
    if setting != "none":
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        candidates.append(home / "isotype")
    candidates.append(temporary_folder())
    reasons: list[str] = []
    for candidate in candidates:
        try:
            folder = make_private(candidate)
        except OSError as error:
            reasons.append(f"{candidate}: {error.strerror}")
            continue
        except NotPrivateError as error:
            warn_of_shared_folder(str(error))
            reasons.append(str(error))
            continue
        if os.access(folder, os.W_OK):
            return folder
        reasons.append(f"{folder} cannot be written")
    raise BuildError(
        "no folder for compiled kernels that only this user can change: set ISOTYPE_CACHE to one"
        f" ({'; '.join(reasons)})"
    )


@cache
def warn_of_shared_folder(reason: str) -> None:
    print(
        f"isotype: compiled C++ kernels are kept elsewhere: {reason}", file=sys.stderr, flush=True
    )


@cache
def machine(compiler: str) -> str:
    """What `-march=native` and the compiler make of a source, apart from the source."""
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


def library(source: Path) -> ctypes.CDLL:
    """`source`, built with its headers where no build of the same text, compiler and processor is
    kept.

    Raises  BuildError
    """
    compiler = cpu_compiler()
    if compiler is None:
        raise BuildError("no C++ compiler (g++ or clang++) was found")
    text = source.read_bytes() + b"".join(
        header.read_bytes() for header in sorted(HEADERS.glob("*.h"))
    )
    key = hashlib.sha256(text + "\n".join((*FLAGS, machine(compiler))).encode()).hexdigest()[:16]
    folder = library_folder()
    stem = f"{source.parent.name}-{key}"
    try:
        loaded = load_library(folder, stem)
        if loaded is None:
            with locked(folder / f"{stem}.lock"):
                loaded = load_library(folder, stem)
                if loaded is None:
                    build(compiler, source, folder, stem)
                    loaded = load_library(folder, stem)
    except NotPrivateError as error:
        raise BuildError(str(error)) from error
    if loaded is None:
        raise BuildError(f"{folder}: the library that was built is gone, or was changed")
    return loaded


def load_library(folder: Path, stem: str) -> ctypes.CDLL | None:
    """The library that is kept under this name; None where there is none.

    Its name ends with a checksum of its content. One with another content (half a file, left by a
    machine that stopped) is removed, and so is one that others can write; one that the system
    cannot load now stays.

    Raises  BuildError, NotPrivateError
    """
    with open_private(folder) as opened:
        for file in sorted(opened.glob(f"{stem}-*.so")):
            try:
                is_whole = checksum(read_private(file)) == file.stem.rpartition("-")[2]
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
def locked(path: Path) -> Iterator[None]:
    """One process builds while the others of this machine (the ranks of a run, test workers) wait.

    Without `flock` (Windows) each builds for itself: the result is renamed into place, so that the
    last one replaces the others and no file is incomplete.
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
def say_building(folder: Path) -> None:
    print(
        f"isotype: compiling C++ kernels for this processor, once; they are kept in {folder}",
        file=sys.stderr,
        flush=True,
    )


def build(compiler: str, source: Path, folder: Path, stem: str) -> None:
    """Compiles the source into the folder, as `STEM-CHECKSUM.so`. Raises BuildError."""
    # written aside and renamed, so that no process loads half a file
    aside = folder / f"{stem}.{os.getpid()}.tmp"
    command = [compiler, *FLAGS, f"-I{HEADERS}", str(source), "-o", str(aside)]
    start = time.monotonic()
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        _, errors = process.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        say_building(folder)
        _, errors = process.communicate()
    if process.returncode:
        aside.unlink(missing_ok=True)
        lines = (
            [line for line in errors.splitlines() if "error" in line]
            or errors.splitlines()
            or [f"exit code {process.returncode}"]
        )
        raise BuildError(
            f"{Path(compiler).name} failed after {time.monotonic() - start:.0f} s: {lines[0][:160]}"
        )
    aside.chmod(0o700)
    aside.replace(folder / f"{stem}-{checksum(aside.read_bytes())}.so")


# the kernels' numbers for their dtypes: fp64 has none, and runs as plain PyTorch
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

_fallbacks: dict[str, str] = {}
# op -> its kernels
_kernels: dict[str, CppKernels] = {}


def fallbacks() -> dict[str, str]:
    """Op -> why it runs as plain PyTorch on this CPU: a line each in the manifest."""
    return dict(_fallbacks)


class CppKernels:
    """The functions of the C++ source beside the module `file`; each is declared as a string of its
    arguments' kinds.

    p  a tensor, or None for a null pointer     a  an array or address     d  a dtype     i  an int
          f  a float
    Every function takes the number of threads last, which is torch's.

    in_graphs  whether compiled graphs call them too, where a compiler had built them before. The
               row-wise formulas are left to PyTorch's compiler, which fuses them with what stands
               beside them.
    """

    def __init__(
        self, file: str, *, source: str = "cpu.cpp", in_graphs: bool = False, **functions: str
    ) -> None:
        self.in_graphs = in_graphs
        self.built = False
        self.source = Path(file).with_name(source)
        self.op = self.source.parent.name
        _kernels[self.op] = self
        self.functions = functions
        # positions of what is no number yet: asked for at every call, 16 times a layer
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

    def native(self) -> bool:
        """What the library's function `native` answers, whether this processor multiplies bf16;
        False where nothing is built.
        """
        if not self.loaded():
            return False
        # no tensor, which would be one without data while memory is planned
        answer = ctypes.c_int64()
        self("native", ctypes.addressof(answer))
        return bool(answer.value)

    def loaded(self) -> bool:
        if self.library is None and self.op not in _fallbacks:
            try:
                self.library = library(self.source)
            except (BuildError, OSError) as error:
                _fallbacks[self.op] = str(error)
                return False
            kinds = {
                "p": ctypes.c_void_p,
                "a": ctypes.c_void_p,
                "d": ctypes.c_int64,
                "i": ctypes.c_int64,
                "f": ctypes.c_float,
            }
            for name, arguments in self.functions.items():
                function = getattr(self.library, name)
                function.argtypes = [
                    *(kinds[kind] for kind in arguments),
                    ctypes.c_int,
                ]
                function.restype = None
                self.calls[name] = function
            self.built = True
        return self.library is not None

    def __call__(self, name: str, *arguments: Any) -> None:
        plain = list(arguments)
        for i in self.pointers[name]:
            if plain[i] is not None:
                plain[i] = plain[i].data_ptr()
        for i in self.dtypes[name]:
            plain[i] = DTYPES[plain[i]]
        self.calls[name](*plain, torch.get_num_threads())


def missing(*ops: str) -> str:
    """Why an op of these has no C++ kernels on this machine, or "". Builds, side by side, what was
    never built on it: 2 to 5 s.
    """
    with ThreadPoolExecutor() as pool:
        list(pool.map(CppKernels.loaded, [_kernels[op] for op in ops]))
    return next((_fallbacks[op] for op in ops if op in _fallbacks), "")


def as_rows(*tensors: Tensor) -> list[Tensor]:
    """Tensors of one shape as [rows, columns] whose columns are adjacent: one long row where all
    are contiguous.
    """
    whole = True
    for t in tensors:
        whole = whole and t.is_contiguous()
    made: list[Tensor] = []
    for t in tensors:
        rows = t.view(1, -1) if whole else t.reshape(-1, t.shape[-1])
        made.append(rows if rows.stride(-1) == 1 else rows.contiguous())
    return made
