"""Each family: loss and LoRA gradients equal those of diffusers' own pieces in fp32 on the same draws, diffusers loads its file, and a
picture is drawn."""

from __future__ import annotations

import pytest
import torch
from diffusers import QwenImagePipeline

from isotype.tasks.choose import task_of, train
from isotype.tasks.diffusion.batches import Batch
from isotype.tasks.diffusion.result import load_result, save_lora
from isotype.training.setup import settle


def flow(batch: Batch):
    """noisy latents, and the velocity from latent to noise"""
    sigma = batch.sigma.view(-1, 1, 1, 1)
    return (1.0 - sigma) * batch.latents + sigma * batch.noise, batch.noise - batch.latents


def squared_error(made, target):
    return torch.mean(((made.float() - target.float()) ** 2).reshape(len(target), -1), 1).mean()


def plain_qwen(model, batch):
    noisy, target = flow(batch)
    n, c, h, w = noisy.shape
    made = model(
        hidden_states=QwenImagePipeline._pack_latents(noisy, n, c, h, w), timestep=batch.sigma, guidance=None,
        encoder_hidden_states=batch.text["text"], encoder_hidden_states_mask=batch.text["mask"],
        img_shapes=[[(1, h // 2, w // 2)]] * n, return_dict=False,
    )[0]  # fmt: skip
    return squared_error(QwenImagePipeline._unpack_latents(made, h * 4, w * 4, 4)[:, :, 0], target)


PLAIN = {"qwen": plain_qwen}


@pytest.mark.parametrize("family", PLAIN)
def test_a_family_learns_as_diffusers_pieces_do(drawn, studio, tmp_path, family):
    loaded = drawn(model=getattr(studio, family), images={"limit": 6, "caption_dropout": 0.5}, run={"samples": ["a red circle on white"]})
    task = task_of(loaded.config)
    basis = settle(task, loaded.sources)
    precision = basis.resolved.precision
    task.encode(basis.device)
    model, _ = task.build_model(precision, basis.device, tmp_path)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
    batch = task.collate(task.feed().take(3))
    ours = task.loss_sum(model, batch, dtype="fp32") / batch.weight
    ours.backward()
    unused = task.folder.family.unused(model.get_base_model())
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    without = [name for name, p in trained.items() if p.grad is None or not p.grad.any()]
    assert all(any(part in name for part in unused) for name in without), without

    save_lora(model, tmp_path, precision, task.folder)
    plain = task.folder.denoiser(torch.float32)
    pipe = task.folder.pipeline_for_sampling(plain, None)
    pipe.load_lora_weights(tmp_path, adapter_name="default")
    plain = getattr(pipe, task.folder.denoiser_part).float()
    theirs = PLAIN[family](plain, batch)
    theirs.backward()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    found = dict(plain.named_parameters())
    for name, p in trained.items():
        if p.grad is not None and p.grad.any():
            theirs_grad = found[name.removeprefix("base_model.model.")].grad
            torch.testing.assert_close(p.grad, theirs_grad, rtol=0, atol=2e-6 * float(theirs_grad.abs().max()))

    again = load_result(tmp_path, task.folder, loaded.config, precision, basis.device)
    with torch.no_grad():
        torch.testing.assert_close(task.loss_sum(again, batch, dtype="fp32") / batch.weight, ours.detach(), rtol=1e-6, atol=0)
    (picture,) = task.sample(model, basis.device)
    assert picture.size == 32


@pytest.mark.full
@pytest.mark.parametrize("family", PLAIN)
@pytest.mark.parametrize("preset", ["bf16-lora", "nf4-lora"])
def test_a_family_trains_from_a_folder(drawn, studio, family, preset):
    assert train(drawn(model=getattr(studio, family), precision={"preset": preset})) == 0
