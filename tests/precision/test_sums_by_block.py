"""Gradients of tensors that all blocks are given: one process adds them in the order in which FSDP's hooks add them."""

from __future__ import annotations

import copy
import socket

import pytest
import torch
from torch import distributed
from transformers import LlamaConfig, LlamaForCausalLM

from isotype.precision import PRESETS
from isotype.precision.apply import apply_precision, denoiser_blocks, remove_precision

pytest.importorskip("diffusers")

TEXT = 24


def pixart():
    from diffusers import PixArtTransformer2DModel

    torch.manual_seed(0)
    return PixArtTransformer2DModel(
        num_attention_heads=3, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=3, cross_attention_dim=TEXT, sample_size=16,
        caption_channels=TEXT,
    ).float()  # fmt: skip


def gradients(model):
    """name -> gradient of a loss of three pictures."""
    draw = torch.Generator().manual_seed(1)
    latents, words = torch.randn(3, 4, 8, 8, generator=draw), torch.randn(3, 5, TEXT, generator=draw)
    conditions = {"resolution": None, "aspect_ratio": None}
    made = model(latents, encoder_hidden_states=words, timestep=torch.tensor([10.0, 400.0, 900.0]), added_cond_kwargs=conditions)
    made.sample.float().pow(2).mean().backward()
    return {name: getattr(p.grad, "_local_tensor", p.grad) for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture
def mesh():
    """Of this process alone."""
    from torch.distributed.device_mesh import init_device_mesh

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def test_a_model_with_and_without_fsdp_has_the_same_gradients_in_bf16(mesh):
    from torch.distributed.fsdp import fully_shard

    plain = pixart()
    shared = copy.deepcopy(plain)
    for model in (plain, shared):
        apply_precision(model, PRESETS["bf16-mixed"], device_type="cpu")
    for unit in (*denoiser_blocks(shared), shared):
        fully_shard(unit, mesh=mesh)
    one, other = gradients(plain), gradients(shared)
    assert "caption_projection.linear_1.weight" in one
    assert set(one) == set(other)
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def test_hooks_are_on_a_denoisers_blocks_only_and_taken_away():
    model = pixart()
    before = gradients(model)
    apply_precision(model, PRESETS["fp32"], device_type="cpu")
    assert [len(block._forward_pre_hooks) for block in denoiser_blocks(model)] == [1, 1, 1]
    remove_precision(model)
    assert not any(module._forward_pre_hooks or module._forward_pre_hooks_with_kwargs for module in model.modules())
    model.zero_grad()
    after = gradients(model)
    assert all(torch.equal(before[name], after[name]) for name in before)
    llama = LlamaForCausalLM(LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=8))
    apply_precision(llama, PRESETS["bf16-mixed"], device_type="cpu")
    assert not any(module._forward_pre_hooks for module in llama.modules())
