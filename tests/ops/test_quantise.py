"""Quantisers of served formats: the bytes are those of the libraries whose formats they are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.api import pack_blocks


def weights() -> torch.Tensor:
    """fp32[O K] with ties, zeros, steps that end at one half, and values of many sizes."""
    torch.manual_seed(0)
    weight = torch.randn(64, 256) * torch.logspace(-6, 2, 64)[:, None]
    weight[0, :32] = 0
    weight[1, :4] = torch.tensor([3.0, -3.0, 3.0, -3.0])
    weight[2, :4] = torch.tensor([-3.0, 3.0, -3.0, 3.0])
    weight[3] = (torch.arange(256) % 17 - 8) / 16
    weight[4] = (torch.arange(256) % 255 - 127) / 2
    weight[5] = weight[5].bfloat16().float()
    return weight


@pytest.mark.parametrize("kind", ["Q8_0", "Q5_0", "Q4_0"])
def test_blocks_have_the_bytes_of_the_package_gguf(kind: str) -> None:
    gguf = pytest.importorskip("gguf")
    weight = weights()
    want = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType[kind])
    packed, state = pack_blocks(weight, kind)
    assert np.array_equal(packed.numpy(), want)
    values = gguf.quants.dequantize(want, gguf.GGMLQuantizationType[kind])
    assert np.array_equal(state.dequantise(packed, torch.float32).numpy(), values)


@pytest.mark.parametrize("kind", ["Q8_0", "Q5_0", "Q4_0"])
def test_values_of_a_format_stay_as_they_are(kind: str) -> None:
    weight = torch.randn(64, 256)
    packed, state = pack_blocks(weight, kind)
    again, _ = pack_blocks(state.dequantise(packed, torch.float32), kind)
    assert torch.equal(again, packed)
