"""The loss is the one that diffusers' example scripts compute, written here from the pipelines' own
functions, on the same draws.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from benchmarks.diffusion_matrix import CLASSES, latent_channels
from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler, FluxPipeline
from diffusers.training_utils import compute_snr

from isotype.precision import PRESETS, Precision
from isotype.precision.apply import apply_precision, use_generate_dtype
from isotype.tasks.diffusion.families import Conditioning
from isotype.tasks.diffusion.loss import resolve_shift
from tests.api import Window, keep_time_exact, size_conditioning, time_embeddings
from tests.tasks.diffusion.models import built, draw
from tests.tasks.diffusion.test_families import flow, squared_error


def plain_flux(model, batch):
    noisy, target = flow(batch)
    n, c, h, w = noisy.shape
    ids = FluxPipeline._prepare_latent_image_ids(
        n, h // 2, w // 2, torch.device("cpu"), torch.float32
    )
    made = model(
        hidden_states=FluxPipeline._pack_latents(noisy, n, c, h, w), timestep=batch.sigma, guidance=None,
        pooled_projections=batch.text["pooled"], encoder_hidden_states=batch.text["text"],
        txt_ids=torch.zeros(batch.text["text"].shape[1], 3), img_ids=ids, return_dict=False,
    )[0]  # fmt: skip
    made = FluxPipeline._unpack_latents(made, height=h * 4, width=w * 4, vae_scale_factor=4)
    return squared_error(made, target)


def plain_sd3(model, batch):
    noisy, target = flow(batch)
    text, pooled = batch.text["text"], batch.text["pooled"]
    made = model(
        noisy,
        timestep=batch.sigma * 1000,
        encoder_hidden_states=text,
        pooled_projections=pooled,
        return_dict=False,
    )[0]
    return squared_error(made, target)


def plain_pixart(model, batch):
    """The loss of diffusers' text-to-image examples with PixArt's extra inputs and the variance
    left out.
    """
    scheduler = DDPMScheduler(beta_start=0.0001, beta_end=0.02, beta_schedule="linear")
    steps = (batch.sigma * 1000).round().long()
    side = torch.tensor([32.0, 32.0]).expand(batch.rows, 2)
    made = model(
        scheduler.add_noise(batch.latents, batch.noise, steps), encoder_hidden_states=batch.text["text"], timestep=steps,
        encoder_attention_mask=batch.text["mask"], added_cond_kwargs={"resolution": side, "aspect_ratio": torch.ones(batch.rows, 1)},
    ).sample.chunk(2, 1)[0]  # fmt: skip
    return F.mse_loss(made.float(), batch.noise.float())


def sdxl_prediction(model, batch, scheduler, ids=(32, 32, 0, 0, 32, 32)):
    steps = (batch.sigma * 1000).round().long()
    conditions = {"text_embeds": batch.text["pooled"], "time_ids": torch.tensor([ids] * batch.rows)}
    noisy = scheduler.add_noise(batch.latents, batch.noise, steps)
    return steps, model(
        noisy, steps, batch.text["text"], added_cond_kwargs=conditions, return_dict=False
    )[0]


def sdxl_scheduler(prediction):
    return DDPMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        prediction_type=prediction,
    )


def plain_sdxl_v_min_snr(model, batch):
    scheduler = sdxl_scheduler("v_prediction")
    steps, made = sdxl_prediction(model, batch, scheduler)
    snr = compute_snr(scheduler, steps)
    weights = torch.stack([snr, 5.0 * torch.ones_like(snr)], dim=1).min(dim=1)[0] / (snr + 1)
    target = scheduler.get_velocity(batch.latents, batch.noise, steps)
    return (
        F.mse_loss(made.float(), target.float(), reduction="none").mean((1, 2, 3)) * weights
    ).mean()


PLAIN = [
    ("flux", {}, plain_flux),
    ("sd3", {}, plain_sd3),
    ("pixart", {}, plain_pixart),
    ("sdxl_v", {"weighting": "min_snr"}, plain_sdxl_v_min_snr),
]


@pytest.mark.parametrize(("kind", "settings", "plain"), PLAIN)
def test_the_loss_is_the_example_scripts_one(drawn, studio, kind, settings, plain):
    loaded = drawn(
        model=getattr(studio, kind),
        adapter={"kind": "none"},
        images={"limit": 4},
        diffusion=settings,
    )
    task, model = built(loaded, studio.sd3)
    batch = task.collate(task.feed().take(3))
    with torch.no_grad():
        ours = task.loss_sum(model, batch, dtype="fp32") / batch.weight
        theirs = plain(task.run.folder.denoiser(torch.float32).eval(), batch)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)


def test_sdxl_is_told_where_a_larger_picture_was_cut(drawn, studio, tmp_path, monkeypatch):
    """60 rows of 96 columns fill 32 x 32 at 32 x 51: of 19 columns left over 5 lie behind a window
    at 0.75, before it in a mirror.
    """
    monkeypatch.setattr(
        "isotype.tasks.diffusion.encode.crop_windows",
        lambda size, crop, **_: [Window(size, x_share=0.75, y_share=0.1)],
    )
    data = tmp_path / "large"
    data.mkdir()
    draw("circle", "red").resize((96, 60)).save(data / "one.png")
    (data / "one.txt").write_text("a red circle on white\n")
    images = {
        "train": [{"name": str(data), "repeats": 16}],
        "eval_split": 0,
        "crop": 1,
        "flip": True,
    }
    loaded = drawn(model=studio.sdxl, adapter={"kind": "none"}, images=images)
    task, model = built(loaded, studio.sdxl)
    batch = next(
        b for b in (task.collate([placed]) for placed in task.feed().take(16)) if b.crop[0, 3] == 5
    )
    ids = (60, 96, 0, 5, 32, 32)
    assert size_conditioning(
        batch.latents, Conditioning(downscale=task.run.downscale, crop=batch.crop)
    ).tolist() == [[*ids]]
    with torch.no_grad():
        ours = task.loss_sum(model, batch, dtype="fp32")
        plain = task.run.folder.denoiser(torch.float32).eval()
        theirs, whole = (
            F.mse_loss(
                sdxl_prediction(plain, batch, sdxl_scheduler("epsilon"), told)[1], batch.noise
            )
            for told in (ids, (32, 32, 0, 0, 32, 32))
        )
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    assert abs(float(ours - whole)) > 1e-5 * float(whole), "the sizes reach the denoiser"


def test_a_shift_by_resolution_is_the_pipelines(drawn):
    section = drawn().config.diffusion
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15
    )
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift

    mu = calculate_shift(1024, 256, 4096, 0.5, 1.15)
    ours = resolve_shift(section, scheduler.config, tokens=1024)
    theirs = float(scheduler.time_shift(mu, 1.0, torch.tensor(0.3, dtype=torch.float64)))
    assert ours * 0.3 / (1 + (ours - 1) * 0.3) == pytest.approx(theirs, rel=1e-9)


# --- The embedding of the noise level has the same bits under every preset, in training and in a
# sample.


LEVELS = torch.linspace(0.0013, 0.9987, 7)


def predicted(model, *, family):
    shapes = family.text_shapes(model.config, 4)
    text = {
        name: torch.ones(7, *shape) if name == "mask" else torch.randn(7, *shape)
        for name, shape in shapes.items()
    }
    time = LEVELS if family.objectives == ("flow_matching",) else (LEVELS * 1000).long()
    family.predict(
        model,
        torch.randn(7, latent_channels(family, model.config), 8, 8),
        time,
        text,
        Conditioning(guidance=3.5),
    )


# name -> how it is made, how it is called, what it multiplies the level by where it rounds it
MODELS = {
    name: (make, partial(predicted, family=family), family.exact_time_scale)
    for name, (make, family) in CLASSES.items()
}


def embedded(model, call, *, sampling=False):
    seen = []
    for module in time_embeddings(model):
        module.register_forward_hook(lambda module, args, output: seen.append(output.clone()))
    with torch.no_grad():
        if sampling:
            with use_generate_dtype(model):
                call(model)
        else:
            call(model)
    return seen


@pytest.mark.parametrize(
    "name",
    [name if name == "Flux" else pytest.param(name, marks=pytest.mark.full) for name in MODELS],
)
def test_the_embedding_is_bit_identical_under_every_preset(name):
    make, call, scale = MODELS[name]
    reference = embedded(make(), call)
    assert len(reference) >= (2 if name == "Flux" else 1), "the guidance is embedded too"
    for preset in PRESETS:
        model = make().requires_grad_(False)
        if scale is not None:
            keep_time_exact(model, scale)
        apply_precision(model, Precision.preset(preset), device_type="cpu")
        for sampling in (False, True):
            found = embedded(model, call, sampling=sampling)[-len(reference) :]
            assert all(torch.equal(a, b) for a, b in zip(found, reference, strict=True)), (
                preset,
                sampling,
            )
