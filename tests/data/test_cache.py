"""Tokenised rows on disk: the same as in memory, found again, made again when what shaped them
changes or they are damaged.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.api import read_entry

from isotype.config.schema import DataSection
from isotype.data.load import load_data
from isotype.data.rows import LoadedData
from isotype.errors import UsageError

ROWS = [
    {
        "messages": [
            {"role": "user", "content": f"q {i}"},
            {"role": "assistant", "content": f"a {i} " * (i % 9 + 1)},
        ]
    }
    for i in range(60)
]


@pytest.fixture
def load(families: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    Path("chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))

    def load(family: str = "chatml", tokenizer: Any = None, **section: Any) -> LoadedData:
        settings = {"train": "chats.jsonl", "cache": "kept", "max_length": 48} | section
        return load_data(DataSection(**settings), tokenizer or families.of(family), seed=0)

    return load


def said(loaded: LoadedData) -> str:
    return " ".join(file["cache"] for file in loaded.facts["train"]["files"])


def kept() -> list[Path]:
    return list(Path("kept").glob("*[0-9a-f].safetensors"))


def without_cache(facts: dict[str, Any]) -> str:
    for side in ("train", "eval"):
        for file in facts[side]["files"]:
            file.pop("cache", None)
    facts["notes"] = [
        note
        for note in facts["notes"]
        if "training tokens" not in note and "evaluation tokens" not in note
    ]
    return json.dumps(facts)


def test_a_second_run_finds_the_rows_of_the_first(
    load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, first = load(cache="none"), load()
    assert said(first).startswith("kept in kept/")
    monkeypatch.setattr(
        "isotype.data.load.encode_source", lambda *_: pytest.fail("nothing may be tokenised now")
    )
    second = load()
    assert said(second).startswith("from kept/")
    for loaded in (first, second):
        assert [list(loaded.train), list(loaded.eval), loaded.prompts] == [
            list(plain.train),
            list(plain.eval),
            plain.prompts,
        ]
        assert without_cache(loaded.facts) == without_cache(plain.facts)
    assert load(packing=True, eval_split=0.2).facts["packing"], (
        "packing and split come after the cache"
    )


def test_an_entry_is_a_safetensors_file(load: Any) -> None:
    from safetensors.numpy import load_file

    load()
    (path,) = Path("kept").iterdir()
    columns = load_file(path)
    assert int(columns["ends"][-1]) == len(columns["ids"]) == len(columns["learnt"])
    assert np.array_equal(read_entry(path).ids, columns["ids"])


def test_everything_that_determines_the_rows_is_part_of_the_key(
    load: Any, families: SimpleNamespace
) -> None:
    Path("other.jinja").write_text(
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}<|im_end|>{% endfor %}"
    )
    Path("other.jsonl").write_text(json.dumps(ROWS[0]).replace("q 0", "w") + "\n")
    changed = families.new("chatml")
    changed.add_special_tokens({"additional_special_tokens": ["<new>"]})
    changes: list[dict[str, Any]] = [
        {}, {"max_length": 40}, {"loss_on": "all"}, {"limit": 30}, {"family": "llama3"}, {"format": "messages", "limit": 31},
        {"chat_template": "other.jinja"}, {"tokenizer": changed}, {"train": "other.jsonl"},
    ]  # fmt: skip
    for change in changes:
        assert said(load(**change)).startswith("kept in"), change
    assert len(list(Path("kept").iterdir())) == len(changes)
    assert said(load()).startswith("from")


def test_a_damaged_entry_is_rebuilt_with_a_note(load: Any) -> None:
    plain = load()
    (path,) = Path("kept").iterdir()
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) * 2 // 3] ^= 4
    broken_header = bytearray(whole)
    broken_header[12] ^= 1
    for damaged in (
        whole[:-1],
        whole[: len(whole) // 2],
        whole[:5],
        b"",
        bytes(flipped),
        bytes(broken_header),
        whole + b"\0" * 8,
    ):
        path.write_bytes(damaged)
        loaded = load()
        assert any(
            "a damaged cache entry was made again: kept/" in note for note in loaded.facts["notes"]
        )
        assert list(loaded.train) == list(plain.train)
        assert path.read_bytes() == whole


def test_a_folder_that_cannot_be_written_costs_only_time(load: Any) -> None:
    Path("kept").write_text("a file")
    loaded = load()
    assert list(loaded.train) == list(load(cache="none").train)
    assert any("the cache kept cannot be written" in note for note in loaded.facts["notes"])


def _load_in_process(tokenizer: Any, folder: str, start: Any, found: Any) -> None:
    start.wait()
    loaded = load_data(
        DataSection(train=f"{folder}/chats.jsonl", cache=f"{folder}/kept"), tokenizer, seed=0
    )
    found.put(sum(sum(row.input_ids) for row in loaded.train))


def test_runs_at_once_do_not_disturb_each_other(
    load: Any, families: SimpleNamespace, tmp_path: Path
) -> None:
    context = multiprocessing.get_context("fork")
    start, found = context.Event(), context.Queue()
    runs = [
        context.Process(
            target=_load_in_process,
            args=(families.of("chatml"), str(tmp_path), start, found),
        )
        for _ in range(4)
    ]
    for run in runs:
        run.start()
    start.set()
    sums = {found.get(timeout=900) for _ in runs}
    for run in runs:
        run.join()
    assert len(sums) == 1
    assert [p.suffix for p in (tmp_path / "kept").iterdir()] == [".safetensors"]
    assert len(read_entry(next((tmp_path / "kept").iterdir()))) == len(ROWS)


def test_bad_rows_are_refused_again_from_the_cache(load: Any) -> None:
    Path("chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS) + "{broken\n")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"chats\.jsonl:61"):
            load()
    assert load(on_bad_row="skip").bad_rows[0].location == "chats.jsonl:61"


def test_the_folder_is_held_to_its_bound_and_the_oldest_go_first(
    load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("kept").mkdir()
    Path("kept/model.safetensors").write_bytes(b"somebody's weights")
    for age, length in ((300, 40), (200, 41), (100, 42)):
        load(max_length=length)
        os.utime(max(kept(), key=lambda path: path.stat().st_mtime), (time.time() - age,) * 2)
    load(max_length=40)  # used again: now the youngest
    size = sum(path.stat().st_size for path in kept())
    monkeypatch.setenv("ISOTYPE_CACHE_GB", str((size + 3000) / 1e9))
    loaded = load(max_length=43)
    assert any(
        "cache entries removed, those unused for longest: 1; kept holds at most" in note
        for note in loaded.facts["notes"]
    )
    assert said(load(max_length=40)).startswith("from ")
    assert said(load(max_length=42)).startswith("from ")
    monkeypatch.setenv("ISOTYPE_CACHE_GB", "0")
    assert said(load(max_length=41)).startswith("kept in "), "the oldest had gone"
    assert len(kept()) == 1, "the one in use stays"
    assert Path("kept/model.safetensors").is_file()
    for wrong in ("x", "-1", "nan"):
        monkeypatch.setenv("ISOTYPE_CACHE_GB", wrong)
        with pytest.raises(UsageError, match=f"ISOTYPE_CACHE_GB={wrong}: expected gigabytes"):
            load()
