"""Keys of a turn beside its role and text: those that say whether it is learnt."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from isotype.config.schema import DataSection
from isotype.data.load import load_data
from isotype.data.rows import IGNORED, LoadedData
from isotype.errors import UsageError

KEYS: list[tuple[str, Any]] = [("weight", 0), ("weight", 0.0), ("train", False), ("training", False)]
WORDS = {"messages": ("role", "content", "user", "assistant"), "conversations": ("from", "value", "human", "gpt")}


def turns(*said: str, key: str = "messages", last: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """Questions and answers in turn; `last` has more keys of the last answer."""
    who, text, *people = WORDS[key]
    made = [{who: people[i % 2], text: one} for i, one in enumerate(said)]
    made[-1] |= last or {}
    return made


def loaded(folder: Path, families: SimpleNamespace, rows: list[Any], **section: Any) -> LoadedData:
    file = folder / "d.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_data(DataSection(train=str(file), eval_split=0.0, **section), families.of("chatml"), seed=0)


@pytest.mark.parametrize(("flag", "off", "key"), [(*one, key) for one, key in zip(KEYS, [*WORDS] * 2)])
def test_marked_turn_is_not_learnt(tmp_path: Path, families: SimpleNamespace, key: str, flag: str, off: Any) -> None:
    row = turns("q", "left out", key=key, last={flag: off}) + turns("r", "learnt", key=key, last={flag: None})
    data = loaded(tmp_path, families, [{key: row}])
    learnt = [label for label in data.train[0].labels if label != IGNORED]
    assert families.of("chatml").decode(learnt) == "learnt<|im_end|>"
    assert data.facts["notes"] == []


def test_marked_turn_may_be_empty(tmp_path: Path, families: SimpleNamespace) -> None:
    data = loaded(tmp_path, families, [{"messages": turns("q", "", last={"weight": 0}) + turns("r", "learnt")}])
    assert len(data.train) == 1


def test_weight_between_0_and_1_is_refused(tmp_path: Path, families: SimpleNamespace) -> None:
    with pytest.raises(UsageError, match=r"d.jsonl:1: messages\[1\].weight must be 0 or 1, true or false, got 0.5"):
        loaded(tmp_path, families, [{"messages": turns("q", "a", last={"weight": 0.5})}])


def test_row_without_a_learnt_turn_is_dropped(tmp_path: Path, families: SimpleNamespace) -> None:
    data = loaded(tmp_path, families, [{"messages": turns("q", "a", last={"weight": 0})}, {"messages": turns("q", "a")}])
    assert len(data.train) == 1
    (note,) = data.facts["notes"]
    assert note.startswith("1 training row dropped: all of its answers are marked as not learnt")
