"""Lines of data files: how much of a file is held in memory."""

import gzip
import tracemalloc

import pytest
from tests.api import read_csv, read_json

from isotype.errors import UsageError

ZEROS = gzip.compress(bytes(1 << 24)) * 192  # 3 GiB of zeros in 3 MB


@pytest.mark.parametrize(
    ("name", "start", "read", "message"),
    [
        ("a.jsonl.gz", b'{"text": "', read_json, "a.jsonl.gz:1: the line is longer than 128 MiB"),
        ("a.json.gz", b'[{"text": "', read_json, "a.json.gz:1: the line is longer than 256 MiB"),
        ("a.csv.gz", b'text\n"', read_csv, "a.csv.gz:2: the line is longer than 128 MiB"),
    ],
)
def test_a_line_of_3_gib_is_refused_before_it_is_held(tmp_path, name, start, read, message):
    path = tmp_path / name
    path.write_bytes(gzip.compress(start) + ZEROS)
    assert path.stat().st_size < 4_000_000
    tracemalloc.start()
    try:
        with pytest.raises(UsageError) as refusal:
            list(read(path, name))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert refusal.value.message == message
    assert peak < 768 << 20


def test_many_lines_of_a_compressed_array_are_refused_before_they_are_held(tmp_path):
    lines = gzip.compress(b" " * (1 << 20) + b"\n") * 300
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(b"[\n") + lines)
    with pytest.raises(UsageError, match="it unpacks to more than 256 MiB of JSON"):
        list(read_json(tmp_path / "a.json.gz", "a.json.gz"))
