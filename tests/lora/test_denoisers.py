"""Q, K and V of diffusers' attention are one product where they read one tensor, and PEFT's results stay."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model

pytest.importorskip("diffusers")

from benchmarks.diffusion_matrix import CLASSES, plain_objective, random_batch

from isotype.lora import attach, fuse_lora
from isotype.precision import Precision
from isotype.tasks.diffusion.families import Asked
from isotype.tasks.diffusion.loss import picture_losses

# groups in one forward pass: a joint attention has one, with text projections a second, a cross-attention one of K and V
GROUPS = {"SD3": 2 + 2, "SDXL U-Net": 4 * 2}


@pytest.mark.parametrize("name", GROUPS)
def test_projections_of_one_tensor_are_one_product(name, monkeypatch):
    make, family = CLASSES[name]
    torch.manual_seed(0)
    names = ["to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj"]
    denoiser = make()
    config = LoraConfig(r=4, target_modules=[n for n in names if any(m.endswith(n) for m, _ in denoiser.named_modules())])
    plain = get_peft_model(denoiser, config)
    for parameter_name, parameter in plain.named_parameters():
        if "lora_B" in parameter_name:
            torch.nn.init.normal_(parameter, std=0.2)
    fused = copy.deepcopy(plain)
    assert all(line.op for line in fuse_lora(fused))
    ran = []
    own = attach.lora_group
    monkeypatch.setattr(attach, "lora_group", lambda *args, **kwargs: ran.append(1) or own(*args, **kwargs))
    batch = random_batch(family, make().config, Precision.preset("fp32"))
    losses = []
    for model in (plain, fused):
        loss = picture_losses(model, family, plain_objective(family), batch, Asked(), dtype="fp32").sum()
        loss.backward()
        losses.append(loss.detach())
    assert len(ran) == GROUPS[name]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0)
    for (parameter_name, a), b in zip(fused.named_parameters(), plain.parameters(), strict=True):
        if a.requires_grad and b.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-5, msg=parameter_name)
