"""A Triton that imports but cannot run: found once, said, and replaced by plain PyTorch. CUDA itself is played by stand-ins."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

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


def test_a_failure_of_one_moment_is_forgotten_and_said_once(monkeypatch, capsys):
    errors = [torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError("CUDA out of memory"), None]

    def probe(device):
        error = errors.pop(0)
        if error is not None:
            raise error

    monkeypatch.setattr(launch, "probe", probe)
    assert [backend.triton_runs(on(FIRST)) for _ in range(4)] == [False, False, True, True]
    assert capsys.readouterr().err == (
        "isotype: ops run as plain PyTorch on cuda:0: Triton cannot run a kernel: OutOfMemoryError: CUDA out of memory\n"
    )


def test_a_probe_that_is_first_asked_under_a_fake_mode_runs_outside_it(monkeypatch):
    """Under FakeTensorMode the value read back was no number, and every op of the process ran as plain PyTorch from then on."""

    def probe(device):
        x = torch.ones(1)
        x += 1
        if float(x) != 2.0:
            raise RuntimeError(f"1 + 1 was {float(x)}")

    monkeypatch.setattr(launch, "probe", probe)
    with FakeTensorMode():
        assert backend.why_no_kernels(FIRST) == ""
    assert backend.why_no_kernels(FIRST) == ""


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
