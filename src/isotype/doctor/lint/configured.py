"""What the configuration files of a repository say of dtypes, as `isotype check` reads them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from .files import SKIPPED_FOLDERS, regular

_SUFFIXES = (".json", ".jsonc", ".yaml", ".yml", ".toml")
_LOW_WORDS = re.compile(rb"bf16|fp16|bfloat16|float16|half")
_LOW = ("bf16", "fp16")
LARGEST = 64 << 10  # bytes; a longer file is data
MOST = 200  # files that may be configurations
MOST_FOLDERS = 5_000


def low_settings(root: Path) -> list[tuple[str, Path, int]]:
    """`weights` or `autocast` with the file and line that asks for bf16 or fp16, for each run that the files under `root` describe."""
    files = list(_candidates(root))
    if not files:
        return []
    from ..check.collect import collect
    from ..check.effective import effective_precision
    from ..check.runs import runs

    found = []
    for facts in runs(collect([str(file) for file in files]), None):
        try:
            record = effective_precision(facts)
        except Exception:  # a file that `isotype check` cannot follow is no evidence, and no reason to say nothing of the code
            continue
        for role, kind in (("parameters", "weights"), ("compute", "autocast")):
            by = record.by(role)
            if record.value(role) not in _LOW or by is None or by.file is None or by.line is None:
                continue
            if kind == "weights" or record.value("parameters") not in _LOW:
                found.append((kind, Path(by.file).resolve(), by.line))
    return found


def _candidates(root: Path) -> Iterator[Path]:
    """Short files that may be configurations and name a low precision."""
    count = 0
    for folder, (here, folders, files) in enumerate(os.walk(root)):
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f not in SKIPPED_FOLDERS)
        for name in sorted(files):
            path = Path(here, name)
            if not name.endswith(_SUFFIXES) or not regular(path):
                continue
            try:
                short = path.stat().st_size <= LARGEST
                text = path.read_bytes() if short else b""
            except OSError:  # a link to nowhere, too
                continue
            if _LOW_WORDS.search(text):
                yield path
                count += 1
        if count >= MOST or folder >= MOST_FOLDERS:
            return
