"""Opens the sources that `data.train` and `data.eval` name. A source is a file, a folder, a glob
pattern, a dataset on the hub, the built-in data set `stdlib`, or rows in memory. Each becomes a
`Source` object.

A source can be read several times, beginning at any row. The rows of a source are not kept in
memory, because they are tokenised while they are read.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from ..config.sources import HUB_PREFIX, STDLIB, SourceSpec
from ..environment.hub import cache_miss_error, is_unreachable
from ..environment.private_folder import NotPrivateError, make_private_folder, temporary_folder
from ..errors import UsageError
from ..wording import first_line
from .bad_rows import BadRow, RowError
from .files import TRAIN_SPLITS, File, find_files, is_saved_dataset, summarise_paths
from .formats import (
    Example,
    check_example,
    detect_format,
    ignored_keys,
    refuse_other_format,
)
from .read import NoRows, Record, file_suffix, is_prose, looks_like_json, sha256
from .records import read_records, remove_inner_nulls
from .row_keys import FormatName
from .stdlib import stdlib_pairs

# number of first rows among which the first valid row decides the format. The number is large
# because in a log of user feedback (format `labelled`) most rows have no label
_SAMPLED_ROWS = 1000


@dataclass
class Source:
    """One entry of data.train or data.eval. When the object is created, only the first rows are
    read, to detect the format.

    spec              the entry of the configuration
    needs_answer      whether every row needs an answer, because the loss is computed on answers
                      only
    objective_format  the only format that the objective learns from, or None
    detected_formats  the detected format of each file, and how it was recognised
    ignored           the keys that are not used, with the number of rows that have them. The rows
                      are counted while they are read
    notes             remarks for the user
    """

    spec: SourceSpec
    needs_answer: bool
    objective_format: FormatName | None = None
    detected_formats: list[tuple[FormatName, str]] = field(default_factory=list)
    ignored: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def formats(self) -> set[FormatName]:
        return {format_name for format_name, _ in self.detected_formats}

    @property
    def bytes(self) -> int:
        """The size of the files; 0 if it is unknown."""
        return 0

    @property
    def estimated_rows(self) -> int:
        """The estimated number of rows, for the progress display; 0 if it is unknown."""
        return self.spec.limit or 0

    def identity(self) -> dict[str, Any]:
        """Returns values that identify the content of the source, such as its `sha256`. These
        values are stored in data.json, and are part of the key of the source's cache entry.
        """
        raise NotImplementedError

    def examples(self, *, skip: int = 0) -> Iterator[Example | BadRow]:
        """Checks the rows and yields them, at most `limit`. For a row that cannot be used, it
        yields a `BadRow`. The first `skip` rows are skipped.
        """
        raise NotImplementedError

    def texts(self) -> Iterator[tuple[str, Iterator[str]]]:
        """Yields the name and the text of each plain text file. The text is given in pieces."""
        return iter(())

    def facts(self) -> dict[str, Any]:
        """Returns the source's entry in data.json, without the counts of its rows."""
        weight = {} if self.spec.weight is None else {"weight": self.spec.weight}
        format_facts = {
            "format": ", ".join(sorted(self.formats)),
            "why": self.detected_formats[0][1],
        }
        return {"path": self.name, **weight, **self.identity(), **format_facts}

    def check_records(
        self, records: Iterator[Record], row_format: FormatName
    ) -> Iterator[Example | BadRow]:
        columns = self.spec.columns
        roles = self.spec.roles
        for record in records:
            try:
                checked = check_example(
                    record,
                    row_format,
                    needs_answer=self.needs_answer,
                    columns=columns,
                    roles=roles,
                )
            except RowError as error:
                yield BadRow.from_error(error, record.location)
                continue
            self.ignored.update(ignored_keys(record.value, row_format, columns, roles))
            yield checked

    def detect_row_format(self, records: Iterator[Record], name: str) -> None:
        """Adds the format of the first valid row to `detected_formats`. Raises RowError if none of
        the first rows is valid, and NoRows if there is no row.
        """
        first_error: RowError | None = None
        for record in islice(records, _SAMPLED_ROWS):
            try:
                requested: Any = self.spec.format  # config.sources checked it
                self.detected_formats.append(
                    detect_format(
                        record,
                        requested,
                        self.spec.columns,
                        roles=self.spec.roles,
                        objective_format=self.objective_format,
                    )
                )
            # another row may be valid; if none is, the error of the first row is raised
            except RowError as error:
                first_error = first_error or error
                continue
            return
        raise first_error or NoRows(f"{name}: the file holds no rows")


@dataclass
class FileSource(Source):
    """A file, the files of a folder, or the files that match a pattern. Among several files, those
    without rows are skipped, because a part of an export may be empty.
    """

    files: Sequence[File] = ()

    def __post_init__(self) -> None:
        all_files = self.files
        self.files = [
            file
            for file in all_files
            if self._detect_file_format(file, is_only_file=len(all_files) == 1)
        ]
        if not self.files:
            raise NoRows(f"{self.name}: none of its {len(all_files)} files holds a row")
        if empty := {file.path for file in all_files if file not in self.files}:
            summary = summarise_paths(
                empty, Path(os.path.commonpath([file.path.parent for file in all_files]))
            )
            verb = "holds" if len(empty) == 1 else "hold"
            self.notes.append(
                f"{self.name}: {len(empty)} of {len(all_files)} files {verb} no rows ({summary})"
            )

    def _detect_file_format(self, file: File, *, is_only_file: bool) -> bool:
        """Adds the format of a file to `detected_formats` and returns True. Returns False for a
        file without rows if it is not the only file. Raises UsageError if none of its first
        rows is valid.
        """
        try:
            if not is_only_file and file.is_blank:
                return False
            if file.is_text:
                self._check_text_file(file)
            else:
                self.detect_row_format(read_records(file.path, file.name), file.name)
        except NoRows:
            if is_only_file:
                raise
            return False
        except RowError as error:
            fix = error.fix
            if not fix and not is_only_file:
                fix = (
                    "if it holds no rows, name the files that do; if its columns are others, give"
                    " it as a source of its own"
                )
            elif not fix and file_suffix(file.path) in (".csv", ".tsv"):
                fix = (
                    "a table begins with the names of its columns: write prompt and completion"
                    " above the first row if it has none"
                )
            raise UsageError(error.message, fix=fix) from None
        return True

    def _check_text_file(self, file: File) -> None:
        is_requested = self.spec.format == "text"
        if not is_requested and is_prose(file.path) and looks_like_json(file.path, file.name):
            raise UsageError(
                f"{file.name}: a {file_suffix(file.path)} file is plain text, and this one holds JSON:"
                " its keys and brackets would be learnt",
                fix=(
                    "name it .jsonl (a row a line) or .json to learn its rows; data.format: text"
                    " learns it as it is"
                ),
            )
        if self.objective_format:
            refuse_other_format(self.objective_format, f"{file.name}: plain text")
        if self.spec.format not in ("auto", "text"):
            raise UsageError(
                f"{file.name}: data.format is {self.spec.format}, but a {file.path.suffix} file is"
                " plain text: use .jsonl"
            )
        self.detected_formats.append(
            (
                "text",
                f"the ending {file.path.suffix}: plain text, cut into windows of data.max_length",
            )
        )

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def estimated_rows(self) -> int:
        row_counts = [file.estimated_rows for file in self.files]
        if all(row_counts):
            return min(sum(row_counts), self.spec.limit or sum(row_counts))
        return super().estimated_rows

    @cached_property
    def _digest(self) -> str:
        if len(self.files) == 1:
            return sha256(self.files[0].path)
        return hashlib.sha256(
            "".join(
                f"{sha256(file.path)} {file_suffix(file.path)}\n" for file in self.files
            ).encode()
        ).hexdigest()

    def identity(self) -> dict[str, Any]:
        file_count = {"files": len(self.files)} if len(self.files) > 1 else {}
        return file_count | {"bytes": self.bytes, "sha256": self._digest}

    def examples(self, *, skip: int = 0) -> Iterator[Example | BadRow]:
        # with several files `islice` below reads and drops the skipped rows, because the number of
        # rows of each file is unknown
        skipped = skip if len(self.files) == 1 else 0
        examples = (
            example
            for file, (row_format, _) in zip(self.files, self.detected_formats)
            if not file.is_text
            for example in self.check_records(
                read_records(file.path, file.name, skip=skipped), row_format
            )
        )
        end = None if self.spec.limit is None else max(0, self.spec.limit - skipped)
        yield from islice(examples, skip - skipped, end)

    def texts(self) -> Iterator[tuple[str, Iterator[str]]]:
        return ((file.name, file.text_pieces()) for file in self.files if file.is_text)


@dataclass
class StdlibSource(Source):
    """The source `stdlib`. This data set contains questions and answers from the docstrings of
    Python's standard library.
    """

    def __post_init__(self) -> None:
        if self.objective_format:
            refuse_other_format(
                self.objective_format, "data.train: stdlib holds questions with one answer each"
            )
        if self.spec.format not in ("auto", "messages"):
            raise UsageError(
                f"data.format is {self.spec.format}, but stdlib holds messages: leave it at auto"
            )
        self.detected_formats.append(
            (
                "messages",
                "question and answer pairs from the docstrings of the Python that runs this",
            )
        )

    def identity(self) -> dict[str, Any]:
        return {
            "sha256": (
                hashlib.sha256(
                    json.dumps([(pair.question, pair.answer) for pair in stdlib_pairs()]).encode()
                ).hexdigest()
            )
        }

    def examples(self, *, skip: int = 0) -> Iterator[Example | BadRow]:
        for pair in stdlib_pairs()[skip : self.spec.limit]:
            turns = (
                {"role": "user", "content": pair.question},
                {"role": "assistant", "content": pair.answer},
            )
            yield Example(f"stdlib:{pair.name}", messages=turns)


@dataclass
class HubSource(Source):
    """A dataset on the hub (`hf:org/name`), a dataset in a folder (`hf:./folder`), or a folder that
    `save_to_disk` wrote.

    streaming  whether rows are downloaded only when they are used
    """

    streaming: bool = False

    def __post_init__(self) -> None:
        self.rows: Any = _load_dataset(self)
        self.detect_row_format(self._records(), self.name)

    @property
    def bytes(self) -> int:
        return 0 if self.streaming else int(self.rows.data.nbytes)

    @property
    def estimated_rows(self) -> int:
        if self.streaming:
            return super().estimated_rows
        return min(len(self.rows), self.spec.limit or len(self.rows))

    def identity(self) -> dict[str, Any]:
        if self.streaming:
            return {"split": self.spec.split, "revision": self.spec.revision}
        # the fingerprint is a hash of the files of the dataset and of all processing steps
        return {
            "split": self.spec.split,
            "fingerprint": self.rows._fingerprint,
            "bytes": self.bytes,
        }

    def examples(self, *, skip: int = 0) -> Iterator[Example | BadRow]:
        return self.check_records(self._records(skip), self.detected_formats[0][0])

    def _records(self, skip: int = 0) -> Iterator[Record]:
        import datasets

        number = skip
        try:
            for value in islice(
                self.rows.skip(skip) if skip else self.rows,
                self.spec.limit and max(0, self.spec.limit - skip),
            ):
                number += 1
                yield Record(self.name, number, remove_inner_nulls(value), "row")
        except UsageError:
            raise
        except (OSError, ValueError, OverflowError, datasets.exceptions.DatasetsError) as error:
            raise UsageError(f"{self.name}, row {number + 1}: {first_line(error)}") from error


def _load_dataset(source: HubSource) -> Any:
    """Loads one split of a dataset. Every error of `datasets` becomes a UsageError with a message
    of one line.
    """
    import datasets

    spec = source.spec
    name = spec.name.removeprefix(HUB_PREFIX)
    folder = Path(name).expanduser()
    # without a terminal each update of a progress bar would be a line
    if sys.stderr is None or not sys.stderr.isatty():
        datasets.disable_progress_bars()
    is_offline = not folder.exists() and is_unreachable()
    try:
        if is_saved_dataset(folder):
            dataset = datasets.load_from_disk(str(folder))
            if isinstance(dataset, datasets.DatasetDict):
                if spec.split not in dataset:
                    suggestion = next(
                        (split for split in dataset if split.casefold() in TRAIN_SPLITS),
                        next(iter(dataset)),
                    )
                    fix = (
                        f"name one, in data.train or data.eval: [{{name: {spec.name}, split:"
                        f" {suggestion}}}]"
                    )
                    raise UsageError(
                        f"{spec.name}: no split {spec.split!r}: there are {', '.join(dataset)}",
                        fix=fix,
                    )
                dataset = dataset[spec.split]
            if source.streaming:
                return dataset.to_iterable_dataset()
            return dataset
        return datasets.load_dataset(
            str(folder) if folder.is_dir() else name,
            spec.subset,
            split=spec.split,
            revision=spec.revision,
            streaming=source.streaming,
        )
    except UsageError:
        raise
    except (
        OSError,
        ValueError,
        TypeError,
        KeyError,
        RuntimeError,
        datasets.exceptions.DatasetsError,
    ) as error:
        if is_offline and isinstance(error, ConnectionError):
            raise cache_miss_error(spec.name, "local files") from error
        raise UsageError(
            f"{spec.name}: {first_line(error)}", fix=_load_error_fix(error, name)
        ) from error


def _load_error_fix(error: BaseException, name: str) -> str | None:
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


def require_source(spec: SourceSpec) -> None:
    """Checks that the files of a source exist, without reading rows. Raises UsageError."""
    if (
        spec.name != STDLIB
        and not spec.name.startswith(HUB_PREFIX)
        and not is_saved_dataset(spec.name)
    ):
        find_files(spec)


def open_source(
    spec: SourceSpec,
    *,
    needs_answer: bool,
    objective_format: FormatName | None = None,
    streaming: bool = False,
) -> Source:
    """Opens a source, and reads its first rows to detect the format. Raises UsageError with file,
    line and key.
    """
    if spec.name == STDLIB:
        return StdlibSource(spec, needs_answer, objective_format)
    if spec.name.startswith(HUB_PREFIX) or is_saved_dataset(spec.name):
        return HubSource(spec, needs_answer, objective_format, streaming=streaming)
    files, notes = find_files(spec)
    source = FileSource(spec, needs_answer, objective_format, files=files)
    source.notes += notes
    return source


def refuse_duplicate_files(sources: Sequence[Source]) -> None:
    """Raises UsageError for a file that belongs to two sources of a list."""
    owner: dict[Path, Source] = {}
    for source in sources:
        for file in source.files if isinstance(source, FileSource) else ():
            if (first := owner.setdefault(file.path.resolve(), source)) is not source:
                raise UsageError(
                    f"{file.path}: {first.name} and {source.name} both lead to it",
                    fix="name each file once",
                )


def save_rows(data: Any) -> Any:
    """Writes rows in memory to a file and returns the file's name. If `data` is a name or a mapping
    of names, it is returned unchanged.

    The file is written to the cache's folder, so that the run can be resumed. Its name is a hash of
    its content.

    data    rows as a list, a `datasets.Dataset`, a pandas or polars frame; or a mapping from the
            names of evaluation sets to such rows
    Raises  UsageError for rows that are not JSON, and if the file cannot be written
    """
    from .cache import cache_folder

    if isinstance(data, Mapping) and "name" not in data:
        return {name: save_rows(value) for name, value in data.items()}
    rows = _collect_rows(data)
    if rows is None:
        return data
    if not rows:
        raise UsageError("data: there is no row in it")
    try:
        text = "".join(
            json.dumps(row, ensure_ascii=False, default=_json_value) + "\n" for row in rows
        ).encode("utf-8", "surrogatepass")
    except (TypeError, ValueError) as error:
        raise UsageError(f"data: a row cannot be written as JSON: {error}") from None
    token_folder = cache_folder("auto")
    folder = (temporary_folder() if token_folder is None else token_folder.parent) / "rows"
    file = folder / f"{hashlib.sha256(text).hexdigest()[:32]}.jsonl"
    try:
        if (
            token_folder is None
        ):  # in the system's temporary folder another user may have created it
            make_private_folder(folder.parent)
            make_private_folder(folder)
        folder.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder)
        with os.fdopen(handle, "wb") as output:
            output.write(text)
        Path(temporary).replace(file)
    except (OSError, NotPrivateError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(
            f"{folder}: cannot be written: {reason}",
            fix="write the rows to a file, and give its name",
        ) from None
    return str(file)


def _collect_rows(data: Any) -> list[Any] | None:
    """Returns the rows of a list, a data set or a data frame as mappings. Returns None for other
    values.
    """
    if isinstance(data, list):
        if all(isinstance(row, Mapping) and "name" not in row for row in data):
            return data
        return None
    if hasattr(data, "to_dicts"):  # polars
        return list(data.to_dicts())
    if hasattr(data, "to_list") and hasattr(data, "column_names"):  # datasets
        return list(data.to_list())
    # pandas; its empty cells are NaN, NaT or NA
    if hasattr(data, "to_dict") and hasattr(data, "columns"):
        filled = data.astype(object).where(data.notna(), None)
        return list(filled.to_dict("records"))
    return None


def _json_value(value: Any) -> Any:
    """Converts a value to one that JSON can represent. Arrays become lists. Pictures and times
    become text.
    """
    from .pictures import encode_picture

    if (picture := encode_picture(value)) is not None:
        return picture
    return value.tolist() if hasattr(value, "tolist") else str(value)
