"""`isotype cache` and the compiled kernels: shown with their size, cleared by their last use, and nothing else beside them."""

from __future__ import annotations

import json
import os
import time

import pytest

from tests.commands import ask


def cache(*arguments):
    return ask("cache", *arguments)


@pytest.fixture
def kept(tmp_path, monkeypatch):
    monkeypatch.setenv("ISOTYPE_CACHE", str(tmp_path))
    names = ("rope-0123456789abcdef.so", "lora-fedcba9876543210.so", "lora-fedcba9876543210.lock", "lora-fedcba9876543210.77.tmp")
    for name in (*names, "mine.so", "notes-0123456789abcdef.txt"):
        (tmp_path / name).write_bytes(b"x" * 1000)
    long_ago = time.time() - 40 * 86400
    os.utime(tmp_path / names[0], (long_ago, long_ago))
    return tmp_path


def test_compiled_kernels_are_shown(kept):
    assert f"{kept}: 2 compiled kernels, 4 kB" in cache()
    assert json.loads(cache("--json"))["kernels"] == {"folder": str(kept), "libraries": 2, "bytes": 4000, "removed": 0}
    (kept / "tokens").mkdir()
    assert "kernels" not in json.loads(cache(str(kept / "tokens"), "--json"))


def test_compiled_kernels_are_cleared_by_their_last_use(kept):
    assert "removed 1 compiled kernel, 1 kB" in cache("--clear", "--older", "30")
    assert not (kept / "rope-0123456789abcdef.so").exists()
    assert json.loads(cache("--clear", "--json"))["kernels"]["removed"] == 3
    assert sorted(path.name for path in kept.iterdir()) == ["mine.so", "notes-0123456789abcdef.txt"]
