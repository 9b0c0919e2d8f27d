"""What `data.train` and `data.eval` name: files, folders, globs, datasets of the hub, the built-in set. Each becomes one `Source`.

A source is read as often as asked, from any row on, and never held: rows are tokenised as they are read.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

from ..config.sources import HUB, STDLIB, SourceSpec
from ..environment.hub import is_away, not_in_cache
from ..errors import UsageError
from ..wording import counted
from .bad_rows import BadRow, RowError
from .folder import BESIDE_DATA, TRAINED, is_saved, note_splits, without_runs
from .formats import Example, FormatName, refuse_other_than
from .json_rows import read_json
from .read import CODE_ENDINGS, DATA_ENDINGS, ENDINGS, JSON_ENDINGS, NoRows, Record, ending, existing_file, sha256, text_lines
from .source import Source
from .tables import read_csv, read_parquet, without_nulls_inside

PIECE = 1 << 16  # characters of a plain text handed on at once, cut at line ends
_BEGINNING = 1 << 18  # bytes from which the number of rows is estimated
_AS_TEXT = "data.format: text, if it is to be learnt as plain text"
_AS_TEXTS = "name the files by a pattern, as 'src/**/*.py', if they are to be learnt as plain text"


@dataclass
class File:
    """One file of a source, and what its rows are."""

    path: Path
    name: str

    @property
    def is_text(self) -> bool:
        return ending(self.path) not in DATA_ENDINGS

    @cached_property
    def size(self) -> int:
        return self.path.stat().st_size

    @property
    def about_rows(self) -> int:
        """By the length of its first lines; of Parquet as the file says; 0 where a line is no row."""
        kind = ending(self.path)
        if kind == ".parquet":
            import pyarrow.parquet

            return int(pyarrow.parquet.read_metadata(self.path).num_rows)
        if kind == ".json" or self.is_text or self.path.suffix == ".gz":
            return 0
        with self.path.open("rb") as file:
            start = file.read(_BEGINNING)
        return self.size * start.count(b"\n") // len(start) if start else 0

    @property
    def is_blank(self) -> bool:
        """Whether it is without a byte, or a text without a character but white space."""
        return self.size == 0 or (self.is_text and all(line.isspace() for _, line in text_lines(self.path, self.name)))

    def records(self, *, skip: int = 0) -> Iterator[Record]:
        kind = ending(self.path)
        read = read_json if kind in JSON_ENDINGS else read_parquet if kind == ".parquet" else read_csv
        return read(self.path, self.name, skip=skip)

    def pieces(self) -> Iterator[str]:
        """A plain text in pieces, together every character of the file."""
        held: list[str] = []
        size, seen = 0, False
        for _, line in text_lines(self.path, self.name):
            held.append(line)
            size += len(line)
            seen = seen or not line.isspace()
            if size >= PIECE:
                yield "".join(held)
                held, size = [], 0
        if not seen:
            raise UsageError(f"{self.name}: the file holds only white space")
        if held:
            yield "".join(held)


@dataclass
class FileSource(Source):
    """A file, the files of a folder, or those that a pattern matches."""

    files: Sequence[File] = ()

    def __post_init__(self) -> None:
        of = len(self.files)
        kept: list[File] = []
        for file in self.files:
            try:
                kept += [file] if self._takes_format(file) else []
            except RowError as error:
                raise UsageError(error.message, fix=error.fix or self._advice(file)) from None
        if not kept:
            raise NoRows(f"{self.name}: none of its {of} files holds a row")
        if empty := {file.path for file in self.files if file not in kept}:
            named = ", ".join(_some(empty, Path(os.path.commonpath([file.path.parent for file in self.files]))))
            self.notes.append(f"{self.name}: {len(empty)} of {of} files {'holds' if len(empty) == 1 else 'hold'} no rows ({named})")
        self.files = kept

    def _takes_format(self, file: File) -> bool:
        """Notes the format of a file. False for one that holds no rows, where there are others: a part of an export may be empty.
        Raises RowError where none of its first rows has one."""
        alone = len(self.files) == 1
        try:
            if not alone and file.is_blank:
                return False
            if file.is_text:
                if self.only:
                    refuse_other_than(self.only, f"{file.name}: plain text")
                if self.spec.format not in ("auto", "text"):
                    raise UsageError(
                        f"{file.name}: data.format is {self.spec.format}, but a {file.path.suffix} file is plain text: use .jsonl"
                    )
                self.forms.append(("text", f"the ending {file.path.suffix}: plain text, cut into windows of data.max_length"))
            else:
                self.looked_at(file.records(), file.name)
        except NoRows:
            if alone:
                raise
            return False
        return True

    def _advice(self, file: File) -> str | None:
        """What helps where the first rows of a file have no known columns."""
        if len(self.files) > 1:
            return "if it holds no rows, name the files that do; if its columns are others, give it as a source of its own"
        if ending(file.path) in (".csv", ".tsv"):
            return "a table begins with the names of its columns: write prompt and completion above the first row if it has none"
        return None

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def about_rows(self) -> int:
        each = [file.about_rows for file in self.files]
        return min(sum(each), self.spec.limit or sum(each)) if all(each) else super().about_rows

    @cached_property
    def _digest(self) -> str:
        if len(self.files) == 1:
            return sha256(self.files[0].path)
        return hashlib.sha256("".join(f"{sha256(file.path)} {ending(file.path)}\n" for file in self.files).encode()).hexdigest()

    def identity(self) -> dict[str, Any]:
        several = {"files": len(self.files)} if len(self.files) > 1 else {}
        return several | {"bytes": self.bytes, "sha256": self._digest}

    def examples(self, *, skip: int = 0) -> Iterator[Example | BadRow]:
        alone = len(self.files) == 1
        left = self.spec.limit
        if left is not None and alone:
            left -= skip
            if left <= 0:
                return
        tables = [(file, form) for file, (form, _) in zip(self.files, self.forms) if not file.is_text]
        for file, form in tables:
            # of several files, those before the first that is wanted are read through: how many rows they have is not known
            for found in self.checked(file.records(skip=skip if alone else 0), form):
                if skip and not alone:
                    skip -= 1
                else:
                    yield found
                left = None if left is None else left - 1
                if left == 0:
                    return

    def texts(self) -> Iterator[tuple[str, Iterator[str]]]:
        for file in self.files:
            if file.is_text:
                yield file.name, file.pieces()


@dataclass
class StdlibSource(Source):
    """`stdlib`: questions and answers from the docstrings of the Python that runs this."""

    def __post_init__(self) -> None:
        if self.only:
            refuse_other_than(self.only, "data.train: stdlib holds questions with one answer each")
        if self.spec.format not in ("auto", "messages"):
            raise UsageError(f"data.format is {self.spec.format}, but stdlib holds messages: leave it at auto")
        self.forms.append(("messages", "question and answer pairs from the docstrings of the Python that runs this"))

    def identity(self) -> dict[str, Any]:
        from .stdlib import stdlib_pairs

        return {"sha256": hashlib.sha256(json.dumps([(p.question, p.answer) for p in stdlib_pairs()]).encode()).hexdigest()}

    def examples(self, *, skip: int = 0) -> Iterator[Example | BadRow]:
        from .stdlib import stdlib_pairs

        for pair in stdlib_pairs()[skip : self.spec.limit]:
            turns = ({"role": "user", "content": pair.question}, {"role": "assistant", "content": pair.answer})
            yield Example(f"stdlib:{pair.name}", messages=turns)


def refuse_absent(spec: SourceSpec) -> None:
    """Checks a file, folder or glob before a row is read. Raises UsageError."""
    if spec.name != STDLIB and not spec.name.startswith(HUB) and not is_saved(spec.name):
        _files(spec)


def source(spec: SourceSpec, *, needs_answer: bool, only: FormatName | None = None, streaming: bool = False) -> Source:
    """Finds what a name means and looks at its first rows. Raises UsageError naming file, line and key."""
    if spec.name == STDLIB:
        return StdlibSource(spec, needs_answer, only)
    if spec.name.startswith(HUB) or is_saved(spec.name):
        return HubSource(spec, needs_answer, only, streaming=streaming)
    files, notes = _files(spec)
    found = FileSource(spec, needs_answer, only, files=files)
    found.notes += notes
    return found


def refuse_read_twice(found: Sequence[Source]) -> None:
    """Raises  UsageError for a file that two sources of a list lead to"""
    owner: dict[Path, Source] = {}
    for one in found:
        for file in one.files if isinstance(one, FileSource) else ():
            if (other := owner.setdefault(file.path.resolve(), one)) is not one:
                raise UsageError(f"{file.path}: {other.name} and {one.name} both lead to it", fix="name each file once")


def _files(spec: SourceSpec) -> tuple[list[File], list[str]]:
    name = spec.name
    path = Path(name).expanduser()
    named = ending(path)
    endings = (*ENDINGS, named) if named in CODE_ENDINGS or (named and spec.format == "text") else ENDINGS
    if any(mark in name for mark in "*?[") and not path.exists():
        there = [Path(found) for found in sorted(glob.glob(str(path), recursive=True))]
        plain = takewhile(lambda part: not any(mark in part for mark in "*?["), path.parts)
        below = Path(*plain)
        matched, notes = _reached(name, there, below=below)
        if not matched:
            raise UsageError(f"{name}: the pattern matches no file")
        known = [p for p in matched if ending(p) in endings and p.name not in BESIDE_DATA]
        if not known:
            raise UsageError(
                f"{name}: none of the {len(matched)} files it matches ends in {', '.join(ENDINGS)}", fix=_AS_TEXT if named else None
            )
    elif path.is_dir():
        there = sorted(p for p in path.rglob("*") if not any(part.startswith(".") for part in p.relative_to(path).parts))
        below = path
        matched, notes = _reached(name, there, below=below)
        known = [p for p in matched if ending(p) in ENDINGS and p.name not in BESIDE_DATA]
        if not known:
            raise UsageError(f"{name}: a folder without a file that ends in {', '.join(ENDINGS)}", fix=_AS_TEXTS)
        data = [p for p in known if ending(p) in DATA_ENDINGS]
        known = data or known  # a README beside the data is no data
    else:
        return [File(existing_file(name, endings, otherwise=_AS_TEXT if named else None), name)], []
    left_out = len(matched) - len(known)
    if left_out:
        these = ", ".join(_some(set(matched) - set(known), below))
        notes.append(f"{name}: {left_out} of {counted(len(matched), 'file')} {'is' if left_out == 1 else 'are'} not read ({these})")
    notes += note_splits(name, known, below)
    return [File(existing_file(str(p), endings, empty=len(known) > 1), str(p)) for p in known], notes


def _reached(name: str, found: Sequence[Path], *, below: Path) -> tuple[list[Path], list[str]]:
    """The files among the names found, in their order, each once, without those of runs, and notes on what is left out.

    below  where the search began
    """
    found, runs = without_runs(found, below)
    links = [path for path in found if path.is_symlink() and ending(path) in ENDINGS]
    if broken := next((path for path in links if not path.exists()), None):
        raise UsageError(f"{broken}: a link to {broken.readlink()}, which does not exist", fix="restore that file, or remove the link")
    files = [path for path in found if path.is_file()]
    once = list({path.resolve(): path for path in reversed(files)}.values())[::-1]
    return once, [f"{name}: the files of runs are not read ({', '.join(_some(set(runs), below))})"] if runs else []


def _some(paths: set[Path], below: Path, most: int = 3) -> list[str]:
    """A few of the paths, as they are below a folder."""
    names = sorted(str(p.relative_to(below)) if p.is_relative_to(below) else str(p) for p in paths)
    return names[:most] + (["..."] if len(names) > most else [])


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

    @property
    def about_rows(self) -> int:
        return super().about_rows if self.streaming else min(len(self.rows), self.spec.limit or len(self.rows))

    def identity(self) -> dict[str, Any]:
        if self.streaming:
            return {"split": self.spec.split, "revision": self.spec.revision}
        # a fingerprint is a hash of the files it was made from and of every step since
        return {"split": self.spec.split, "fingerprint": self.rows._fingerprint, "bytes": self.bytes}

    def examples(self, *, skip: int = 0) -> Iterator[Example | BadRow]:
        return self.checked(self._records(skip), self.forms[0][0])

    def _records(self, skip: int = 0) -> Iterator[Record]:
        import datasets

        rows = self.rows.skip(skip) if skip else self.rows
        limit = self.spec.limit
        number = skip
        try:
            for value in rows:
                if limit is not None and number >= limit:
                    return
                number += 1
                yield Record(self.name, number, without_nulls_inside(value), "row")
        except UsageError:
            raise
        except (OSError, ValueError, OverflowError, datasets.exceptions.DatasetsError) as error:
            raise UsageError(f"{self.name}, row {number + 1}: {_first_line(error)}") from error


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
