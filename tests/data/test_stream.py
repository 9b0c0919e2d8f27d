"""Streams: one block of rows at a time, resumed at the very row, nothing held out is trained on."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest

from isotype.config.schema import DataSection
from isotype.data.load import load_data
from isotype.data.rows import LoadedData, Row
from isotype.errors import RunError, UsageError


def row(name: str, i: int) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": f"{name} {i}"},
            {"role": "assistant", "content": f"answer {i} " * (i % 4 + 1)},
        ]
    }


@pytest.fixture
def load(families: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    for name, count in (("many", 90), ("few", 25)):
        Path(f"{name}.jsonl").write_text(
            "".join(json.dumps(row(name, i)) + "\n" for i in range(count))
        )

    def load(train: Any = "many.jsonl", **section: Any) -> LoadedData:
        settings = {
            "stream": True,
            "shuffle_buffer": 16,
            "max_length": 64,
            "eval_split": 0.1,
        } | section
        return load_data(DataSection(train=train, **settings), families.of("chatml"), seed=4)

    return load


WEIGHTED = [{"name": "many.jsonl", "weight": 3}, {"name": "few.jsonl", "weight": 1}]


@pytest.mark.parametrize(
    ("train", "packing"),
    [("many.jsonl", False), (WEIGHTED, True)],
    ids=["one", "weighted and packed"],
)
def test_a_resumed_stream_goes_on_with_the_same_row(load: Any, train: Any, packing: bool) -> None:
    whole = load(train, packing=packing).stream
    expected = [whole.take(3) for _ in range(60)]
    for stop in (0, 1, 7, 33):
        first = load(train, packing=packing).stream
        for _ in range(stop):
            first.take(3)
        state = json.loads(json.dumps(first.state()))
        again = load(train, packing=packing).stream
        again.restore(state)
        assert [again.take(3) for _ in range(stop, stop + 12)] == expected[stop : stop + 12]
        first.restore(state)
        assert first.take(3) == expected[stop]


def test_a_pass_has_every_row_once_and_none_that_is_held_out(load: Any) -> None:
    loaded = load(shuffle_buffer=45)
    taken = loaded.stream.take(90 - len(loaded.eval))
    assert loaded.eval
    assert len({r.input_ids for r in taken}) == len(taken), (
        "a row came twice before the others came once"
    )
    assert not {r.input_ids for r in taken} & {r.input_ids for r in loaded.eval}
    order = [taken.index(r) for r in sorted(taken, key=lambda r: r.input_ids)]
    assert order != sorted(order)
    in_order = load(shuffle=False).stream.take(3)
    assert (
        in_order
        == [r for r in load(shuffle=False, eval_split=0.0).stream.take(16) if r not in loaded.eval][
            :3
        ]
    )


def test_weights_are_kept_in_every_block(load: Any, families: SimpleNamespace) -> None:
    tokenizer = families.of("chatml")
    loaded = load(WEIGHTED, eval_split=0.0)
    taken: list[Row] = loaded.stream.take(160)
    few = [tokenizer.decode(r.input_ids).count("few") for r in taken]
    assert sum(few) == 40
    assert all(sum(few[at : at + 16]) == 4 for at in range(0, 160, 16))
    assert "many.jsonl: 75.0% of the training rows" in loaded.facts["notes"]
    assert loaded.stream.epochs == 1.0


def test_a_row_that_cannot_be_read_stops_the_run_with_its_place(load: Any) -> None:
    with Path("many.jsonl").open("a") as file:
        file.write("{broken\n")
    stream = load(eval_split=0.0).stream
    with pytest.raises(
        RunError, match=r"the stream cannot be read on: many\.jsonl:91: broken JSON"
    ):
        stream.take(100)


@pytest.mark.parametrize(
    ("train", "said"),
    [
        (
            ["many.jsonl", "few.jsonl"],
            "data.train: a stream of several sources needs a weight for each",
        ),
        ("book.txt", "book.txt: data.stream takes rows"),
    ],
)
def test_sources_that_cannot_be_streamed_are_refused(load: Any, train: Any, said: str) -> None:
    Path("book.txt").write_text("words\n")
    with pytest.raises(UsageError) as caught:
        load(train)
    assert str(caught.value).startswith(said)


class Threads:
    """One of several processes, which are threads here."""

    def __init__(self, rank: int, values: list[Any], barrier: Barrier) -> None:
        self.rank, self.size = rank, len(values)
        self.values, self.barrier = values, barrier

    def gather(self, value: Any) -> list[Any]:
        self.barrier.wait()  # all have read the values before
        self.values[self.rank] = json.dumps(value)
        self.barrier.wait()
        return [json.loads(text) for text in self.values]


@pytest.mark.parametrize("packing", [False, True])
def test_each_of_three_processes_tokenises_a_part_of_the_stream(load: Any, packing: bool) -> None:
    """Every process tokenised every row."""
    whole = load(WEIGHTED, packing=packing).stream
    expected = [whole.take(3) for _ in range(30)]
    values: list[Any] = [None] * 3
    barrier = Barrier(3)
    streams = [load(WEIGHTED, packing=packing).stream for _ in values]
    encoded = [0] * 3

    def read(rank: int) -> list[Any]:
        stream = streams[rank]
        stream.processes = Threads(rank, values, barrier)
        encode_rows = stream.encoder.encode_rows

        def count_rows(examples: Any, tally: Any) -> Any:
            for encoded_row in encode_rows(examples, tally):
                encoded[rank] += 1
                yield encoded_row

        stream.encoder.encode_rows = count_rows
        return [stream.take(3) for _ in range(30)]

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(read, range(3))) == [expected] * 3
    blocks = streams[0].block
    assert all(blocks * 5 <= count <= blocks * 6 for count in encoded)
    assert streams[0].state() == whole.state()
