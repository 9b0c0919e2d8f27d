"""What names mean: folders, patterns, compressed files, datasets of the hub's library, the built-in
set, rows in memory.
"""

from __future__ import annotations

import gzip
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.api import Example, Source, open_source, progress, save_rows, stdlib_pairs

import isotype
from isotype.config.schema import DataSection
from isotype.config.sources import SourceSpec, source_specs
from isotype.data.load import load_data
from isotype.errors import UsageError

ROWS = [{"prompt": f"q{i}", "completion": f"a{i}"} for i in range(12)]


def lines(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Twelve rows in three files of three kinds, one of them in a folder below, with a README
    beside them.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "set/deep").mkdir(parents=True)
    (tmp_path / "set/a.jsonl").write_bytes(lines(ROWS[:4]))
    (tmp_path / "set/b.jsonl.gz").write_bytes(gzip.compress(lines(ROWS[4:8])))
    pq.write_table(pa.Table.from_pylist(ROWS[8:]), tmp_path / "set/deep/c.parquet")
    (tmp_path / "set/README.md").write_text("about this set")
    (tmp_path / "set/.hidden.jsonl").write_text("no row")
    return tmp_path


def found(train: Any, **section: Any) -> Source:
    (spec,) = source_specs(DataSection(train=train, **section), "train")
    return open_source(spec, needs_answer=True)


def asked(one: Source, **how: Any) -> list[str]:
    return [e.prompt for e in one.examples(**how) if isinstance(e, Example)]


@pytest.mark.parametrize("name", ["set", "set/**/[abc].*"])
def test_a_folder_and_a_pattern_are_their_files(folder: Path, name: str) -> None:
    one = found(name)
    assert asked(one) == [row["prompt"] for row in ROWS]
    assert asked(one, skip=6) == [row["prompt"] for row in ROWS[6:]]
    facts = one.facts()
    assert (facts["files"], facts["format"]) == (3, "prompt_completion")
    assert one.notes == (["set: 1 of 4 files is not read (README.md)"] if name == "set" else [])


def test_the_files_of_runs_are_no_data(folder: Path) -> None:
    name = "."
    names = found(name).identity()
    for run, files in {
        "runs/a": ["resolved.yaml", "metrics.jsonl"],
        "runs/refused": [".lock", "preflight.json", "bad_rows.jsonl"],
    }.items():
        (folder / run / "samples").mkdir(parents=True)
        for file in [*files, "samples/step_0.json"]:
            (folder / run / file).write_text('{"step": 1}\n')
    one = found(name)
    assert one.identity() == names
    assert f"{name}: the files of runs are not read (runs/a, runs/refused)" in one.notes
    # asked for by its name
    with pytest.raises(UsageError, match=r"runs/a/metrics\.jsonl:1: no known format"):
        found("runs/a/*.jsonl")


SPLITS: list[tuple[list[str], str | None]] = [
    (
        ["train.jsonl", "validation.jsonl"],
        "set: 1 file is named as another split than train and is read like the others (validation",
    ),
    (["train/a.jsonl", "dev/a.jsonl"], "(dev/a.jsonl)"),
    (
        ["data/train-00000-of-00001.jsonl", "data/test-00000-of-00001.jsonl"],
        "(data/test-00000-of-00001.jsonl)",
    ),
    (
        ["my_train.jsonl", "my-held-out.jsonl", "Eval.jsonl"],
        "are read like the others (Eval.jsonl, my-held-out.jsonl)",
    ),
    (["train.jsonl", "contest.jsonl", "devices.jsonl", "evaluations/train.jsonl"], None),
    (["test.jsonl", "a.jsonl"], None),
]


def test_files_named_as_other_splits_beside_train_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i, (files, told) in enumerate(SPLITS):
        for k, file in enumerate(files):
            path = tmp_path / f"test{i}/set" / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(lines(ROWS[k : k + 1]))
        monkeypatch.chdir(tmp_path / f"test{i}")  # a folder above the data names no split
        for name in ("set", "set/**/*.jsonl"):
            one = found(name)
            assert len(asked(one)) == len(files)
            said = [note for note in one.notes if "split" in note]
            assert len(said) == (told is not None)
            assert told is None or told.replace("set:", f"{name}:") in said[0]


def test_parts_without_rows_beside_others_are_passed_over_and_told(folder: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS[:1]).slice(0, 0), folder / "set/d.parquet")
    (folder / "set/e.jsonl").write_bytes(b"")
    (folder / "set/f.csv").write_bytes(b"prompt,completion\n")
    (folder / "set/g.csv").write_bytes(b"\n")
    one = found("set")
    assert asked(one) == [row["prompt"] for row in ROWS]
    assert one.facts()["files"] == 3
    assert "set: 4 of 7 files hold no rows (d.parquet, e.jsonl, f.csv, ...)" in one.notes
    with pytest.raises(UsageError, match="none of its 2 files holds a row"):
        found("set/[ef].*")
    with pytest.raises(UsageError, match=r"set/d\.parquet: the file holds no rows"):
        found("set/d.parquet")
    with pytest.raises(UsageError, match=r"set/e\.jsonl: the file is empty"):
        found("set/e.jsonl")


def test_the_limit_counts_over_all_files(folder: Path) -> None:
    assert asked(found("set", limit=6)) == ["q0", "q1", "q2", "q3", "q4", "q5"]
    assert asked(found("set", limit=6), skip=5) == ["q5"]
    assert asked(found("set/a.jsonl", limit=3), skip=1) == ["q1", "q2"]


def test_datasets_are_read_by_their_library(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
    saved = datasets.DatasetDict(
        {
            "train": datasets.Dataset.from_list(ROWS[:5]),
            "test": datasets.Dataset.from_list(ROWS[5:]),
        }
    )
    saved.save_to_disk("saved")
    assert asked(found("saved")) == [row["prompt"] for row in ROWS[:5]]
    assert asked(found([{"name": "saved", "split": "test"}])) == [row["prompt"] for row in ROWS[5:]]
    with pytest.raises(
        UsageError,
        match=r"split: has no effect: saved/test is no dataset of the hub \(hf:NAME\), nor a folder",
    ):
        found([{"name": "saved/test", "split": "test"}])
    assert asked(found([{"name": "hf:saved", "split": "test"}]), skip=2) == [
        row["prompt"] for row in ROWS[7:]
    ]
    with pytest.raises(
        UsageError, match="hf:saved: no split 'dev': there are train, test"
    ) as caught:
        found([{"name": "hf:saved", "split": "dev"}])
    assert (
        caught.value.fix == "name one, in data.train or data.eval: [{name: hf:saved, split: train}]"
    )
    (folder / "hub").mkdir()
    (folder / "hub/train.jsonl").write_bytes(lines(ROWS))
    one = found([{"name": "hf:hub", "split": "train[:4]"}])
    assert asked(one) == [row["prompt"] for row in ROWS[:4]]
    assert one.identity()["fingerprint"]
    (spec,) = source_specs(DataSection(train="hf:hub"), "train")
    assert asked(open_source(spec, needs_answer=True, streaming=True), skip=10) == ["q10", "q11"]


def test_a_dataset_that_cannot_be_reached_is_one_line(folder: Path) -> None:
    with pytest.raises(UsageError, match="hf:org/none: ") as caught:
        found("hf:org/none")
    assert "\n" not in caught.value.message


WRONG: list[tuple[Any, str]] = [
    ([], "data.train: give at least one file"),
    ([{"name": "a", "wieght": 2}], "data.train[0].wieght: unknown key, did you mean weight?"),
    (["a", {"weight": 2}], "data.train[1].name: expected a file"),
    (
        [{"name": "a", "weight": True}, "b"],
        "data.train[0].weight: expected a number above 0, got True",
    ),
    ([{"name": "a", "limit": 0}], "data.train[0].limit: expected a whole number of at least 1"),
    (
        [{"name": "a", "format": "sharegtp"}],
        "data.train[0].format: unknown format 'sharegtp', did you mean sharegpt?",
    ),
    (
        [{"name": "a", "split": "test"}],
        "data.train[0].split: has no effect: a is no dataset of the hub",
    ),
    ([{"name": "a", "columns": ["b"]}], "data.train[0].columns: expected a mapping"),
    ([{"name": "a", "weight": 2}], "data.train: weight has no effect with one source"),
]


def test_a_wrong_entry_is_one_line_with_its_key() -> None:
    for train, said in WRONG:
        with pytest.raises(UsageError) as caught:
            source_specs(DataSection(train=train), "train")
        assert str(caught.value).startswith(said)
    with pytest.raises(UsageError, match=r"data\.eval: weight has no effect"):
        source_specs(DataSection(eval=[{"name": "a", "weight": 2}, "b"]), "eval")


def test_rows_in_memory_are_those_of_a_file(families, tmp_path, monkeypatch):
    monkeypatch.setenv("ISOTYPE_CACHE", str(tmp_path / "cache"))
    for made in (ROWS, datasets.Dataset.from_list(ROWS), pandas.DataFrame(ROWS)):
        assert save_rows(made) == save_rows(ROWS)  # named by its content
    frame = pandas.DataFrame(
        [*ROWS, {"prompt": "why?"}, {"prompt": "when?", "completion": pandas.NaT}]
    )
    loaded = load_data(DataSection(train=save_rows(frame)), families.of("chatml"), seed=0)
    assert len(loaded.train) + len(loaded.eval) == 12
    assert loaded.facts["train"]["dropped"]


def test_rows_in_memory_are_not_written_where_others_can_change_them(tmp_path, monkeypatch):
    monkeypatch.setenv("ISOTYPE_CACHE", "none")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    file = Path(save_rows(ROWS))
    assert file.parent.stat().st_mode & 0o077 == 0
    file.parent.parent.chmod(0o777)
    with pytest.raises(UsageError, match=r"cannot be written: others can write into"):
        save_rows(ROWS)


def test_names_and_sources_stay():
    for given in ("chats.jsonl", ["a.jsonl", "b.jsonl"], [{"name": "a.jsonl", "weight": 2}], None):
        assert save_rows(given) == given
    with pytest.raises(UsageError, match="no row"):
        save_rows([])


def test_train_takes_rows(workshop) -> None:
    for data in ([], {"train": []}, {"train": ROWS, "eval": {"held out": pandas.DataFrame()}}):
        with pytest.raises(UsageError, match="data: there is no row in it"):
            isotype.train(model=workshop.base, data=data)


@pytest.mark.full
def test_the_built_in_set_has_several_thousand_pairs_none_twice() -> None:
    pairs = stdlib_pairs()
    assert len(pairs) > 4000
    assert len({p.question for p in pairs}) == len(pairs)
    descriptions = {
        p.name: p.answer
        for p in pairs
        if not p.answer.startswith(("Call it as", "It takes no", "`"))
    }
    assert len(set(descriptions.values())) == len(descriptions)
    assert "whitespace" in descriptions["textwrap.dedent"]
    calls = {p.name: p.answer for p in pairs if p.answer.startswith("Call it as")}
    assert (
        calls["json.encoder.JSONEncoder.iterencode"]
        == "Call it as `iterencode(o, _one_shot=False)`."
    )


def test_a_log_gets_a_line_every_half_minute(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter(range(0, 10_000, 8))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
    assert list(progress.track_progress(range(20), "reading x.jsonl")) == [*range(20)]
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 5
    assert said[0] == "reading x.jsonl: 4 rows, 0/s, 20%, 2:08 left"


def test_the_time_left_of_a_file_is_estimated_from_its_first_lines(tmp_path: Path) -> None:
    row = '{"prompt": "a?", "completion": "b"}\n'
    (tmp_path / "rows.jsonl").write_text(row * 30_000)
    spec = SourceSpec(name=str(tmp_path / "rows.jsonl"))
    assert abs(open_source(spec, needs_answer=True).estimated_rows - 30_000) < 30
    assert open_source(replace(spec, limit=7), needs_answer=True).estimated_rows == 7
    assert (
        progress.progress_line("reading", 400, 1600, 10.0)
        == "reading: 400 rows, 40/s, 25%, 0:30 left"
    )
