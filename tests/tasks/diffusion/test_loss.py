"""The loss is the one that diffusers' example scripts compute, written here from the pipelines' own functions, on the same draws."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler, FluxPipeline
from diffusers.training_utils import compute_snr

from isotype.precision import Precision
from isotype.tasks.choose import task_of
from isotype.tasks.diffusion.batches import generator_of
from isotype.tasks.diffusion.loss import fixed_levels, part_name, shift_of
from isotype.tasks.diffusion.pixels import Size, Window, pixels
from isotype.training.setup import settle


def plain_flux(model, batch):
    n, c, h, w = batch.latents.shape
    sigma = batch.sigma.view(-1, 1, 1, 1)
    noisy = (1.0 - sigma) * batch.latents + sigma * batch.noise
    ids = FluxPipeline._prepare_latent_image_ids(n, h // 2, w // 2, torch.device("cpu"), torch.float32)
    made = model(
        hidden_states=FluxPipeline._pack_latents(noisy, n, c, h, w), timestep=batch.sigma, guidance=None,
        pooled_projections=batch.text["pooled"], encoder_hidden_states=batch.text["text"],
        txt_ids=torch.zeros(batch.text["text"].shape[1], 3), img_ids=ids, return_dict=False,
    )[0]  # fmt: skip
    made = FluxPipeline._unpack_latents(made, height=h * 4, width=w * 4, vae_scale_factor=4)
    return torch.mean(((made.float() - (batch.noise - batch.latents).float()) ** 2).reshape(n, -1), 1).mean()


def plain_sd3(model, batch):
    sigma = batch.sigma.view(-1, 1, 1, 1)
    made = model(
        hidden_states=(1.0 - sigma) * batch.latents + sigma * batch.noise, timestep=batch.sigma * 1000,
        encoder_hidden_states=batch.text["text"], pooled_projections=batch.text["pooled"], return_dict=False,
    )[0]  # fmt: skip
    return torch.mean(((made.float() - (batch.noise - batch.latents).float()) ** 2).reshape(batch.rows, -1), 1).mean()


def plain_pixart(model, batch):
    """The loss of diffusers' text-to-image examples with PixArt's extra inputs and the variance left out."""
    scheduler = DDPMScheduler(beta_start=0.0001, beta_end=0.02, beta_schedule="linear")
    steps = (batch.sigma * 1000).round().long()
    side = torch.tensor([32.0, 32.0]).expand(batch.rows, 2)
    made = model(
        scheduler.add_noise(batch.latents, batch.noise, steps), encoder_hidden_states=batch.text["text"], timestep=steps,
        encoder_attention_mask=batch.text["mask"], added_cond_kwargs={"resolution": side, "aspect_ratio": torch.ones(batch.rows, 1)},
    ).sample.chunk(2, 1)[0]  # fmt: skip
    return F.mse_loss(made.float(), batch.noise.float())


def sdxl_prediction(model, batch, scheduler):
    steps = (batch.sigma * 1000).round().long()
    conditions = {"text_embeds": batch.text["pooled"], "time_ids": torch.tensor([[32, 32, 0, 0, 32, 32]] * batch.rows)}
    noisy = scheduler.add_noise(batch.latents, batch.noise, steps)
    return steps, model(noisy, steps, batch.text["text"], added_cond_kwargs=conditions, return_dict=False)[0]


def sdxl_scheduler(prediction):
    return DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", prediction_type=prediction)


def plain_sdxl(model, batch):
    _, made = sdxl_prediction(model, batch, sdxl_scheduler("epsilon"))
    return F.mse_loss(made.float(), batch.noise.float())


def plain_sdxl_v(model, batch):
    scheduler = sdxl_scheduler("v_prediction")
    steps, made = sdxl_prediction(model, batch, scheduler)
    return F.mse_loss(made.float(), scheduler.get_velocity(batch.latents, batch.noise, steps).float())


def weighted(scheduler, made, target, steps, *, v):
    snr = compute_snr(scheduler, steps)
    weights = torch.stack([snr, 5.0 * torch.ones_like(snr)], dim=1).min(dim=1)[0] / (snr + 1 if v else snr)
    return (F.mse_loss(made.float(), target.float(), reduction="none").mean((1, 2, 3)) * weights).mean()


def plain_sdxl_min_snr(model, batch):
    scheduler = sdxl_scheduler("epsilon")
    steps, made = sdxl_prediction(model, batch, scheduler)
    return weighted(scheduler, made, batch.noise, steps, v=False)


def plain_sdxl_v_min_snr(model, batch):
    scheduler = sdxl_scheduler("v_prediction")
    steps, made = sdxl_prediction(model, batch, scheduler)
    return weighted(scheduler, made, scheduler.get_velocity(batch.latents, batch.noise, steps), steps, v=True)


PLAIN = [
    ("flux", {}, plain_flux),
    ("sd3", {}, plain_sd3),
    ("pixart", {}, plain_pixart),
    ("sdxl", {}, plain_sdxl),
    *(
        pytest.param(*case, marks=pytest.mark.full)
        for case in [("sdxl_v", {}, plain_sdxl_v), ("sdxl", {"weighting": "min_snr"}, plain_sdxl_min_snr)]
    ),
    ("sdxl_v", {"weighting": "min_snr"}, plain_sdxl_v_min_snr),
]


@pytest.mark.parametrize(("kind", "settings", "plain"), PLAIN)
def test_the_loss_is_the_example_scripts_one(drawn, studio, kind, settings, plain):
    loaded = drawn(model=getattr(studio, kind), adapter={"kind": "none"}, images={"limit": 4}, diffusion=settings)
    task = task_of(loaded.config)
    basis = settle(task, loaded.sources)
    task.encode(basis.device)
    model, _ = task.build_model(basis.resolved.precision, basis.device, studio.sd3)
    batch = task.collate(task.feed().take(3))
    with torch.no_grad():
        ours = task.loss_sum(model, batch, dtype="fp32") / batch.weight
        theirs = plain(task.folder.denoiser(torch.float32).eval(), batch)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)


def test_steps_of_a_schedule_are_drawn_evenly(drawn, studio):
    task = task_of(drawn(model=studio.sdxl).config)
    task.check(Precision.preset("fp32"))
    drawn_steps = [task.objective.draw(generator_of("train", 0, i)) * 1000 for i in range(2000)]
    assert {round(step) - step for step in drawn_steps} == {0.0}
    assert min(drawn_steps) < 10
    assert 980 < max(drawn_steps) < 1000
    assert sum(drawn_steps) / 2000 == pytest.approx(500, rel=0.05)


def test_latents_are_the_vaes_shifted_and_scaled(drawn):
    loaded = drawn(images={"limit": 3, "eval_split": 0.0})
    task = task_of(loaded.config)
    settle(task, loaded.sources)
    task.encode(torch.device("cpu"))
    batch = task._fixed([(0, task.train_rows[0], 0.5)])
    found = task.folder.vae(torch.float32).encode(pixels(task.gathered.train[0].content.read(), Window(Size(32, 32)))[None])
    torch.testing.assert_close(batch.latents, (found.latent_dist.mean - 0.1) * 1.5)


def test_a_shift_by_resolution_is_the_pipelines(drawn):
    section = drawn().config.diffusion
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15)
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift

    mu = calculate_shift(1024, 256, 4096, 0.5, 1.15)
    ours = shift_of(section, scheduler.config, tokens=1024)
    theirs = float(scheduler.time_shift(mu, 1.0, torch.tensor(0.3, dtype=torch.float64)))
    assert ours * 0.3 / (1 + (ours - 1) * 0.3) == pytest.approx(theirs, rel=1e-9)


def test_fixed_levels_are_spread_over_time():
    assert fixed_levels(4) == [0.125, 0.375, 0.625, 0.875]
    assert [part_name(level, 4) for level in fixed_levels(4)] == ["t0_250", "t250_500", "t500_750", "t750_1000"]
