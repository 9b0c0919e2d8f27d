"""Detects changes of the files that are mapped into memory during training, such as frozen weights
and tokenised rows. A program that writes into such a file changes the data or the weights of the
run.

`MappedFiles` is created after everything is loaded. Replacing a file by a rename, or removing it,
does not count as a change, because the mapped content stays the same. If only the modification time
differs, checksums of evenly spaced blocks are compared to see whether the content has changed.

Source  proc_pid_maps(5)
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import stat
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import RunError

# the file of a run folder with the sizes of the mapped files: the system ends a process that reads
# a truncated file with SIGBUS, without a message, so that only a later command can name the file
MAPPED_RECORD = "mapped.json"
# only Linux has these files; on other systems no file is checked
MAPS = Path("/proc/self/maps")
SMAPS = Path("/proc/self/smaps")
# files of the system and of Python packages do not belong to the run
_SYSTEM_FOLDERS = (
    "/usr/lib", "/usr/share/locale/", "/lib/", "/lib64/", "/etc/", "/dev/", "/proc/", "/sys/", "/var/cache/", "/memfd:",
)  # fmt: skip
BLOCK_SIZE = 4096  # bytes
MAX_BLOCKS, MAX_BLOCKS_PER_FILE, MIN_BLOCKS_PER_FILE = 2048, 256, 8
MAX_FILES = 400  # each needs a file descriptor, and a process usually has 1,024


@dataclass
class _MappedFile:
    """Describes one mapped file, with the size, modification time and checksum that it had when it
    was mapped. `descriptor` is an open file descriptor; it refers to the mapped content even if the
    file is renamed.
    """

    path: Path
    descriptor: int
    size: int
    mtime_ns: int
    block_count: int
    checksum: str


class MappedFiles:
    """Stores which files this process has mapped at the time when the object is created. The method
    `close` closes the descriptors of these files.
    """

    def __init__(self) -> None:
        self._files: list[_MappedFile] = []
        paths = mapped_paths()[:MAX_FILES]
        block_count = MAX_BLOCKS // max(1, len(paths))
        block_count = max(MIN_BLOCKS_PER_FILE, min(MAX_BLOCKS_PER_FILE, block_count))
        for path, identity in paths:
            with suppress(OSError):  # removed meanwhile, or no descriptor is left
                descriptor = os.open(path, os.O_RDONLY)
                status = os.fstat(descriptor)
                if (status.st_dev, status.st_ino) != identity:  # another file by now
                    os.close(descriptor)
                    continue
                checksum = _checksum(descriptor, status.st_size, block_count)
                file = _MappedFile(
                    path, descriptor, status.st_size, status.st_mtime_ns, block_count, checksum
                )
                self._files.append(file)

    @property
    def paths(self) -> list[Path]:
        return [file.path for file in self._files]

    def sizes(self) -> dict[str, int]:
        """Returns the size of each file when it was mapped, in bytes."""
        return {str(file.path): file.size for file in self._files}

    def refuse_changes(self, step: int) -> list[Path]:
        """Raises RunError CK004 for a file whose size or content has changed. Returns the files
        whose modification time has changed while their content is the same.
        """
        touched: list[Path] = []
        for file in self._files:
            status = os.fstat(file.descriptor)
            if (status.st_size, status.st_mtime_ns) == (file.size, file.mtime_ns):
                continue
            if status.st_size != file.size:
                change = f"had {file.size:,} bytes, and has {status.st_size:,}"
            elif _checksum(file.descriptor, file.size, file.block_count) != file.checksum:
                change = "was written"
            else:
                file.mtime_ns = status.st_mtime_ns
                touched.append(file.path)
                continue
            raise RunError(
                f"step {step}: {file.path} {change} while the run reads it",
                code="CK004",
                fix="put the file back as it was, then resume",
            )
        return touched

    def close(self) -> None:
        for file in self._files:
            with suppress(OSError):
                os.close(file.descriptor)
        self._files = []


def find_truncated_files(sizes: object) -> list[str]:
    """Returns a description of each file that is shorter now than when a run mapped it into memory.

    sizes  the content of the file MAPPED_RECORD; the run folder may be untrusted
    """
    descriptions: list[str] = []
    for path, size in list(sizes.items())[:MAX_FILES] if isinstance(sizes, dict) else ():
        with suppress(OSError, ValueError):  # a removed file was not truncated
            current_size = os.stat(path).st_size
            if isinstance(size, int) and current_size < size:
                descriptions.append(f"{path} had {size:,} bytes, and has {current_size:,}")
    return descriptions


def mapped_paths() -> list[tuple[Path, tuple[int, int]]]:
    """Returns the data files of the run that this process has mapped into memory, each as (path,
    (device, inode)).
    """
    try:
        lines = MAPS.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []
    identities: dict[str, tuple[int, int]] = {}
    executables: set[str] = set()
    for line in lines:
        fields = line.split(None, 5)
        if len(fields) < 6 or not fields[5].startswith("/"):
            continue
        _, permissions, _, device, inode, name = fields
        if "x" in permissions:
            executables.add(name)
        if "s" in permissions and "w" in permissions:  # memory that processes share
            continue
        major, _, minor = device.partition(":")
        identities[name] = os.makedev(int(major, 16), int(minor, 16)), int(inode)
    ignored_prefixes = (*_SYSTEM_FOLDERS, f"{sys.prefix}/", f"{sys.base_prefix}/")
    return [
        (Path(name), _identity(name, identity))
        for name, identity in sorted(identities.items())
        if name not in executables and not name.startswith(ignored_prefixes)
    ]


def release_mapped_pages() -> int:
    """Removes the pages of the run's mapped data files from this process, and returns their number
    of bytes. A page is read from the file again when it is used. Packing a frozen weight reads all
    pages of its file, and the file stays mapped if the model keeps one of its weights unpacked.

    If the process has written into a mapping, the mapping is left as it is.
    """
    paths = {str(path) for path, _ in mapped_paths()}
    released_bytes = 0
    for mapping in _read_mappings():
        if mapping.path in paths and mapping.resident_bytes and not mapping.written_bytes:
            address = ctypes.c_void_p(mapping.start)
            size = mapping.end - mapping.start
            if ctypes.CDLL(None).madvise(address, ctypes.c_size_t(size), mmap.MADV_DONTNEED):
                continue
            released_bytes += mapping.resident_bytes
    return released_bytes


@dataclass
class _Mapping:
    """Describes one mapping of a file: its first address, the address after its end, and how many
    of its bytes are in memory. `written_bytes` of them differ from the file.
    """

    path: str
    start: int
    end: int
    resident_bytes: int = 0
    written_bytes: int = 0


def _read_mappings() -> list[_Mapping]:
    try:
        lines = SMAPS.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []
    mappings: list[_Mapping] = []
    for line in lines:
        fields = line.split(None, 5)
        if not fields[0].endswith(":"):
            start, _, end = fields[0].partition("-")
            path = fields[5] if len(fields) == 6 else ""
            mappings.append(_Mapping(path, int(start, 16), int(end, 16)))
        elif fields[0] == "Rss:":
            mappings[-1].resident_bytes = int(fields[1]) << 10
        elif fields[0] in ("Anonymous:", "Swap:"):
            # a page that the process has written may have been swapped out since
            mappings[-1].written_bytes += int(fields[1]) << 10
    return mappings


def _identity(name: str, identity: tuple[int, int]) -> tuple[int, int]:
    """Returns the numbers of the device and the inode of a mapped file, as `stat` reports them. For
    file systems with subvolumes, /proc/self/maps shows a different device.
    """
    with suppress(OSError):
        status = os.stat(name)
        if stat.S_ISREG(status.st_mode) and status.st_ino == identity[1]:
            return status.st_dev, status.st_ino
    return identity


def _checksum(descriptor: int, size: int, block_count: int) -> str:
    """Returns the checksum of evenly spaced blocks, which include the first and the last."""
    digest = hashlib.sha256()
    last = max(0, size - BLOCK_SIZE)
    count = min(block_count, last // BLOCK_SIZE + 2)
    for index in range(count):
        digest.update(os.pread(descriptor, BLOCK_SIZE, last * index // max(1, count - 1)))
    return digest.hexdigest()
