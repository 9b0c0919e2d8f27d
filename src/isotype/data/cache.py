"""Caches tokenised sources on disk, so that the next run with the same data, tokenizer and settings
begins at once.

An entry is one safetensors file. The name of the file is a hash of everything that determines the
rows of the entry. The hash includes the content of the source, the tokenizer, the template, the
settings, and the `VERSION` of this code. The file is written under a temporary name and renamed, so
that concurrent or killed runs leave no partial entries. The file's metadata contain a checksum. If
the file is damaged, it is written again. Rows are memory-mapped, so they are not all read into
memory.

When a new entry exceeds the folder's limit, the least recently used entries are removed. If another
run has memory-mapped a removed entry, the operating system keeps the content of this entry until
the other run ends. Pictures that the data contain as bytes are stored in a subfolder, which has a
separate limit of the same size.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np

from ..errors import UsageError
from .tokens import COLUMNS, TokenBlock, TokenWriter

VERSION = 22  # must be raised whenever the same source gives other rows or other facts
# with `auto`, smaller sources are not cached: tokenising them takes a second
MIN_CACHED_BYTES = 1_000_000
LIMIT_VARIABLE = "ISOTYPE_CACHE_GB"
DEFAULT_GB = 20.0  # largest size of the cache, in GB
PICTURES_FOLDER = "pictures"  # name of a subfolder of the folder of entries
# a picture that was read within this time (in seconds) is not removed: a run may read it again in
# its next epoch
IN_USE_SECONDS = 24 * 3600
# seconds after which a partial file is regarded as left by a run that ended
_STALE_SECONDS = 24 * 3600
_CHUNK = 1 << 22  # bytes of a file that are read at once
# files with other names may be a user's weights
_ENTRY_NAME = re.compile(r"[0-9a-f]{32}\.(safetensors|picture)")
# dtype of torch -> its name in safetensors files
_DTYPE_CODES = {"int32": "I32", "int64": "I64", "uint64": "U64", "bool": "BOOL", "uint8": "U8"}
# columns with wider elements come first, so that every column begins at a multiple of its
# elements' size
_COLUMN_ORDER = sorted(COLUMNS, key=lambda name: -np.dtype(COLUMNS[name]).itemsize)
_NO_CHECKSUM = "0" * 64  # placeholder in the header while the file's checksum is computed


def cache_folder(setting: str) -> Path | None:
    """Returns the folder of the cache for the setting `data.cache`. For `auto` this is the folder
    in the environment variable ISOTYPE_CACHE, or else the user's cache folder. Returns None for
    `none`.
    """
    if setting == "none":
        return None
    if setting != "auto":
        return Path(setting).expanduser()
    if variable := os.environ.get("ISOTYPE_CACHE"):
        if variable == "none":
            return None
        return Path(variable).expanduser() / "tokens"
    return (
        Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
        / "isotype"
        / "tokens"
    )


def max_cache_bytes() -> int:
    """Returns the size limit of a cache folder in bytes. The environment variable ISOTYPE_CACHE_GB
    sets it; the default is 20 GB. Raises UsageError for an invalid value.
    """
    value = os.environ.get(LIMIT_VARIABLE) or DEFAULT_GB
    try:
        if float(value) >= 0:
            return int(float(value) * 1e9)
    except (ValueError, OverflowError):
        pass
    raise UsageError(
        f"{LIMIT_VARIABLE}={value}: expected gigabytes, a number of at least 0",
        fix=f"{LIMIT_VARIABLE}=20",
    )


def evict(folder: Path, *, keep: Path | None = None) -> int:
    """Removes the least recently used entries until the folder is within its size limit. Returns
    the number of removed entries. The entry `keep` is never removed. Pictures that were read within
    the last day are not removed either, because another run may need them again.
    """
    entries = []
    for path in folder.glob("*"):
        if _ENTRY_NAME.fullmatch(path.name):
            with suppress(OSError):  # another run removed it
                stat = path.stat()
                entries.append((max(stat.st_atime, stat.st_mtime), stat.st_size, path))
    total = sum(size for _, size, _ in entries)
    limit = max_cache_bytes()
    in_use = time.time() - IN_USE_SECONDS
    removed = 0
    for last_used, size, path in sorted(entries):
        is_kept = path == keep or (path.suffix == ".picture" and last_used > in_use)
        if total > limit and not is_kept:
            with suppress(OSError):  # some systems refuse to remove a memory-mapped file
                path.unlink(missing_ok=True)
                total = total - size
                removed = removed + 1
    return removed


def entry_key(parts: Any) -> str:
    """Returns the name of an entry, which is a hash of everything that determines its rows."""
    return hashlib.sha256(
        json.dumps([VERSION, parts], sort_keys=True, default=str).encode()
    ).hexdigest()[:32]


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Returns a hash of everything that decides how a text is tokenised. The hash includes the
    tokenizer's vocabulary, rules and special tokens, and the versions of the libraries.
    """
    import tokenizers
    import transformers

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        rules = backend.to_str()
    else:
        rules = json.dumps(sorted(tokenizer.get_vocab().items()))
    added = {i: repr(token) for i, token in tokenizer.added_tokens_decoder.items()}
    settings = {
        k: str(v)
        for k, v in sorted(tokenizer.init_kwargs.items())
        if not k.endswith("_file") and k not in ("name_or_path", "chat_template")
    }
    parts = [
        type(tokenizer).__name__,
        added,
        tokenizer.special_tokens_map,
        settings,
        transformers.__version__,
        tokenizers.__version__,
    ]
    return hashlib.sha256((rules + json.dumps(parts, default=str)).encode()).hexdigest()


def load_or_create_entry(
    folder: Path, key: str, write_rows: Callable[[TokenWriter], dict[str, Any]]
) -> tuple[TokenBlock, list[str]]:
    """Returns the rows of an entry, and messages for the user. If the entry is missing or
    unreadable, `write_rows` creates it first.

    write_rows  writes every row and returns the values for the entry's metadata
    Raises      OSError if the folder cannot be written
    """
    path = folder / f"{key}.safetensors"
    notes = []
    try:
        block = read_entry(path)
        # sets the access time, which is the time of the last use; the modification time stays,
        # because runs detect a changed file by it
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
        if (missing_picture := block.find_missing_picture()) is None:
            block.facts["cache"] = f"from {path}"
            return block, []
        notes.append(f"a cache entry was made again: {missing_picture} changed, or is gone")
    except FileNotFoundError:
        pass
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        notes.append(f"a damaged cache entry was made again: {path}: {error}")
    folder.mkdir(parents=True, exist_ok=True)
    _remove_stale_files(folder)
    temporary = folder / f".{key}.{os.getpid()}.{secrets.token_hex(4)}"
    temporary.mkdir()
    try:
        with ExitStack() as stack:
            writer = TokenWriter(
                {name: stack.enter_context((temporary / name).open("w+b")) for name in COLUMNS}
            )
            write_entry(temporary / "entry", writer.files, write_rows(writer))
        os.replace(temporary / "entry", path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    block = read_entry(path)
    block.facts["cache"] = f"kept in {path}"
    if evicted := evict(folder, keep=path):
        limit_note = f"{folder} holds at most {max_cache_bytes() / 1e9:g} GB"
        notes.append(f"cache entries removed, those unused for longest: {evicted}; {limit_note}")
    return block, notes


def _remove_stale_files(folder: Path) -> None:
    """Removes incomplete files of runs that were killed."""
    for leftover in folder.glob(".*"):
        try:
            if time.time() - leftover.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        except OSError:
            continue


def write_entry(path: Path, files: Mapping[str, IO[bytes]], facts: dict[str, Any]) -> None:
    """Writes columns as a safetensors file. The file's metadata contain `facts` and a checksum of
    the rest of the file.
    """
    header: dict[str, Any] = {"__metadata__": {"facts": json.dumps(facts), "sha256": _NO_CHECKSUM}}
    offset = 0
    for name in _COLUMN_ORDER:
        end = offset + files[name].seek(0, os.SEEK_END)
        count = (end - offset) // np.dtype(COLUMNS[name]).itemsize
        header[name] = {
            "dtype": _DTYPE_CODES[COLUMNS[name]],
            "shape": [count],
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("w+b") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name in _COLUMN_ORDER:
            files[name].seek(0)
            shutil.copyfileobj(files[name], out, _CHUNK)
        out.seek(0)
        digest = hashlib.file_digest(out, "sha256").hexdigest()
        out.seek(8)
        out.write(text.replace(_NO_CHECKSUM.encode(), digest.encode()))
        out.flush()
        os.fsync(out.fileno())


def read_entry(path: Path) -> TokenBlock:
    """Maps an entry into memory. Raises ValueError for a damaged entry, FileNotFoundError for a
    missing one.
    """
    with path.open("rb") as file:
        length = file.read(8)
        text = file.read(min(int.from_bytes(length, "little"), path.stat().st_size))
        header = json.loads(text)
        expected = header["__metadata__"]["sha256"]
        digest = hashlib.sha256(length + text.replace(expected.encode(), _NO_CHECKSUM.encode()))
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    if digest.hexdigest() != expected:
        raise ValueError("its checksum is not that of its content")
    columns = {}
    for name, dtype in COLUMNS.items():
        (count,), offset = header[name]["shape"], 8 + len(text) + header[name]["data_offsets"][0]
        columns[name] = (
            np.memmap(path, dtype, "r", offset, (count,)) if count else np.zeros(0, dtype)
        )
    return TokenBlock(columns, json.loads(header["__metadata__"]["facts"]))
