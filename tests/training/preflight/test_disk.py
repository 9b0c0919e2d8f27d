"""PF004: what the run writes against what is free."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from isotype.tasks.choose import train
from isotype.training.preflight import static as disk
from isotype.training.preflight.static import checkpoint_bytes, disk_too_small, result_bytes


def files(folder):
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())


@pytest.mark.parametrize(
    "settings",
    [{"adapter": {"r": 64}}, {"adapter": {"kind": "none"}}, {"adapter": {"kind": "none"}, "precision": {"preset": "bf16-pure"}}],
    ids=["lora", "full", "bf16-pure"],
)
def test_the_sizes_are_those_that_a_run_writes(configured, subject, tmp_path, settings):
    one = subject("planned", **settings)
    assert train(configured(**settings)) == 0
    measured = files(tmp_path / "run/checkpoints/step_6")
    assert checkpoint_bytes(one) <= measured < 1.2 * checkpoint_bytes(one) + 40_000  # random state and names of tensors
    kind = "model" if settings["adapter"].get("kind") else "adapter"
    result = next((tmp_path / "run" / kind).glob("*.safetensors")).stat().st_size
    assert result_bytes(one) <= result < 1.1 * result_bytes(one) + 20_000


def test_a_disk_that_is_a_byte_too_small(subject, monkeypatch):
    one = subject()
    needed = 4 * checkpoint_bytes(one) + result_bytes(one)  # keep 2, the best, the one in writing
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: SimpleNamespace(free=needed - 1))
    (finding,) = disk_too_small(one)
    assert "3 kept and 1 in writing" in finding.render()
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: SimpleNamespace(free=needed))
    assert list(disk_too_small(one)) == []
