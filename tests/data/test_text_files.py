"""Plain text files: every character is learnt, once, whatever a line ends in; programs' sources are text."""

from __future__ import annotations

import gzip
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from isotype.config.schema import DataSection
from isotype.data.load import load_data
from isotype.data.rows import LoadedData
from isotype.errors import UsageError

SOURCES = {
    "tabs.py": "def a():\n\treturn 1\n\n\x0c\ndef b():\n\treturn '\x0b'\n",
    "windows.py": "def a():\r\n\treturn 1\r\n\x0c\r\ndef b():\r\n\treturn 2\r\n",
    "below/marks.py": "x = 'a\x85b\u2028c\u2029d\x1c\x1d\x1ee'\n",
    "below/mac.py": "x = 1\ry = 2\r",
    "below/mixed.py": "x = 1\r\ny = 2\nz = 3",
}


def load(tokenizer: Any, name: Path | str, **settings: Any) -> LoadedData:
    return load_data(DataSection(**{"train": str(name), "max_length": 64, "eval_split": 0, "cache": "none", **settings}), tokenizer, seed=0)


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text.encode())


def documents(loaded: LoadedData, tokenizer: Any) -> list[str]:
    """The learnt texts, each file's windows put together at its end-of-text token."""
    rows: Any = loaded.train
    rows = getattr(rows, "rows", rows)
    ids = [i for row in rows for i in row.input_ids]
    return sorted(tokenizer.decode(ids).split(tokenizer.eos_token)[:-1])


@pytest.mark.parametrize("settings", [{}, {"packing": True}, {"max_length": 16}])
def test_sources_by_a_pattern_are_learnt_as_they_are(tmp_path: Path, families: SimpleNamespace, settings: dict[str, Any]) -> None:
    write(tmp_path / "src", SOURCES | {"__init__.py": ""})
    loaded = load(families.of("chatml"), f"{tmp_path}/src/**/*.py", **settings)
    assert documents(loaded, families.of("chatml")) == sorted(SOURCES.values())


def test_a_file_of_another_ending_is_text_where_that_is_said(tmp_path: Path, families: SimpleNamespace) -> None:
    write(tmp_path, {"a.foo": "one\r\ntwo", "b.foo": "three"})
    (tmp_path / "c.py.gz").write_bytes(gzip.compress(b"x = 1\r\n"))
    tokenizer = families.of("chatml")
    for name in (tmp_path / "a.foo", f"{tmp_path}/*.foo"):
        with pytest.raises(UsageError, match=r"foo(.|\n)*data\.format: text, if it is to be learnt as plain text"):
            load(tokenizer, name)
    with pytest.raises(UsageError, match=r"name the files by a pattern, as 'src/\*\*/\*\.py'"):
        load(tokenizer, tmp_path)
    assert documents(load(tokenizer, f"{tmp_path}/*.foo", format="text"), tokenizer) == ["one\r\ntwo", "three"]
    assert documents(load(tokenizer, tmp_path / "c.py.gz"), tokenizer) == ["x = 1\r\n"]
