"""Attention of PyTorch on the tensors of a planned GPU allocates what the kernels of a GPU allocate."""

import pytest
import torch
import torch.nn.functional as F

from isotype.training.memory.plan import LiveBytes
from tests.api import plan_device, planned_autocast

TOKENS, HEADS, SIZE = 1024, 8, 64
SCORES = 2 * HEADS * TOKENS * TOKENS  # bytes of one matrix of scores in bf16
ROWS = 2 * HEADS * TOKENS * SIZE  # bytes of queries, keys, values or results


def attend(**settings):
    query, key, value = (
        torch.empty(1, HEADS, TOKENS, SIZE, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for _ in range(3)
    )
    result = F.scaled_dot_product_attention(query, key, value, **settings)
    result.sum().backward()
    assert result.shape == query.grad.shape == value.grad.shape
    assert (result.dtype, key.grad.dtype) == (torch.bfloat16, torch.bfloat16)


@pytest.mark.parametrize("mask", [None, torch.bool, torch.bfloat16])
def test_a_gpus_attention_stores_no_scores(mask):
    settings = {}
    if mask is not None:
        settings["attn_mask"] = torch.empty(1, 1, 1, TOKENS, dtype=mask, device="meta")
    with plan_device("cuda"), LiveBytes("meta") as live:
        attend(**settings)
    assert live.peak < 10 * ROWS < SCORES
    with LiveBytes("meta") as live:  # outside of a plan
        attend(**settings)
    assert live.peak > SCORES


@pytest.mark.parametrize("has_mask", [False, True])
def test_an_attention_in_fp32_or_with_shared_heads_has_the_right_shapes(has_mask):
    mask = torch.ones(1, 1, 3, 5, dtype=torch.bool, device="meta") if has_mask else None
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for key_heads in (4, 2):
            query = torch.empty(2, 4, 3, 16, dtype=dtype, device="meta")
            key = torch.empty(2, key_heads, 5, 16, dtype=dtype, device="meta")
            with plan_device("cuda"):
                result = F.scaled_dot_product_attention(
                    query, key, key, mask, enable_gqa=key_heads == 2
                )
            assert (result.shape, result.dtype) == (query.shape, dtype)


def test_convolutions_of_clips_are_cast_like_those_of_pictures():
    """Wan's first layer is a 3-D convolution; without the cast its step could not be planned."""
    convolution = torch.nn.Conv3d(4, 8, (1, 2, 2), dtype=torch.bfloat16, device="meta")
    with plan_device("cuda"), planned_autocast(torch.bfloat16):
        result = convolution(torch.empty(1, 4, 3, 8, 8, device="meta"))
    assert result.dtype is torch.bfloat16
