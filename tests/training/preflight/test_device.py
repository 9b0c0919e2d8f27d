"""PF001: the CPU was taken although there is a GPU."""

from __future__ import annotations

import pytest

from isotype.training.preflight import static as device
from isotype.training.preflight.static import unexpected_device


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """An `nvidia-smi` that answers what it is told to."""

    def make(text: str, status: int = 0) -> None:
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\necho '{text}'\nexit {status}\n")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return make


def test_a_gpu_that_torch_does_not_use(subject, smi, monkeypatch):
    one = subject()
    monkeypatch.setattr(device.torch.version, "cuda", None)
    monkeypatch.setattr(device.torch.version, "hip", None)
    one.prepared.device = device.torch.device("cpu")
    smi("GPU 0: NVIDIA H200 (UUID: GPU-1)")
    (finding,) = unexpected_device(one)
    assert finding.observed == "GPU 0: NVIDIA H200"
    assert "without CUDA" in str(finding.cause)
    monkeypatch.setattr(device.torch.version, "cuda", "12.8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (finding,) = unexpected_device(one)
    assert "CUDA_VISIBLE_DEVICES" in str(finding.cause)


def test_a_cpu_that_was_chosen_or_is_the_only_device_is_accepted(subject, smi, monkeypatch):
    smi("GPU 0: NVIDIA H200 (UUID: GPU-1)")
    assert list(unexpected_device(subject(model={"device": "cpu"}))) == []
    monkeypatch.setattr(device, "installed_gpu", lambda: None)
    assert list(unexpected_device(subject("other"))) == []
