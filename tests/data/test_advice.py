"""What a wrong file is told helps: the fix works for this file."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from isotype.config.compare import compare
from isotype.config.schema import DataSection, RunConfig
from isotype.data.load import load_data
from isotype.errors import UsageError


def error_of(folder: Path, families: SimpleNamespace, file: str, content: str | bytes, **section: Any) -> str:
    path = folder / file
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UsageError) as caught:
        load_data(DataSection(train=str(path), **section), families.of("chatml"), seed=0)
    return f"{caught.value.message}\n{caught.value.fix}"


def lines(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_leaving_out_bad_rows_is_no_advice_where_all_are_bad(tmp_path: Path, families: SimpleNamespace) -> None:
    bad = [{"prompt": "q", "completion": i} for i in range(3)]
    for rows in (bad[:1], bad):
        said = error_of(tmp_path, families, "x.jsonl", lines(*rows))
        assert "on_bad_row" not in said
        assert "none of the rows can be used as they are" in said
    assert "data.on_bad_row: skip" in error_of(tmp_path, families, "x.jsonl", lines(*bad, {"prompt": "q", "completion": "a"}))


def test_a_column_of_another_case_is_answered_with_the_setting(tmp_path: Path, families: SimpleNamespace) -> None:
    columns = {"prompt": "Question", "completion": "answer"}
    said = error_of(tmp_path, families, "x.jsonl", lines({"question": "q", "answer": "a"}), columns=columns)
    assert "no key 'Question', but 'question': data.columns.prompt: question" in said


def test_a_list_of_objects_in_a_row_is_not_taken_for_the_rows(tmp_path: Path, families: SimpleNamespace) -> None:
    said = error_of(tmp_path, families, "x.jsonl", lines({"segments": [{"text": "a", "label": True}]}, {"segments": []}))
    assert "if these are the rows, give a file that is that list alone" in said


def test_a_csv_of_another_encoding_is_told_the_command(tmp_path: Path, families: SimpleNamespace) -> None:
    said = error_of(tmp_path, families, "x.csv", "prompt,completion\nq,\u201ca\u201d\n".encode("cp1252"))
    assert "iconv -f CP1252 -t UTF-8" in said


def test_a_resumed_run_may_leave_out_rows_that_stopped_it() -> None:
    def config(on_bad_row: str) -> RunConfig:
        return RunConfig.model_validate({"data": {"train": "x", "on_bad_row": on_bad_row}})

    (change,) = compare(config("error"), config("skip"))
    assert change.allowed
    (change,) = compare(config("skip"), config("error"))
    assert not change.allowed
