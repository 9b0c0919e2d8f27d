"""Rows of JSON, CSV, TSV and Parquet files as records, and what is broken with its line or row."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.api import read_csv, read_json, read_parquet, records

from isotype.errors import UsageError

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
# a half of a surrogate pair is refused by itself
ROWS = st.lists(VALUES, max_size=6).filter(lambda rows: "\\ud" not in json.dumps(rows))


def written(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def rows_of(folder: Path, text: str | bytes) -> list[tuple[int, Any]]:
    return [
        (record.line, record.value)
        for record in read_json(written(folder, "a.json", text), "a.json")
    ]


@pytest.mark.full
@settings(max_examples=60, deadline=None)
@given(rows=ROWS, indent=st.sampled_from([None, 0, 2]), ascii_only=st.booleans())
def test_rows_are_those_that_were_written(tmp_path_factory, rows, indent, ascii_only):
    found = rows_of(
        tmp_path_factory.mktemp("rows"), json.dumps(rows, indent=indent, ensure_ascii=ascii_only)
    )
    assert [value for _, value in found] == rows
    assert [line for line, _ in found] == sorted(line for line, _ in found)


def test_lines_and_places(tmp_path):
    text = '[{"a":\n "é"},\n\n 12, true,\n{"b": "x\\n"}]'
    assert rows_of(tmp_path, text) == [(1, {"a": "é"}), (4, 12), (4, True), (5, {"b": "x\n"})]
    for broken, said in {
        '[{"a": 1},\n  {"b": }]': "a.json:2: broken JSON at column 9: Expecting value",
        '[{"a": 1}, {"b": }]': "a.json:1: broken JSON at column 18: Expecting value",
        "[1, 2,\n tru]": "a.json:2: broken JSON at column 2: Expecting value",
        '[{"a": "never closed}]': "a.json:1: broken JSON at column 8: Unterminated string",
        "[1\n,2": "a.json:2: broken JSON: ',' or ']' expected, the file ends here",
        "[1,\n2]\n\n[": "a.json:4: text after the end of the array",
        "[1,": "a.json:1: broken JSON at column 4: Expecting value",
    }.items():
        with pytest.raises(UsageError) as refused:
            rows_of(tmp_path, broken)
        assert str(refused.value).startswith(said), broken
    for raw, said in {
        b'["\xc3\xa9",\n"\xe9"]': "a.json:2: byte 8 (0xe9) is not UTF-8",
        b'["a", "\xc3': "a.json:1: byte 7 (0xc3) is not UTF-8",
    }.items():
        with pytest.raises(UsageError) as refused:
            rows_of(tmp_path, raw)
        assert str(refused.value).startswith(said), raw


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1}\n{"a": 1, "b": {"c": 1, "c": 2}}\n{"a": 3}\n',
        '[{"a": 1},\n {"a": 1, "b": {"c": 1, "c": 2}},\n {"a": 3}]',
    ],
)
def test_a_key_given_twice_makes_its_row_alone_a_bad_one(tmp_path, text):
    file = tmp_path / "a.json"
    file.write_text(text)
    records = list(read_json(file, "a.json"))
    assert [record.value for record in records] == [{"a": 1}, None, {"a": 3}]
    assert (records[1].location, records[1].error) == (
        "a.json:2",
        "the key 'c' is given twice in one object",
    )


def test_objects_written_over_several_lines_are_rows(tmp_path):
    rows = [{"a": 1, "b": [{"c": "x\n"}]}, {"a": 2}]
    text = "\n" + "\n".join(json.dumps(row, indent=2) for row in rows)
    assert rows_of(tmp_path, text) == [(2, rows[0]), (10, rows[1])]
    assert rows_of(tmp_path, '{"a": 1}\n{"a": 2}') == [(1, {"a": 1}), (2, {"a": 2})]
    with pytest.raises(UsageError, match=r"a\.json:2: broken JSON"):
        rows_of(tmp_path, "{\n")


def test_cells_may_hold_delimiters_quotes_and_lines(tmp_path: Path) -> None:
    path = written(tmp_path, "a.csv", '\ufeffprompt,completion\n"a, ""b""\nc",d\n\ne,f\n')
    first, second = read_csv(path, "a.csv")
    assert (first.location, first.value) == ("a.csv:2", {"prompt": 'a, "b"\nc', "completion": "d"})
    assert (second.location, second.value) == ("a.csv:5", {"prompt": "e", "completion": "f"})
    assert [r.value["prompt"] for r in read_csv(path, "a.csv", skip=1)] == ["e"]


SAVED: list[tuple[str, str, list[Any]]] = [
    ("a.csv", '\ufeffprompt;"comple\ntion"\r\nq;a\r\n', [(3, {"prompt": "q", "comple tion": "a"})]),
    ("a.tsv", "prompt\tcompletion\na, b\tc\n", [(2, {"prompt": "a, b", "completion": "c"})]),
    ("a.csv", "prompt|completion\na, b|c\n", [(2, {"prompt": "a, b", "completion": "c"})]),
    ("a.csv", " question , answer,,\na,b,,\nc,d,,kept to be told\n",
     [(2, {"question": "a", "answer": "b"}), (3, {"question": "c", "answer": "d", "": "kept to be told"})]),
    ("a.csv", "p;c\n1;2\n;\n ; \n3;4\n;;\n", [(2, {"p": "1", "c": "2"}), (5, {"p": "3", "c": "4"})]),
]  # fmt: skip


def test_tables_as_people_save_them(tmp_path: Path) -> None:
    for name, content, wanted in SAVED:
        assert [
            (row.line, row.value) for row in read_csv(written(tmp_path, name, content), name)
        ] == wanted


def test_broken_csv_names_its_line(tmp_path: Path) -> None:
    broken: dict[str | bytes, str] = {
        "a,b\n1,2\n1,2,3\n": "x.csv:3: 3 cells, more than the header's 2; quote a cell",
        'a,b\n"1\n1",2\n1\n': "x.csv:4: 1 cells, fewer than the header's 2",
        'a,b\n1,2\n"1,2\n': "x.csv:3: a quote opens a cell and is not closed",
        'a,b\n1,2\n"1"x,2\n': "x.csv:3: broken CSV: ',' expected after '\"'",
        "a,a\n1,2\n": "x.csv:1: the column 'a' is named twice",
        b"a,b\n1,caf\xe9\n": "x.csv:2: byte 9 (0xe9) is not UTF-8",
        "a,b\n1,\0\n": "x.csv:2: byte 6 is zero, which is no text",
    }
    for content, said in broken.items():
        path = written(tmp_path, "x.csv", content)
        try:
            told = [f"{row.location}: {row.error}" for row in read_csv(path, "x.csv") if row.error]
        except UsageError as error:
            told = [str(error)]
        assert [one.startswith(said) for one in told] == [True], said


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
        {
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]},
            ],
            "note": None,
        }
    ] * 5
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=2)
    found = list(read_parquet(tmp_path / "a.parquet", "a.parquet"))
    assert [r.location for r in found] == [f"a.parquet, row {n}" for n in range(1, 6)]
    assert found[0].value == rows[0]
    assert [r.line for r in read_parquet(tmp_path / "a.parquet", "a.parquet", skip=3)] == [4, 5]


@pytest.mark.parametrize("kind", ["repeated", "nulls", "random"])
def test_a_parquet_column_that_unpacks_to_too_much_is_refused(kind, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(records, "MAX_COLUMN_BYTES", 1 << 20)
    if kind == "repeated":
        column = pa.array(["x" * 10_000] * 300)
    elif kind == "nulls":
        column = pa.ListArray.from_arrays([0, 200_000], pa.nulls(200_000, pa.int32()))
    else:
        column = pa.array([os.urandom(10_000) for _ in range(300)])
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": column}), path, use_dictionary=False)
    if kind == "random":  # the file itself is as large
        assert len(list(read_parquet(path, "a.parquet"))) == 300
        return
    assert path.stat().st_size < 200_000
    with pytest.raises(
        UsageError, match=r"a\.parquet: the column 'text.*' of row group 1 unpacks to"
    ):
        list(read_parquet(path, "a.parquet"))


def test_rows_that_repeat_a_long_text_are_not_held_together(tmp_path, monkeypatch) -> None:
    """A dictionary of one text and 512 references to it: one batch held 512 copies."""
    monkeypatch.setattr(records, "_BATCH_BYTES", 1 << 22)
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": pa.array(["x" * 1_000_000] * 60)}), path)
    assert path.stat().st_size < 200_000
    tracemalloc.start()
    assert sum(len(record.value["text"]) for record in read_parquet(path, "a")) == 60_000_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16_000_000


def test_broken_parquet_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["words"] * 500}), tmp_path / "a.parquet")
    whole = (tmp_path / "a.parquet").read_bytes()
    for content in (
        whole[: len(whole) // 2],
        b"PAR1" + b"\0" * 40,
        whole[:30] + b"\xff" * 60 + whole[90:],
    ):
        path = written(tmp_path, "b.parquet", content)
        with pytest.raises(UsageError, match=r"b\.parquet, row \d+: broken Parquet"):
            list(read_parquet(path, "b.parquet"))
