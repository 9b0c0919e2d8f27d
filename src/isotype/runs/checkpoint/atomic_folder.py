"""Writes a folder atomically. Files are first written into a temporary folder next to the target
folder. The temporary folder is synced to the disk, gets a file with checksums, and is then renamed.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ...errors import RunError

Result = TypeVar("Result")
SEAL = "DONE"  # the file that is written last; a folder without it is incomplete
_OS_ERROR = re.compile(r"\(os error \d+\)")
# what to do about errors other than missing write permission
_FIXES = {
    errno.ENOSPC: "free space",
    errno.EDQUOT: "free space",
    errno.EFBIG: "raise the limit on the size of a file (ulimit -f)",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.EIO: "check the disk for faults",
}


def write_folder(
    target: Path,
    fill: Callable[[Path], object],
    *,
    check: Callable[[Path], None] | None = None,
    next_action: str = "resume",
) -> None:
    """Calls `fill(folder)` on a temporary folder and renames it to `target`. An existing `target`
    is replaced.

    check  checks the finished folder. If it raises an error, or if the program is killed during the
           check, `target` is unchanged
    next_action  what the error message tells the user to do once the folder can be written
    Raises  RunError CK001 when the disk is full or read-only; the temporary folder is then removed
            and `target` is unchanged
    """
    with _temporary_folder(target, next_action=next_action) as temporary:
        _create_empty(temporary)
        fill(temporary)
        seal(temporary)
        if check is not None:
            check(temporary)
        _rename_into_place(temporary, target)


class Processes(Protocol):
    """The interface that lets several processes write one folder together."""

    rank: int
    size: int

    @property
    def is_first(self) -> bool: ...
    def gather(self, value: Any) -> list[Any]: ...
    def run_on_first(
        self, work: Callable[[], Result], *, without_timeout: bool = False
    ) -> Result: ...


def write_folder_together(
    target: Path, fill: Callable[[Path], Sequence[Path]], processes: Processes
) -> None:
    """Writes a folder as `write_folder` does, but several processes call this function together.
    Each process writes its own files. The first process writes the file with the checksums and
    renames the folder.

    fill  writes into the folder and returns the files that it wrote
    Raises  in all processes, the error that one of the processes raised
    """
    with _temporary_folder(target, should_remove_on_error=processes.is_first) as temporary:
        processes.run_on_first(lambda: _create_empty(temporary))
        written = {file.name: _sync_and_hash(file) for file in fill(temporary)}
        checksums = {
            name: checksum
            for files_of_process in processes.gather(written)
            for name, checksum in files_of_process.items()
        }

        def seal_and_rename() -> None:
            seal(temporary, checksums)
            _rename_into_place(temporary, target)

        processes.run_on_first(seal_and_rename)


@contextmanager
def _temporary_folder(
    target: Path, *, should_remove_on_error: bool = True, next_action: str = "resume"
) -> Iterator[Path]:
    """Yields a temporary folder next to `target`. The temporary folder is removed if an error
    occurs.
    """
    temporary = _partial_path(target)
    try:
        with _name_io_errors(target, next_action):
            yield temporary
    except BaseException:
        if should_remove_on_error:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _partial_path(target: Path) -> Path:
    return target.with_name(f".{target.name}.partial")


def write_file(target: Path, fill: Callable[[Path], Result], *, next_action: str) -> Result:
    """Calls `fill(file)` for a temporary file and renames it to `target`. Returns what `fill`
    returned.

    Raises  RunError CK001 when the disk is full or read-only; `target` is then unchanged
    """
    temporary = _partial_path(target)
    try:
        with _name_io_errors(target, next_action):
            result = fill(temporary)
            _sync(temporary)
            temporary.replace(target)
    finally:
        with suppress(OSError):
            temporary.unlink()
    return result


@contextmanager
def _name_io_errors(target: Path, next_action: str) -> Iterator[None]:
    """Replaces the errors of a full or read-only disk by CK001. Other errors are raised unchanged."""
    try:
        yield
    except BaseException as error:
        reason = describe_io_error(error)
        if reason is None:
            raise
        raise RunError(
            f"could not write {target}: {reason}",
            code="CK001",
            fix=f"{suggest_fix(reason)}, then {next_action}",
        ) from error


def _create_empty(folder: Path) -> None:
    _remove(folder)
    folder.mkdir(parents=True)


def _rename_into_place(temporary: Path, target: Path) -> None:
    old_folder = target.parent / f".{target.name}.replaced"
    _remove(old_folder)
    if target.exists():
        target.rename(old_folder)
    temporary.rename(target)
    _sync(target.parent)
    _remove(old_folder)


def describe_io_error(error: BaseException) -> str | None:
    """Returns the operating system's message about a failed read or write; None for other errors."""
    if isinstance(error, OSError) and error.errno is not None:
        return f"{error.strerror or error}"
    # safetensors and tokenizers are written in Rust: their I/O errors are not OSErrors and end in
    # `(os error 28)`
    if isinstance(error, Exception) and _OS_ERROR.search(str(error)):
        return str(error)
    return None


def suggest_fix(reason: str) -> str:
    """Returns advice on how to fix a failed write. The advice depends on the error message of the
    operating system.
    """
    if "(os error 2)" in reason or os.strerror(errno.ENOENT) in reason:
        return "another program removed or renamed a folder of the run: put it back"
    return next(
        (fix for number, fix in _FIXES.items() if os.strerror(number) in reason),
        "make it writable",
    )


def seal(folder: Path, known_checksums: Mapping[str, dict[str, Any]] | None = None) -> None:
    """Syncs every file, then writes DONE with the sizes and SHA-256 checksums. All files get the
    same permissions as the file DONE, because safetensors creates files with mode 600.

    known_checksums  sizes and checksums of the files that other processes have written and synced
    """
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file.name != SEAL)
    names = [(file.relative_to(folder).as_posix(), file) for file in files]
    checksums = {
        name: known_checksums[name]
        if known_checksums and name in known_checksums
        else _sync_and_hash(file)
        for name, file in names
    }
    seal_file = folder / SEAL
    seal_file.write_text(json.dumps({"files": checksums}, indent=1) + "\n")
    for file in files:
        file.chmod(seal_file.stat().st_mode)
    _sync(seal_file)
    _sync(folder)


def replace_sealed_file(folder: Path, name: str, text: str) -> None:
    """Replaces a file of a folder that `write_folder` has written. Before the file is written, its
    entry in the list of checksums is removed, so that the folder is valid at each moment.
    """
    seal_file = folder / SEAL
    content = json.loads(seal_file.read_text())
    content["files"].pop(name, None)
    write_text(seal_file, json.dumps(content, indent=1) + "\n")
    write_text(folder / name, text)
    content["files"][name] = _sync_and_hash(folder / name)
    write_text(seal_file, json.dumps(content, indent=1) + "\n")


def _sync_and_hash(file: Path) -> dict[str, Any]:
    """Syncs a file to the disk and returns its size and checksum."""
    _sync(file)
    return {"bytes": file.stat().st_size, "sha256": _sha256(file)}


def find_damage(
    folder: Path, needs: Sequence[str] = (), *, rank: int = 0, size: int = 1
) -> str | None:
    """Returns a description of the damage of a folder that `write_folder` has written. Returns None
    if every file has the recorded size and checksum and the folder contains the files that `needs`
    lists.

    rank, size  the function checks only the checksum of every `size`-th file, beginning with file
                number `rank`
    """
    try:
        checksums = json.loads((folder / SEAL).read_text())["files"]
        for name in needs:
            if name not in checksums:
                return f"{SEAL} does not name {name}"
        for index, (name, expected) in enumerate(checksums.items()):
            file = folder / name
            if not file.resolve().is_relative_to(folder.resolve()):
                return f"{SEAL} names a file outside the folder"
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != expected["bytes"]:
                return f"{name} has {file.stat().st_size} bytes of {expected['bytes']}"
            if index % size == rank and _sha256(file) != expected["sha256"]:
                return f"{name} is not what was written (its checksum differs)"
    except FileNotFoundError:
        return f"{SEAL} is missing: it was never finished"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"{SEAL} cannot be read: {error}"
    return None


def find_damage_together(folder: Path, needs: Sequence[str], processes: Processes) -> str | None:
    """Returns the same description of damage as `find_damage`, but several processes call this
    function together. The checksum of each file is computed by only one of the processes. All
    processes get the same result.
    """
    reason = find_damage(folder, needs, rank=processes.rank, size=processes.size)
    return next((reason for reason in processes.gather(reason) if reason is not None), None)


def _sha256(file: Path) -> str:
    with file.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def write_text(target: Path, text: str) -> None:
    """Replaces a small file atomically: a reader sees either the old text or the new text."""
    temporary = _partial_path(target)
    try:
        # creates a new file, so that nothing is written through a link or a leftover of a killed
        # run
        temporary.unlink(missing_ok=True)
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        reason = f"{error.strerror or error}"
        raise RunError(
            f"could not write {target}: {reason}", code="CK001", fix=suggest_fix(reason)
        ) from error
