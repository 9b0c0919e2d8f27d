"""The embedding of the noise level has the same bits under every preset, in training and in a sample."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from benchmarks.diffusion_matrix import CLASSES, latent_channels
from diffusers import ChromaTransformer2DModel, Flux2Transformer2DModel

from isotype.precision import PRESETS, Precision
from isotype.precision.apply import apply_precision, generating
from isotype.tasks.diffusion.denoiser import embeddings_of_time, keep_time_exact
from isotype.tasks.diffusion.families import Asked

LEVELS = torch.linspace(0.0013, 0.9987, 7)


def flux2():
    return Flux2Transformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=32,
        timestep_guidance_channels=16, axes_dims_rope=(4, 4, 4, 4),
    )  # fmt: skip


def chroma():
    return ChromaTransformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=32,
        axes_dims_rope=(4, 6, 6), approximator_num_channels=64, approximator_hidden_dim=32, approximator_layers=1,
    )  # fmt: skip


def called(model, *, ids):
    """A forward pass of a model that has no family here."""
    given = {"guidance": torch.full((7,), 3.5)} if ids == 4 else {}
    model(
        hidden_states=torch.randn(7, 16, 16), encoder_hidden_states=torch.randn(7, 4, 32), timestep=LEVELS,
        img_ids=torch.zeros(16, ids), txt_ids=torch.zeros(4, ids), **given,
    )  # fmt: skip


def predicted(model, *, family):
    shapes = family.text_shapes(model.config, 4)
    text = {name: torch.ones(7, *shape) if name == "mask" else torch.randn(7, *shape) for name, shape in shapes.items()}
    time = LEVELS if family.objectives == ("flow_matching",) else (LEVELS * 1000).long()
    family.predict(model, torch.randn(7, latent_channels(family, model.config), 8, 8), time, text, Asked(guidance=3.5))


# name -> how it is made, how it is called, what it multiplies the level by where it rounds it
MODELS = {name: (make, partial(predicted, family=family), family.time_scale) for name, (make, family) in CLASSES.items()}
MODELS |= {"Flux.2": (flux2, partial(called, ids=4), 1000.0), "Chroma": (chroma, partial(called, ids=3), 1000.0)}


def embedded(model, call, *, sampling=False):
    seen = []
    for module in embeddings_of_time(model):
        module.register_forward_hook(lambda module, args, output: seen.append(output.clone()))
    with torch.no_grad():
        if sampling:
            with generating(model):
                call(model)
        else:
            call(model)
    return seen


@pytest.mark.parametrize("name", [name if name in ("SD3", "Flux") else pytest.param(name, marks=pytest.mark.full) for name in MODELS])
def test_the_embedding_is_bit_identical_under_every_preset(name):
    make, call, scale = MODELS[name]
    reference = embedded(make(), call)
    assert len(reference) >= (2 if name in ("Flux", "Flux.2") else 1), "the guidance is embedded too"
    for preset in PRESETS:
        model = make().requires_grad_(False)
        if scale is not None:
            keep_time_exact(model, scale)
        apply_precision(model, Precision.preset(preset), device_type="cpu")
        for sampling in (False, True):
            found = embedded(model, call, sampling=sampling)[-len(reference) :]
            assert all(torch.equal(a, b) for a, b in zip(found, reference, strict=True)), (preset, sampling)


# Flux.2 rounds to the dtype of its input, which is fp32 here
@pytest.mark.parametrize("name", [name for name, (_, _, scale) in MODELS.items() if scale is not None and name != "Flux.2"])
def test_alone_it_rounds_its_noise_levels(name):
    """Should diffusers stop rounding, this says that the mend is no longer needed."""
    make, call, _ = MODELS[name]
    model = make().requires_grad_(False)
    apply_precision(model, Precision.preset("bf16-lora"), device_type="cpu")
    assert not torch.equal(embedded(model, call)[0], embedded(make(), call)[0])
