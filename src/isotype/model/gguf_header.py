"""Reads the header of a GGUF file. The header contains settings, and the kind, shape and position
of each tensor.

The package gguf creates an object per token of the vocabulary, which took 11 s and 0.7 GB for
Gemma's 262,144 tokens. Here long lists and lists of text are skipped unless the caller asks for
them, because loading a model does not need them.

Source  docs/gguf.md of ggml: the header's layout, and the numbers of its kinds
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from ..ops.packed.ggml import BLOCKS

_MAGIC = 0x46554747  # "GGUF"
_VERSIONS = (2, 3)  # versions of the format that are read
_ALIGNMENT = 32  # alignment of tensors in bytes, unless the file's header has another
_STRING, _LIST = 8, 9
# kinds of values, as `struct` names them
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # fmt: skip
# kinds of tensors
_KINDS = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K",
    13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S",
    22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0",
    35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip
_PLAIN_BYTES = {"F32": 4, "F16": 2, "BF16": 2}  # bytes of a number, for kinds without blocks
# length of the longest list of numbers that is read; longer ones are vocabularies
_MAX_LIST_LENGTH = 4096
_MAX_ENTRIES = 1 << 20  # largest number of settings, and of tensors
_MAX_VALUES = 1 << 40  # largest size of a tensor along one dimension
# largest number of texts of a list; the largest vocabularies have fewer than 2**19 tokens
_MAX_TEXTS = 1 << 20


@dataclass(frozen=True)
class TensorEntry:
    """Describes a tensor of the file.

    kind       `Q4_K`, `F32`, ...
    shape      the shape of the values, in PyTorch's order
    offset     the position of its first byte in the file
    row_bytes  bytes per row of the last dimension; 0 for a kind that is not supported
    """

    kind: str
    shape: tuple[int, ...]
    offset: int
    row_bytes: int

    @property
    def size(self) -> int:
        return prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True)
class Header:
    """The content of a header.

    fields   the settings by their names. Long lists and lists of text are included only if the
             caller asked for them
    tensors  the tensors by their names
    """

    fields: Mapping[str, Any]
    tensors: Mapping[str, TensorEntry]


def read_header(path: Path, *, with_lists: bool = False) -> Header:
    """Reads the header of a file.

    with_lists  whether to read long lists and lists of text too, such as the tokens and merges of a
                vocabulary
    Raises      ValueError for a file that is not a GGUF file, or is truncated
    """
    if path.stat().st_size == 0:
        raise ValueError("the file is empty")
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        try:
            return _Reader(content, with_lists=with_lists).read_header()
        except struct.error:
            raise ValueError("its header is cut") from None


class _Reader:
    """Reads from the beginning of a file; `position` is the next byte."""

    def __init__(self, content: mmap.mmap, *, with_lists: bool = False) -> None:
        self.content = content
        self.with_lists = with_lists
        self.position = 0

    def read_header(self) -> Header:
        if self.read_number("I") != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = self.read_number("I")
        if version not in _VERSIONS:
            raise ValueError(f"version {version} of the format, and {_VERSIONS} are read")
        tensor_count = self.read_count()
        field_count = self.read_count()
        fields = {}
        for _ in range(field_count):
            name = self.read_name()
            value = self.read_value(self.read_number("I"))
            if value is not None:
                fields[name] = value
        entries = [self.read_tensor_entry() for _ in range(tensor_count)]
        alignment = fields.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 4 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment: {repr(alignment)[:60]}, expected a power of two")
        start = -(-self.position // alignment) * alignment
        tensors = {}
        for name, kind, shape, offset in entries:
            if name in tensors:
                raise ValueError(f"two tensors have the name {name}")
            if offset % alignment:
                raise ValueError(f"{name} does not begin at a multiple of {alignment} bytes")
            tensors[name] = self.place_tensor(name, kind, shape, start + offset)
        return Header(fields, tensors)

    def read_number(self, number_format: str) -> Any:
        unpacked = struct.unpack_from(f"<{number_format}", self.content, self.position)
        self.position += struct.calcsize(number_format)
        return unpacked[0]

    def read_count(self) -> int:
        count = int(self.read_number("Q"))
        if count > _MAX_ENTRIES:
            raise ValueError(f"a header of {count} entries")
        return count

    def read_text(self) -> str:
        length = int(self.read_number("Q"))
        text = self.content[self.position : self.position + length]
        self.skip(length)
        return text.decode("utf-8", errors="replace")

    def read_name(self) -> str:
        """Reads a name. Raises ValueError for a name with control characters, because messages show
        names.
        """
        name = self.read_text()
        if not name.isprintable():
            raise ValueError(f"a name with control characters, {name!a:.60}")
        return name

    def skip(self, length: int) -> None:
        self.position += length
        if self.position > len(self.content):
            raise ValueError("its header is cut")

    def read_value(self, value_kind: int) -> Any:
        """Reads a value. The value is None for a list of text or a long list that is skipped."""
        if value_kind == _STRING:
            return self.read_text()
        if value_kind != _LIST:
            return self.read_number(_format_of(value_kind))
        item_kind = self.read_number("I")
        length = int(self.read_number("Q"))
        if item_kind == _LIST:
            raise ValueError("a list of lists")
        if item_kind == _STRING and length > _MAX_TEXTS:
            raise ValueError(f"a list of {length:,} texts")
        if item_kind == _STRING and self.with_lists:
            return [self.read_text() for _ in range(length)]
        if item_kind == _STRING:
            for _ in range(length):
                self.skip(int(self.read_number("Q")))
            return None
        item_format = _format_of(item_kind)
        start = self.position
        self.skip(length * struct.calcsize(item_format))
        if length > _MAX_LIST_LENGTH and not self.with_lists:
            return None
        return list(struct.unpack_from(f"<{length}{item_format}", self.content, start))

    def read_tensor_entry(self) -> tuple[str, str, tuple[int, ...], int]:
        name = self.read_name()
        dimensions = self.read_number("I")
        if not 1 <= dimensions <= 4:
            raise ValueError(f"{name} has {dimensions} dimensions")
        sizes = [int(self.read_number("Q")) for _ in range(dimensions)]
        if any(not 1 <= size <= _MAX_VALUES for size in sizes):
            raise ValueError(f"{name} has a side of {max(sizes)} and one of {min(sizes)} values")
        number = self.read_number("I")
        kind = _KINDS.get(number, f"kind {number}")
        # ggml stores the fastest dimension first
        return name, kind, tuple(reversed(sizes)), int(self.read_number("Q"))

    def place_tensor(
        self, name: str, kind: str, shape: tuple[int, ...], offset: int
    ) -> TensorEntry:
        if kind in BLOCKS:
            numbers, block_bytes, _ = BLOCKS[kind]
            if shape[-1] % numbers:
                raise ValueError(f"{name}: rows of {shape[-1]} in blocks of {numbers}")
            row_bytes = shape[-1] // numbers * block_bytes
        else:
            row_bytes = shape[-1] * _PLAIN_BYTES.get(kind, 0)
        entry = TensorEntry(kind, shape, offset, row_bytes)
        if offset + entry.size > len(self.content):
            raise ValueError(f"{name} ends after the file does")
        return entry


def _format_of(value_kind: int) -> str:
    if value_kind not in _FORMATS:
        raise ValueError(f"a value of kind {value_kind}")
    return _FORMATS[value_kind]
