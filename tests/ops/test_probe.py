"""A Triton that imports but cannot run: found once, said, and replaced by plain PyTorch. CUDA itself is played by stand-ins."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from isotype.ops import backend, launch

FIRST, SECOND = torch.device("cuda:10"), torch.device("cuda:11")  # each test asks of devices of its own: an answer is kept


def on(device, dtype=torch.bfloat16):
    return SimpleNamespace(is_cuda=True, device=device, dtype=dtype)


def test_a_device_whose_kernels_fail_runs_plain_pytorch_and_others_do_not(monkeypatch):
    asked = []

    def probe(device):
        asked.append(device)
        if device == FIRST:
            raise RuntimeError("\nFailed to find C compiler. Please specify via CC environment variable.\n more")

    monkeypatch.setattr(launch, "probe", probe)
    assert [backend.triton_runs(on(FIRST)) for _ in range(3)] == [False] * 3
    assert backend.triton_runs(on(SECOND))
    assert asked == [FIRST, SECOND]  # once each
    assert (
        backend.why_no_kernels(FIRST)
        == "Triton cannot run a kernel: RuntimeError: Failed to find C compiler. Please specify via CC environment variable."
    )
    assert not backend.triton_runs(on(SECOND, torch.float64))


def test_a_missing_triton_is_named(monkeypatch):
    monkeypatch.setattr(backend, "find_spec", lambda name: None)
    assert backend.why_no_kernels(torch.device("cuda:12")) == "Triton is not installed"


def test_the_probes_kernel_adds_one():
    pytest.importorskip("triton")
    from isotype.testing.interpreter import interpreted

    x = torch.ones(1)
    with interpreted():
        launch.add_one[(1,)](x)
    assert x.tolist() == [2.0]


def test_bf16_products_return_fp32_sums_from_capability_8_on(monkeypatch):
    capabilities = {20: (7, 0), 21: (7, 5), 22: (8, 0), 23: (9, 0)}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capabilities[getattr(index, "index", index)])
    devices = [torch.device("cuda", index) for index in capabilities]
    assert [backend.keeps_fp32_sums(torch.bfloat16, device) for device in devices] == [False, False, True, True]
    assert [backend.keeps_fp32_sums(torch.float16, device) for device in devices] == [True] * 4
    assert not backend.keeps_fp32_sums(torch.float32, devices[0])
    assert not backend.keeps_fp32_sums(torch.bfloat16, torch.device("cpu"))
