"""The embedding of the noise level has the same bits under every preset, in training and in a sample."""

from __future__ import annotations

import pytest
import torch

from isotype.precision import PRESETS, Precision
from isotype.precision.apply import apply_precision, generating
from isotype.tasks.diffusion.exact_time import embeddings_of_time, keep_time_exact
from isotype.tasks.diffusion.families import Asked
from isotype.tasks.diffusion.families.flux import Flux
from isotype.tasks.diffusion.families.sd3 import SD3
from tests.tasks.diffusion.models import flux_transformer, sd3_transformer

LEVELS = torch.linspace(0.0013, 0.9987, 7)


def embedded(model, family, *, sampling=False):
    seen = []
    for module in embeddings_of_time(model):
        module.register_forward_hook(lambda module, args, output: seen.append(output.clone()))
    text = {"text": torch.randn(7, 4, 32), "pooled": torch.randn(7, model.config.pooled_projection_dim)}
    with torch.no_grad():
        if sampling:
            with generating(model):
                family.predict(model, torch.randn(7, 4, 8, 8), LEVELS, text, Asked(guidance=3.5))
        else:
            family.predict(model, torch.randn(7, 4, 8, 8), LEVELS, text, Asked(guidance=3.5))
    return seen


def made(kind, preset=None):
    model = {"sd3": sd3_transformer, "flux": flux_transformer, "flux-dev": lambda: flux_transformer(guidance=True)}[kind]()
    if kind != "sd3" and preset is not None:
        keep_time_exact(model, Flux.time_scale)
    if preset is not None:
        apply_precision(model.requires_grad_(False), Precision.preset(preset), device_type="cpu")
    return model


@pytest.mark.parametrize("kind", ["sd3", "flux", "flux-dev"])
@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "nf4-lora"])
def test_the_embedding_is_bit_identical_under_every_preset(kind, preset):
    family = SD3() if kind == "sd3" else Flux()
    reference = embedded(made(kind), family)
    assert len(reference) == (2 if kind == "flux-dev" else 1)
    for sampling in (False, True):
        found = embedded(made(kind, preset), family, sampling=sampling)
        assert all(torch.equal(a, b) for a, b in zip(found, reference, strict=True))


def test_flux_alone_rounds_its_noise_levels():
    """Should diffusers stop rounding, this says that the mend is no longer needed."""
    model = flux_transformer().requires_grad_(False)
    apply_precision(model, Precision.preset("bf16-lora"), device_type="cpu")
    assert not torch.equal(embedded(model, Flux())[0], embedded(made("flux"), Flux())[0])
