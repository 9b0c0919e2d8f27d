"""CSV, TSV and Parquet: rows as objects, and what is broken with its line or row."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from isotype.data.json_rows import read_json
from isotype.data.tables import read_csv, read_parquet
from isotype.errors import UsageError


def written(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_cells_may_hold_delimiters_quotes_and_lines(tmp_path: Path) -> None:
    path = written(tmp_path, "a.csv", '\ufeffprompt,completion\n"a, ""b""\nc",d\n\ne,f\n')
    first, second = read_csv(path, "a.csv")
    assert (first.place, first.value) == ("a.csv:2", {"prompt": 'a, "b"\nc', "completion": "d"})
    assert (second.place, second.value) == ("a.csv:5", {"prompt": "e", "completion": "f"})
    assert [r.value["prompt"] for r in read_csv(path, "a.csv", skip=1)] == ["e"]


@pytest.mark.parametrize(
    ("name", "content", "wanted"),
    [
        ("a.csv", '\ufeffprompt;"comple\ntion"\r\nq;a\r\n', [(3, {"prompt": "q", "comple tion": "a"})]),
        ("a.tsv", "prompt\tcompletion\na, b\tc\n", [(2, {"prompt": "a, b", "completion": "c"})]),
        ("a.csv", "prompt;completion\na, b;c\n", [(2, {"prompt": "a, b", "completion": "c"})]),
        ("a.csv", "prompt|completion\na, b|c\n", [(2, {"prompt": "a, b", "completion": "c"})]),
        ("a.csv", " question , answer,,\na,b,,\nc,d,,kept to be told\n",
         [(2, {"question": "a", "answer": "b"}), (3, {"question": "c", "answer": "d", "": "kept to be told"})]),
        ("a.csv", "p;c\n1;2\n;\n ; \n3;4\n;;\n", [(2, {"p": "1", "c": "2"}), (5, {"p": "3", "c": "4"})]),
    ],
    ids=["two lines of a name", "tab", "semicolon", "bar", "columns without a name", "empty rows"],
)  # fmt: skip
def test_tables_as_people_save_them(tmp_path: Path, name: str, content: str, wanted: Any) -> None:
    assert [(row.line, row.value) for row in read_csv(written(tmp_path, name, content), name)] == wanted


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("a,b\n1,2\n1,2,3\n", "x.csv:3: 3 cells, more than the header's 2; quote a cell"),
        ('a,b\n"1\n1",2\n1\n', "x.csv:4: 1 cells, fewer than the header's 2"),
        ('a,b\n1,2\n"1,2\n', "x.csv:3: a quote opens a cell and is not closed"),
        ('a,b\n1,2\n"1"x,2\n', "x.csv:3: broken CSV: ',' expected after '\"'"),
        ("a,a\n1,2\n", "x.csv:1: the column 'a' is named twice"),
        (b"a,b\n1,caf\xe9\n", "x.csv:2: byte 9 (0xe9) is not UTF-8"),
        ("a,b\n1,\0\n", "x.csv:2: byte 6 is zero, which is no text"),
    ],
)
def test_broken_csv_names_its_line(tmp_path: Path, content: str | bytes, said: str) -> None:
    path = written(tmp_path, "x.csv", content)
    try:
        rows = list(read_csv(path, "x.csv"))
        assert [f"{row.place}: {row.wrong}".startswith(said) for row in rows if row.wrong] == [True]
    except UsageError as error:
        assert str(error).startswith(said)


def test_rows_after_a_broken_one_are_read(tmp_path: Path) -> None:
    path = written(tmp_path, "x.csv", b'a,b\n1,2\n"1"x,2\n3,caf\xe9\n4\n5,6\n')
    rows = list(read_csv(path, "x.csv"))
    assert [(row.line, row.value) for row in rows] == [
        (2, {"a": "1", "b": "2"}),
        (3, None),
        (4, None),
        (5, None),
        (6, {"a": "5", "b": "6"}),
    ]
    assert [row.line for row in read_csv(path, "x.csv", skip=2)] == [4, 5, 6]


def test_parquet_rows_have_no_nulls_inside(tmp_path: Path) -> None:
    rows: list[Any] = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}], "note": None}
    ] * 5
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=2)
    found = list(read_parquet(tmp_path / "a.parquet", "a.parquet"))
    assert [r.place for r in found] == [f"a.parquet, row {n}" for n in range(1, 6)]
    assert found[0].value == rows[0]
    assert [r.line for r in read_parquet(tmp_path / "a.parquet", "a.parquet", skip=3)] == [4, 5]


def test_broken_parquet_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["words"] * 500}), tmp_path / "a.parquet")
    whole = (tmp_path / "a.parquet").read_bytes()
    for content in (whole[: len(whole) // 2], b"PAR1" + b"\0" * 40, whole[:30] + b"\xff" * 60 + whole[90:]):
        path = written(tmp_path, "b.parquet", content)
        with pytest.raises(UsageError, match=r"b\.parquet, row \d+: broken Parquet"):
            list(read_parquet(path, "b.parquet"))


def test_gzip_is_read(tmp_path: Path) -> None:
    path = written(tmp_path, "a.jsonl.gz", gzip.compress(b'{"text": "a"}\n{"text": "b"}\n' * 200))
    assert len(list(read_json(path, "a.jsonl.gz"))) == 400
