"""A Triton that imports but cannot run: found once, said, and replaced by plain PyTorch. CUDA itself is played by stand-ins."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from isotype.ops import backend, launch

FIRST, SECOND = torch.device("cuda:10"), torch.device("cuda:11")  # each test asks of devices of its own: an answer is kept


def on(device, dtype=torch.bfloat16):
    return SimpleNamespace(is_cuda=True, device=device, dtype=dtype)


def test_it_is_asked_outside_a_fake_mode_and_a_failure_of_the_moment_is_not_kept(monkeypatch):
    device, real = torch.device("cuda:12"), []

    def probe(device):
        real.append(type(torch.ones(1)) is torch.Tensor)
        if len(real) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(launch, "probe", probe)
    with FakeTensorMode():
        assert [bool(backend.why_no_kernels(device)) for _ in range(3)] == [True, False, False]
    assert real == [True, True]
