"""The file beside a name that is not there which was probably meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher, get_close_matches
from pathlib import Path


def near_file(name: str, there: Iterable[str]) -> str | None:
    """The name most like `name`, if the two are alike without their endings: `a.jsonl` is not like `b.jsonl`."""
    asked, stems = name.casefold(), {other: _stem(other.casefold()) for other in there}
    close = set(get_close_matches(_stem(asked), set(stems.values()), n=len(stems) or 1))
    alike = [other for other, stem in stems.items() if stem in close]
    return max(alike, key=lambda other: SequenceMatcher(None, asked, other.casefold()).ratio(), default=None)


def _stem(name: str) -> str:
    """`a` of `a.jsonl` and of `a.jsonl.gz`."""
    path = Path(name)
    return Path(path.stem).stem if path.suffix == ".gz" else path.stem
