"""What a wrong file is told helps: the fix works for this file."""

from __future__ import annotations

import gzip
import io
import json
import os
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from isotype.config.schema import DataSection
from isotype.data.load import load_data
from isotype.errors import UsageError


def error_of(
    folder: Path, families: SimpleNamespace, file: str, content: str | bytes, **section: Any
) -> str:
    path = folder / file
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UsageError) as caught:
        load_data(DataSection(train=str(path), **section), families.of("chatml"), seed=0)
    return f"{caught.value.message}\n{caught.value.fix}"


def lines(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def zipped(name: str, content: str) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr(name, content)
    return packed.getvalue()


ROW = lines({"prompt": "q", "completion": "a"})


OTHER_KINDS: list[tuple[str, str | bytes, str]] = [
    (
        "x.jsonl",
        gzip.compress(ROW.encode()),
        "x.jsonl: the file is compressed with gzip, and no text\nmv {x.jsonl} {x.jsonl.gz}, and",
    ),
    (
        "x.jsonl",
        zipped("x.jsonl", ROW),
        "x.jsonl: the file is a zip archive, as a spreadsheet (.xlsx) is too, and no text\nunpack it, or",
    ),
    (
        "x.jsonl",
        b"PAR1\x15\x04" + bytes(40),
        "x.jsonl: the file is Parquet, and no text\nmv {x.jsonl} {x.jsonl.parquet}",
    ),
    (
        "x.jsonl",
        ROW.encode() + b'{"prompt": "\0q"}\n',
        "is zero, which is no text: cat {x.jsonl} | tr -d '\\000' > no_zeros.jsonl",
    ),
    (
        "x.jsonl.gz",
        gzip.compress(ROW.encode() * 99)[:-12],
        "ended before the end-of-stream marker was reached\ncopy or download the file",
    ),
    (
        "x.jsonl.gz",
        ROW,
        "Not a gzipped file (b'{\"')\nif it is not compressed: mv {x.jsonl.gz} {x.jsonl}, and give that name",
    ),
]


def test_a_file_of_another_kind_than_its_name_says_is_told_what_it_is_and_what_helps(
    tmp_path: Path, families: SimpleNamespace
) -> None:
    for file, content, told in OTHER_KINDS:
        for name in (f"{file}.gz", f"{file}.parquet", file, file.removesuffix(".gz")):
            told = told.replace("{" + name + "}", str(tmp_path / name))
        said = error_of(tmp_path, families, file, content)
        assert told in said
        assert said.count("\n") == 1


ROWS = [{"prompt": f"q{i}", "completion": f"a{i}"} for i in range(3)]


NEARLY: list[tuple[str, str | bytes, str]] = [
    (
        "x.jsonl",
        "".join(json.dumps(row) + ",\n" for row in ROWS),
        "a row has no comma behind it where each line is a row",
    ),
    (
        "x.jsonl",
        "".join(f"{row}\n" for row in ROWS),
        "Python's own notation is no JSON: json.dumps writes it",
    ),
    (
        "x.jsonl",
        json.dumps(ROWS[0]) + json.dumps(ROWS[1]),
        "Extra data; each line holds one object",
    ),
    ("x.jsonl", json.dumps(ROWS), "got a list; a file that is one array is named .json"),
    (
        "x.jsonl",
        "[\n" + json.dumps(ROWS)[1:],
        "or objects over several lines, are read from a file named .json",
    ),
    (
        "x.jsonl",
        json.dumps(ROWS[0], indent=1),
        "or objects over several lines, are read from a file named .json",
    ),
    (
        "x.csv",
        "How much?,One\nHow many?,Two\n",
        "write prompt and completion above the first row if it has none",
    ),
    ("x.csv", "prompt,completion\nq,\u201ca\u201d\n".encode("cp1252"), "iconv -f CP1252 -t UTF-8"),
]


def test_what_is_nearly_json_or_a_table_is_told_what_to_change(
    tmp_path: Path, families: SimpleNamespace
) -> None:
    for file, content, told in NEARLY:
        assert told in error_of(tmp_path, families, file, content)


COLUMNS: list[tuple[dict[str, Any], dict[str, str]]] = [
    (
        {"query": "q", "response": "a", "history": [["b", "c"]], "system": "s"},
        {"instruction": "query", "output": "response"},
    ),
    (
        {"question": "q", "answer": "a", "context": "c"},
        {"instruction": "question", "output": "answer", "input": "context"},
    ),
    (
        {"Question": "q", "Answer ": "a", "Context": "c"},
        {"instruction": "Question", "output": "Answer ", "input": "Context"},
    ),
]


def test_the_columns_advised_read_all_that_a_row_has(
    tmp_path: Path, families: SimpleNamespace
) -> None:
    for row, columns in COLUMNS:
        said = error_of(tmp_path, families, "x.jsonl", lines(row))
        assert yaml.safe_load(said[said.index("{") : said.index("}") + 1]) == columns
        found = load_data(
            DataSection(train=str(tmp_path / "x.jsonl"), columns=columns, eval_split=0),
            families.of("chatml"),
            seed=0,
        )
        assert not [note for note in found.facts["notes"] if "is not read" in note]


NAMES = {
    "s3://bucket/x.jsonl": "download it first",
    "a.jsonl,b.jsonl": "data.train=[a.jsonl, b.jsonl]",
    "-": "write it to a file first",
    "A.JSONL": "did you mean a.jsonl?",
    "a.json": "did you mean a.jsonl?",
    # as long an ending as theirs is no likeness
    "gone.jsonl": "gone.jsonl: no such file\nrelative names begin in",
    "c.tar.gz": "unpack it, and give the file that comes out",
    "c.xlsx": "c.xlsx: the ending .xlsx says no known format; use one of .jsonl, ",
    "c.pkl": "a pickle can run code and is not opened",
    "pipe.jsonl": "a run reads its data more than once",
    "n" * 300: "no such file",  # a name longer than a file name may be
}


def test_a_name_that_is_no_file_of_a_known_format_is_told_what_to_do(
    tmp_path: Path, families: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for there in ("a.jsonl", "b.jsonl", "a.jsonl.zst", "c.tar.gz", "c.xlsx", "c.pkl"):
        (tmp_path / there).write_text(ROW)
    os.mkfifo(tmp_path / "pipe.jsonl")
    for name, told in NAMES.items():
        with pytest.raises(UsageError) as caught:
            load_data(DataSection(train=name), families.of("chatml"), seed=0)
        assert told in f"{caught.value.message}\n{caught.value.fix}"
