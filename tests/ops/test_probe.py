"""A Triton that imports but cannot run: found once, said, and replaced by plain PyTorch. CUDA itself is played by stand-ins."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from isotype.ops import backend, launch

FIRST, SECOND = torch.device("cuda:0"), torch.device("cuda:1")


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(backend, "_answers", {})
    backend._say_once.cache_clear()
    backend.widens_products.cache_clear()
    yield
    backend.widens_products.cache_clear()


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
    assert backend.why_no_kernels(FIRST) == "Triton is not installed"


def test_the_probes_kernel_adds_one():
    pytest.importorskip("triton")
    from isotype.testing.interpreter import interpreted

    x = torch.ones(1)
    with interpreted():
        launch.add_one[(1,)](x)
    assert x.tolist() == [2.0]


@pytest.mark.parametrize(("capability", "bf16"), [((7, 0), False), ((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_bf16_products_return_fp32_sums_from_capability_8_on(monkeypatch, capability, bf16):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    assert backend.keeps_fp32_sums(torch.bfloat16, FIRST) == bf16
    assert backend.keeps_fp32_sums(torch.float16, FIRST)
    assert not backend.keeps_fp32_sums(torch.float32, FIRST)
    assert not backend.keeps_fp32_sums(torch.bfloat16, torch.device("cpu"))
