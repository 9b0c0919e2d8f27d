"""`lora.served`: the product with the rounded weight, and the gradients that pass the rounding."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from isotype import optimize
from tests.api import (
    lora_layers,
    pack_blocks,
    read_projection,
    serve_layer,
    served_merged_weight,
    served_weight,
    set_serving,
)
from tests.models import SIZES, lora, tiny


def pack(weight: torch.Tensor):
    return pack_blocks(weight, "Q4_0")


def served_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    sizes = {**SIZES, "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64}
    model = lora(tiny("llama", **sizes).to(dtype))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.1)
    optimize(model, "fp32" if dtype == torch.float32 else "bf16-lora")
    for _, layer in lora_layers(model):
        serve_layer(layer, pack)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_multiplies_by_the_rounded_weight(dtype) -> None:
    torch.manual_seed(0)
    tolerance = {"rtol": 1e-4, "atol": 1e-4}
    if dtype == torch.bfloat16:
        tolerance = {"rtol": 0.05, "atol": 0.1}
    model = served_model(dtype)
    _, layer = next(iter(lora_layers(model)))
    x = torch.randn(3, 5, layer.in_features, dtype=dtype, requires_grad=True)
    y = layer(x)
    projection = read_projection(layer, x, for_served=True)
    packed, state = pack(served_merged_weight(projection))
    rounded = state.dequantise(packed, torch.float32)
    assert not torch.equal(rounded, served_merged_weight(projection))
    torch.testing.assert_close(y, x @ rounded.to(dtype).t(), **tolerance)

    # the gradients of W + sBA + constant, where the constant is what the rounding adds
    a, b = (p.detach().clone().requires_grad_() for p in (projection.a, projection.b))
    wide = x.detach().float().requires_grad_()
    weight = served_merged_weight(projection)
    exact = weight - projection.scale * (projection.b.float() @ projection.a.float()).detach()
    through = exact + projection.scale * (b.float() @ a.float()) + (rounded - weight)
    dy = torch.randn_like(y)
    (wide @ through.t()).backward(dy.float())
    y.backward(dy)
    torch.testing.assert_close(projection.a.grad, a.grad, **tolerance)
    torch.testing.assert_close(projection.b.grad, b.grad, **tolerance)
    torch.testing.assert_close(x.grad.float(), wide.grad, **tolerance)


def test_groups_and_mlps_compute_every_layer_with_its_rounded_weight() -> None:
    """The fused functions of attention and MLP do not know rounded weights."""
    torch.manual_seed(0)
    model = served_model()
    ids = torch.arange(4, 20)[None]
    logits = model(ids).logits
    set_serving(model, is_active=False)
    unrounded = model(ids).logits
    for _, layer in lora_layers(model):
        projection = read_projection(layer, ids.float())
        packed, state = pack(served_merged_weight(projection))
        layer.base_layer.weight.data = state.dequantise(packed, torch.float32)
        for part in (layer.lora_B, layer.lora_A):
            nn.init.zeros_(part["default"].weight)
    torch.testing.assert_close(model(ids).logits, logits, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(unrounded, logits, rtol=1e-2, atol=1e-3)


def test_the_weight_is_rounded_again_after_each_kind_of_update() -> None:
    """torch's fused AdamW writes into a weight without a new version of the tensor."""
    model = served_model()
    _, layer = next(iter(lora_layers(model)))
    x = torch.randn(2, layer.in_features)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=0.1, fused=True)

    def check() -> torch.Tensor:
        projection = read_projection(layer, x, for_served=True)
        packed, _ = served_weight(layer).round_weight(projection)
        assert torch.equal(packed, pack(served_merged_weight(projection))[0])
        assert served_weight(layer).round_weight(projection)[0] is packed, "rounded twice"
        return packed

    before = check()
    layer(x).sum().backward()
    optimizer.step()
    after = check()
    assert not torch.equal(before, after)
    with torch.no_grad():
        layer.lora_B["default"].weight.mul_(0.5)
    assert not torch.equal(check(), after)
    layer.scaling["default"] *= 4
    check()


def test_a_weight_that_was_rounded_while_generating_is_used_in_training() -> None:
    model = served_model()
    with torch.inference_mode():
        model(torch.arange(4, 9)[None])
    model(torch.arange(4, 9)[None]).logits.sum().backward()


def test_weights_that_are_inference_tensors_are_rounded() -> None:
    with torch.inference_mode():
        model = served_model()
        _, layer = next(iter(lora_layers(model)))
        x = torch.randn(3, layer.in_features)
        projection = read_projection(layer, x, for_served=True)
        packed, state = pack(served_merged_weight(projection))
        expected = x @ state.dequantise(packed, torch.float32).t()
        torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)
