"""A data frame that pandas wrote as JSON is named, and the call in the message makes a file of rows from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from isotype.config.schema import DataSection
from isotype.config.sources import source_specs
from isotype.data.sources import source
from isotype.errors import UsageError

ROWS = [{"prompt": f"0{i}", "completion": f"2026-11-{i + 10}", "id": i} for i in range(12)]
FORMS = ("columns", "every second row", "split", "table", "index")


def opened(name: str, **section: Any) -> Any:
    (spec,) = source_specs(DataSection(train=name, **section), "train")
    return source(spec, needs_answer=True)


@pytest.mark.full
@pytest.mark.parametrize("form", FORMS)
def test_call_in_the_message_makes_rows(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pandas = pytest.importorskip("pandas")
    monkeypatch.chdir(tmp_path)
    frame, rows = pandas.DataFrame(ROWS), ROWS
    if form == "every second row":
        rows = ROWS[::2]
        frame.iloc[::2].to_json("frame.json", indent=1)
    else:
        frame.to_json("frame.json", orient=form)
    with pytest.raises(UsageError, match=r"frame\.json:1: one table, as pandas' to_json\(orient=") as caught:
        opened("frame.json")
    assert caught.value.fix is not None
    exec(caught.value.fix, {"pandas": pandas, "json": json})
    assert [(row.prompt, row.completion) for row in opened("rows.jsonl").examples()] == [(r["prompt"], r["completion"]) for r in rows]
