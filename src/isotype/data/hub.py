"""Datasets of the hub, and local ones that the `datasets` library wrote or can read. The library is imported when one is named."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config.sources import HUB
from ..environment.hub import is_away, not_in_cache
from ..errors import UsageError
from .bad_rows import BadRow
from .folder import TRAINED, is_saved
from .formats import Example
from .progress import Meter
from .read import Record
from .source import Source
from .tables import without_nulls_inside


@dataclass
class HubSource(Source):
    """`hf:org/name`, `hf:./folder`, or a folder of `save_to_disk`.

    streaming  rows come over the network as they are needed
    """

    streaming: bool = False

    def __post_init__(self) -> None:
        self.rows: Any = _load(self)
        self.looked_at(self._records(), self.name)

    @property
    def bytes(self) -> int:
        return 0 if self.streaming else int(self.rows.data.nbytes)

    def identity(self) -> dict[str, Any]:
        if self.streaming:
            return {"split": self.spec.split, "revision": self.spec.revision}
        # a fingerprint is a hash of the files it was made from and of every step since
        return {"split": self.spec.split, "fingerprint": self.rows._fingerprint, "bytes": self.bytes}

    def examples(self, *, skip: int = 0, meter: Meter | None = None) -> Iterator[Example | BadRow]:
        return self.checked(self._records(skip, meter), self.forms[0][0])

    def _records(self, skip: int = 0, meter: Meter | None = None) -> Iterator[Record]:
        import datasets

        rows = self.rows.skip(skip) if skip else self.rows
        limit = self.spec.limit
        total = None if self.streaming else max(1, len(self.rows))
        size = self.bytes
        number = skip
        try:
            for value in rows:
                if limit is not None and number >= limit:
                    self.more = True
                    return
                number += 1
                if meter is not None and total:
                    meter.done += size // total
                yield Record(self.name, number, without_nulls_inside(value), "row")
        except UsageError:
            raise
        except (OSError, ValueError, OverflowError, datasets.exceptions.DatasetsError) as error:
            fix = "leave out the column that holds it, or give the Parquet files" if isinstance(error, OverflowError) else None
            raise UsageError(f"{self.name}, row {number + 1}: {_first_line(error)}", fix=fix) from error


def _load(source: HubSource) -> Any:
    """The split of a dataset. Turns every error of the library into a UsageError of one line."""
    import datasets

    spec = source.spec
    name = spec.name.removeprefix(HUB)
    saved = Path(name).expanduser()
    if sys.stderr is None or not sys.stderr.isatty():  # where its bars are a line for each change
        datasets.disable_progress_bars()
    away = not saved.exists() and is_away()
    try:
        if is_saved(saved):
            found = datasets.load_from_disk(str(saved))
            if isinstance(found, datasets.DatasetDict):
                if spec.split not in found:
                    meant = next((split for split in found if split.casefold() in TRAINED), next(iter(found)))
                    fix = f"name one, in data.train or data.eval: [{{name: {spec.name}, split: {meant}}}]"
                    raise UsageError(f"{spec.name}: no split {spec.split!r}: there are {', '.join(found)}", fix=fix)
                found = found[spec.split]
            return found.to_iterable_dataset() if source.streaming else found
        return datasets.load_dataset(
            str(saved) if saved.is_dir() else name, spec.subset, split=spec.split, revision=spec.revision, streaming=source.streaming
        )
    except UsageError:
        raise
    except (OSError, ValueError, TypeError, KeyError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        if away and isinstance(error, ConnectionError):
            raise not_in_cache(spec.name, "local files") from error
        raise UsageError(f"{spec.name}: {_first_line(error)}", fix=_fix(error, name)) from error


def _fix(error: BaseException, name: str) -> str | None:
    text = f"{type(error).__name__} {error}".lower()
    if "gated" in text:
        return f"accept its terms at huggingface.co/datasets/{name}, then: hf auth login"
    if "couldn't reach" in text or "connection" in text:
        return "the hub cannot be reached: check the network, or give local files"
    if "config" in text and "missing" in text:
        return "name one: {name: hf:..., subset: ...}"
    if "notfound" in text or "doesn't exist" in text:
        return "check the name; for a private one: hf auth login"
    return None


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
