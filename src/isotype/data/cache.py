"""Tokenised sources on disk, so that the next run with the same data, tokenizer and settings begins at once.

An entry is one safetensors file, named by a hash of everything that determines its rows: the content of the source, the tokenizer, the
template, the settings, and `VERSION` of this code. It is written under a temporary name and renamed, so that concurrent or killed runs
leave no partial entries. Its metadata contain a checksum; a damaged file is made again. Rows are memory-mapped, not read into memory.
`cache_folder` limits the size of a folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from .cache_folder import bound, evict
from .tokens import COLUMNS, TokenBlock, TokenWriter

_NAMES = {"int32": "I32", "int64": "I64", "uint64": "U64", "bool": "BOOL", "uint8": "U8"}
_MOST = 100 << 20  # bytes of a header; safetensors' own limit


# widest elements first, so that every column begins at a multiple of its element's size
_ORDER = sorted(COLUMNS, key=lambda name: -np.dtype(COLUMNS[name]).itemsize)


def header_bytes(sizes: Mapping[str, int], facts: str, digest: str) -> bytes:
    at = 0
    header: dict[str, Any] = {"__metadata__": {"facts": facts, "sha256": digest}}
    for name in _ORDER:
        width = np.dtype(COLUMNS[name]).itemsize
        header[name] = {"dtype": _NAMES[COLUMNS[name]], "shape": [sizes[name] // width], "data_offsets": [at, at + sizes[name]]}
        at += sizes[name]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_header(file: IO[bytes], size: int) -> tuple[dict[str, tuple[int, int]], str, str, int]:
    """Where each column lies, the facts, the checksum, and where the data begin. Raises ValueError where these cannot be."""
    length = int.from_bytes(file.read(8), "little")
    if not 0 < length <= min(_MOST, size - 8):
        raise ValueError("cut short, or no safetensors file")
    text = file.read(length)
    header = json.loads(text)
    facts, digest = header["__metadata__"]["facts"], header["__metadata__"]["sha256"]
    places = {name: (start, end) for name in COLUMNS for start, end in [header[name]["data_offsets"]]}
    sizes = {name: end - start for name, (start, end) in places.items()}
    if header_bytes(sizes, facts, digest)[8:] != text or sum(sizes.values()) != size - 8 - length:
        raise ValueError("cut short, or not as it was written")
    return places, facts, digest, 8 + length


VERSION = 18  # raise it whenever the same source gives other rows or other facts
SMALLEST = 1_000_000  # bytes of a source below which `auto` keeps nothing: tokenising them takes a second
_STALE = 24 * 3600  # seconds after which a half-written file is taken for one that an ended run left
_CHUNK = 1 << 22


def entry_key(parts: Any) -> str:
    """The name of an entry: a hash of everything that determines its rows."""
    return hashlib.sha256(json.dumps([VERSION, parts], sort_keys=True, default=str).encode()).hexdigest()[:32]


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """A hash of all that decides what tokens a text gets: vocabulary and rules, special tokens, and the libraries' versions."""
    import tokenizers
    import transformers

    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    added = {i: repr(t) for i, t in tokenizer.added_tokens_decoder.items()}
    settings = {
        k: str(v)
        for k, v in sorted(tokenizer.init_kwargs.items())
        if not k.endswith("_file") and k not in ("name_or_path", "chat_template")
    }
    parts = [type(tokenizer).__name__, added, tokenizer.special_tokens_map, settings, transformers.__version__, tokenizers.__version__]
    return hashlib.sha256((rules + json.dumps(parts, default=str)).encode()).hexdigest()


class Cache:
    """The entries of one folder. Reading never raises for a disk error, since a run without its cache is only slower."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.evicted = 0  # entries that went, so that the new one has its room

    def path(self, key: str) -> Path:
        return self.folder / f"{key}.safetensors"

    def load(self, key: str) -> tuple[TokenBlock | None, str | None]:
        """An entry, or None with the reason why it is damaged; (None, None) if there is none."""
        path = self.path(key)
        try:
            block = read_entry(path)
            os.utime(path)  # the last use, for whoever clears the folder by age
        except FileNotFoundError:
            return None, None
        except (OSError, ValueError, KeyError, TypeError) as error:
            return None, f"{path}: {error}"
        return block, None

    @contextmanager
    def writing(self, key: str) -> Iterator[TokenWriter]:
        """A writer whose rows go to files beside the entry. Raises OSError where the folder cannot be written."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._sweep()
        aside = self.folder / f".{key}.{os.getpid()}.{secrets.token_hex(4)}"
        aside.mkdir()
        try:
            with ExitStack() as stack:
                files = {name: stack.enter_context((aside / name).open("w+b")) for name in COLUMNS}
                yield TokenWriter(files)
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def store(self, key: str, writer: TokenWriter, facts: dict[str, Any]) -> TokenBlock:
        """Turns what was written into the entry, and maps it. Raises OSError."""
        path = self.path(key)
        aside = path.with_name(f".{key}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
        try:
            write_entry(aside, writer.files, facts)
            os.replace(aside, path)
        finally:
            aside.unlink(missing_ok=True)
        block = read_entry(path)
        self.evicted += len(evict(self.folder, keep=path, most=bound()))
        return block

    def _sweep(self) -> None:
        """Removes what killed runs left half written."""
        for left in self.folder.glob(".*"):
            try:
                if time.time() - left.stat().st_mtime > _STALE:
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
            except OSError:
                continue


def write_entry(path: Path, files: dict[str, IO[bytes]] | Any, facts: dict[str, Any]) -> None:
    """Columns as a safetensors file; `facts` and a checksum of everything are its metadata."""
    sizes = {name: file.seek(0, os.SEEK_END) for name, file in files.items()}
    said = json.dumps(facts, sort_keys=True)
    digest = hashlib.sha256(said.encode())
    for name in _ORDER:
        for chunk in _chunks(files[name]):
            digest.update(chunk)
    with path.open("wb") as out:
        out.write(header_bytes(sizes, said, digest.hexdigest()))
        for name in _ORDER:
            for chunk in _chunks(files[name]):
                out.write(chunk)
        out.flush()
        os.fsync(out.fileno())


def read_entry(path: Path) -> TokenBlock:
    """Maps an entry. Raises ValueError for one that is not whole, FileNotFoundError where there is none."""
    with path.open("rb") as file:
        places, said, expected, begin = read_header(file, path.stat().st_size)
        digest = hashlib.sha256(said.encode())
        file.seek(begin)
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    if digest.hexdigest() != expected:
        raise ValueError("its checksum is not that of its content")
    columns = {}
    for name, dtype in COLUMNS.items():
        start, end = places[name]
        count = (end - start) // np.dtype(dtype).itemsize
        columns[name] = np.memmap(path, dtype, "r", begin + start, (count,)) if count else np.zeros(0, dtype)
    block = TokenBlock(columns, json.loads(said))
    if len(block) and int(block.ends[-1]) != len(block.ids):
        raise ValueError("its rows do not end where its tokens do")
    return block


def _chunks(file: IO[bytes]) -> Iterator[bytes]:
    file.seek(0)
    while chunk := file.read(_CHUNK):
        yield chunk
