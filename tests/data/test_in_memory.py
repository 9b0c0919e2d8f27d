"""Rows in memory are a source as their file would be."""

from __future__ import annotations

import datasets
import pandas
import pytest

import isotype
from isotype.config.schema import DataSection
from isotype.data.in_memory import as_source
from isotype.data.load import load_data
from isotype.errors import UsageError

ROWS = [{"prompt": f"{i} + 1?", "completion": str(i + 1)} for i in range(12)]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ISOTYPE_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("make", [list, datasets.Dataset.from_list, pandas.DataFrame], ids=["list", "datasets", "pandas"])
def test_rows_are_those_of_a_file(make, families):
    loaded = load_data(DataSection(train=as_source(make(ROWS))), families.of("chatml"), seed=0)
    assert len(loaded.train) + len(loaded.eval) == 12
    assert as_source(make(ROWS)) == as_source(ROWS)  # named by its content


def test_missing_values_of_a_frame_are_no_value(families):
    frame = pandas.DataFrame([*ROWS, {"prompt": "why?"}, {"prompt": "when?", "completion": pandas.NaT}])
    loaded = load_data(DataSection(train=as_source(frame)), families.of("chatml"), seed=0)
    assert len(loaded.train) + len(loaded.eval) == 12
    assert loaded.facts["train"]["dropped"]


def test_names_and_sources_stay():
    for given in ("chats.jsonl", ["a.jsonl", "b.jsonl"], [{"name": "a.jsonl", "weight": 2}], None):
        assert as_source(given) == given
    with pytest.raises(UsageError, match="no row"):
        as_source([])


def test_train_takes_rows(workshop, tmp_path):
    run = isotype.train(
        model=workshop.base,
        data={"train": ROWS, "eval": datasets.Dataset.from_list(ROWS[:2]), "max_length": 64},
        train={"steps": 1, "batch_size": 2},
        run={"folder": str(tmp_path / "run"), "report": False, "sample_every": 0},
    )
    assert run.status == "done"
    assert run.record.data["train"]["rows"] == 12
