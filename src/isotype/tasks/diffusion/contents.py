"""Where a picture's bytes are: a file, or a cell of a Parquet file. They are read when they are needed, and never held."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from .store import fingerprint


class Content(Protocol):
    """The bytes of one picture."""

    def read(self) -> bytes:
        """Raises  OSError"""

    def fingerprint(self) -> str:
        """A hash of the bytes. Raises OSError."""


@dataclass(frozen=True)
class InFile:
    path: Path

    def read(self) -> bytes:
        return self.path.read_bytes()

    def fingerprint(self) -> str:
        return fingerprint([self.path])


@dataclass(frozen=True)
class InParquet:
    """A cell that holds a picture: bytes, or a struct with `bytes` as `datasets` writes it. `row` from 0 within the row group."""

    path: Path
    column: str
    group: int
    row: int

    def read(self) -> bytes:
        cell = _cells(self.path, self.column, self.group)[self.row].as_py()
        found = cell.get("bytes") if isinstance(cell, dict) else cell
        return found if isinstance(found, bytes) else b""

    def fingerprint(self) -> str:
        return hashlib.sha256(self.read()).hexdigest()


@lru_cache(maxsize=1)  # pictures are read in the order of the file
def _cells(path: Path, column: str, group: int) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path).read_row_group(group, columns=[column]).column(0)
    except pa.ArrowException as error:
        raise OSError(f"broken Parquet: {str(error).splitlines()[0]}") from None
