"""Three times the rows take no more memory: cached ones are mapped, streamed ones come and go."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from isotype.config.schema import DataSection
from isotype.data.load import load_data
from isotype.data.rows import RowStream

pytestmark = pytest.mark.full

FEW, MANY = 600, 1800


def peak(work: Callable[[], Any]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("settings", "bytes_a_row"),
    [
        ({"stream": True, "shuffle_buffer": 256, "eval_split": 0.0}, 50),
        ({"cache": "kept"}, 250),
        ({"cache": "none"}, None),
    ],
    ids=["stream", "cached", "in memory"],
)
def test_more_rows_take_no_more_memory(
    families: SimpleNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    bytes_a_row: int | None,
) -> None:
    monkeypatch.chdir(tmp_path)
    # a checksum reads 4 MiB at a time, more than these files have
    monkeypatch.setattr("isotype.data.cache._CHUNK", 1 << 14)
    for count in (FEW, MANY):
        lines = (
            json.dumps({"text": f"number {i:05} of the rows " * 6}) + "\n" for i in range(count)
        )
        Path(f"{count}.jsonl").write_text("".join(lines))

    def work(count: int) -> None:
        loaded = load_data(
            DataSection(train=f"{count}.jsonl", **settings), families.of("chatml"), seed=0
        )
        stream = loaded.stream or RowStream(loaded.train, seed=0, shuffle=False)
        for _ in range(count // 50):
            stream.take(45)

    work(FEW)  # imports and caches
    for entry in Path("kept").glob("*"):
        entry.unlink()
    grown = (peak(lambda: work(MANY)) - peak(lambda: work(FEW))) / (MANY - FEW)
    if bytes_a_row is None:
        assert grown > 300, (
            "rows in memory grow by 5 bytes a token: else this test would see nothing"
        )
    else:
        assert grown < bytes_a_row, f"{grown:.0f} bytes a row"
