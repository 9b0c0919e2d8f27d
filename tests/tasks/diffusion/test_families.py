"""Each family: loss and LoRA gradients equal those of diffusers' own pieces in fp32 on the same draws, diffusers loads its file, and a
picture is drawn."""

import json
import re
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
from diffusers import ChromaPipeline, DDPMScheduler, Flux2KleinPipeline, QwenImagePipeline

from isotype.errors import UsageError
from isotype.tasks.choose import task_of, train
from isotype.tasks.diffusion.batches import Batch
from isotype.tasks.diffusion.families import FAMILIES, REFUSED
from isotype.tasks.diffusion.pipeline import PipelineFolder
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


def plain_z_image(model, batch):
    noisy, target = flow(batch)
    texts = [one[:length] for one, length in zip(batch.text["text"], batch.lengths)]
    made = model(list(noisy.unsqueeze(2).unbind(0)), (1000 - batch.sigma * 1000) / 1000, texts, return_dict=False)[0]
    return squared_error(-torch.stack([one.float() for one in made]).squeeze(2), target)


def plain_klein(model, batch):
    noisy, target = flow(batch)
    n, _, h, w = noisy.shape
    made = model(
        hidden_states=Flux2KleinPipeline._pack_latents(noisy), timestep=batch.sigma, guidance=None,
        encoder_hidden_states=batch.text["text"], txt_ids=Flux2KleinPipeline._prepare_text_ids(batch.text["text"]),
        img_ids=Flux2KleinPipeline._prepare_latent_ids(noisy), return_dict=False,
    )[0]  # fmt: skip
    return squared_error(made.transpose(1, 2).reshape(n, -1, h, w), target)


def plain_chroma(model, batch):
    noisy, target = flow(batch)
    n, c, h, w = noisy.shape
    mask = ChromaPipeline._prepare_attention_mask(None, n, h * w // 4, None, batch.text["mask"])
    made = model(
        hidden_states=ChromaPipeline._pack_latents(noisy, n, c, h, w), timestep=batch.sigma, encoder_hidden_states=batch.text["text"],
        txt_ids=torch.zeros(batch.text["text"].shape[1], 3), attention_mask=mask,
        img_ids=ChromaPipeline._prepare_latent_image_ids(n, h // 2, w // 2, torch.device("cpu"), torch.float32), return_dict=False,
    )[0]  # fmt: skip
    return squared_error(ChromaPipeline._unpack_latents(made, h * 4, w * 4, 4), target)


def plain_sd1(model, batch):
    scheduler = DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
    steps = (batch.sigma * 1000).round().long()
    made = model(scheduler.add_noise(batch.latents, batch.noise, steps), steps, batch.text["text"], return_dict=False)[0]
    return squared_error(made, batch.noise)


def plain_sana(model, batch):
    noisy, target = flow(batch)
    made = model(
        noisy, encoder_hidden_states=batch.text["text"], encoder_attention_mask=batch.text["mask"], timestep=batch.sigma * 1000,
        return_dict=False,
    )[0]  # fmt: skip
    return squared_error(made, target)


def plain_auraflow(model, batch):
    noisy, target = flow(batch)
    return squared_error(model(noisy, encoder_hidden_states=batch.text["text"], timestep=batch.sigma, return_dict=False)[0], target)


PLAIN = {
    "qwen": plain_qwen, "z_image": plain_z_image, "klein": plain_klein, "chroma": plain_chroma, "sd1": plain_sd1, "sana": plain_sana,
    "auraflow": plain_auraflow,
}  # fmt: skip


def loss_and_grads(plain, model, batch, names):
    model.zero_grad()
    loss = plain(model, batch)
    loss.backward()
    found = dict(model.named_parameters())
    grads = torch.cat([found[name.removeprefix("base_model.model.")].grad.flatten() for name in names])
    return loss.detach(), grads.clone()


def in_fp64(batch):
    text = {name: tensor.double() for name, tensor in batch.text.items()}
    return replace(batch, latents=batch.latents.double(), noise=batch.noise.double(), sigma=batch.sigma.double(), text=text)


def relative(found, exact):
    return float((found.double() - exact.double()).norm() / exact.double().norm())


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
    learnt = [name for name in trained if name not in without]
    theirs, plain_grads = loss_and_grads(PLAIN[family], plain, batch, learnt)
    _, exact = loss_and_grads(PLAIN[family], plain.double(), in_fp64(batch), learnt)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    grads = torch.cat([trained[name].grad.flatten() for name in learnt])
    allowed = max(1e-6, 2 * relative(plain_grads, exact))  # where diffusers' own fp32 is further from fp64
    assert relative(grads, exact) < allowed

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


def test_the_page_names_what_trains():
    spec = spec_from_file_location("pipelines", Path(__file__).parents[3] / "docs/pipelines.py")
    pipelines = module_from_spec(spec)
    spec.loader.exec_module(pipelines)
    assert pipelines.PAGE.read_text(encoding="utf-8") == pipelines.page(), "python docs/pipelines.py --write"


@pytest.mark.parametrize("name", ["FluxKontextPipeline", "WanPipeline", "NoSuchPipeline"])
def test_another_pipeline_is_refused_by_name(tmp_path, name):
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": name}))
    reason = REFUSED.get(name, "is not supported: expected one of")
    with pytest.raises(UsageError, match=f"{name}.*{re.escape(reason)}"):
        PipelineFolder.open(str(tmp_path))
    assert not REFUSED.keys() & FAMILIES.keys()
