"""Latents and text embeddings, each under a key of everything that shaped it, in memory or in a folder of limited size. A file is written
under another name and renamed, so that a killed run leaves complete entries only, which the next run uses.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from ...data.cache_folder import bound, cache_folder, evict
from ...errors import RunError, UsageError

VERSION = 1  # raise it whenever the same picture or caption gives other tensors
_HASHED: dict[tuple[str, int, int], str] = {}


def key_of(parts: Any) -> str:
    """The name of an entry: a hash of what shaped it."""
    return hashlib.sha256(json.dumps([VERSION, parts], sort_keys=True, default=str).encode()).hexdigest()[:32]


def fingerprint(files: Iterable[Path]) -> str:
    """A hash of the content of files. Each file is read once per process unless its size or time changes."""
    digest = hashlib.sha256()
    for path in sorted(files):
        stat = path.stat()
        known = (str(path), stat.st_size, stat.st_mtime_ns)
        if known not in _HASHED:
            with path.open("rb") as file:
                _HASHED[known] = hashlib.file_digest(file, "sha256").hexdigest()
        digest.update(f"{path.name}:{_HASHED[known]}".encode())
    return digest.hexdigest()


class Store:
    """folder  where entries lie; None: in memory, for this run only"""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._memory: dict[str, dict[str, Tensor]] = {}
        self._used: set[str] = set()

    @classmethod
    def of(cls, setting: str) -> Store:
        """The store of `images.cache`. In `auto` it lies beside the cache of tokens."""
        folder = cache_folder(setting)
        return cls(folder.parent / "pictures" if folder is not None and setting == "auto" else folder)

    def has(self, key: str) -> bool:
        """Whether there is a whole entry; one that is damaged is removed, so that it is made again."""
        if self.folder is None:
            return key in self._memory
        path = self._path(key)
        try:
            load(path.read_bytes())
            os.utime(path)  # records the last use, since entries are removed by age
        except FileNotFoundError:
            return False
        except (OSError, SafetensorError, ValueError):
            path.unlink(missing_ok=True)
            return False
        self._used.add(key)
        return True

    def put(self, key: str, tensors: Mapping[str, Tensor]) -> None:
        """Raises  UsageError where the disk refuses."""
        stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        if self.folder is None:
            self._memory[key] = stored
            return
        path = self._path(key)
        aside = path.with_name(f".{key}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            aside.write_bytes(save(stored))
            os.replace(aside, path)
        except OSError as error:
            raise UsageError(
                f"images.cache: {self.folder}: {error.strerror or error}", fix="free space, images.cache: FOLDER, or images.cache: none"
            ) from None
        finally:
            aside.unlink(missing_ok=True)
        self._used.add(key)

    def get(self, key: str) -> dict[str, Tensor]:
        """Raises  RunError when the entry went while the run was running."""
        if self.folder is None:
            return self._memory[key]
        try:
            return load(self._path(key).read_bytes())
        except (OSError, SafetensorError, ValueError) as error:
            raise RunError(
                f"images.cache: {self._path(key)}: {str(error).splitlines()[0]}", fix="resume: what is missing is made again"
            ) from None

    def hold_to_bound(self) -> None:
        """Removes entries of other runs until the folder is within its bound. Raises UsageError where this run alone takes more."""
        if self.folder is None or not self._used:
            return
        total = sum(self._path(key).stat().st_size for key in self._used)
        if total > bound():
            raise UsageError(
                f"images.cache: {self.folder}: this run's latents and embeddings take {total / 1e9:.1f} GB of {bound() / 1e9:.1f}",
                fix=f"ISOTYPE_CACHE_GB={total / 1e9 + 1:.0f}, or a smaller images.resolution",
            )
        evict(self.folder, keep=self._path(next(iter(self._used))), most=bound())

    def _path(self, key: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{key}.safetensors"


def libraries() -> dict[str, str]:
    """The versions that shape what an encoder gives."""
    import diffusers
    import PIL
    import transformers

    return {
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "transformers": transformers.__version__,
        "PIL": PIL.__version__,
    }
