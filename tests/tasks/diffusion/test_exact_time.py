"""The embedding of the noise level has the same bits under every preset, in training and in a sample."""

from functools import partial

import pytest
import torch
from benchmarks.diffusion_matrix import CLASSES, REFUSED, RESULT, TRAINS, latent_channels

from isotype.precision import PRESETS, Precision
from isotype.precision.apply import apply_precision, generating
from isotype.tasks.diffusion.denoiser import embeddings_of_time, keep_time_exact
from isotype.tasks.diffusion.families import Asked

LEVELS = torch.linspace(0.0013, 0.9987, 7)


def predicted(model, *, family):
    shapes = family.text_shapes(model.config, 4)
    text = {name: torch.ones(7, *shape) if name == "mask" else torch.randn(7, *shape) for name, shape in shapes.items()}
    time = LEVELS if family.objectives == ("flow_matching",) else (LEVELS * 1000).long()
    family.predict(model, torch.randn(7, latent_channels(family, model.config), 8, 8), time, text, Asked(guidance=3.5))


# name -> how it is made, how it is called, what it multiplies the level by where it rounds it
MODELS = {name: (make, partial(predicted, family=family), family.time_scale) for name, (make, family) in CLASSES.items()}


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
    assert len(reference) >= (2 if name == "Flux" else 1), "the guidance is embedded too"
    for preset in PRESETS:
        model = make().requires_grad_(False)
        if scale is not None:
            keep_time_exact(model, scale)
        apply_precision(model, Precision.preset(preset), device_type="cpu")
        for sampling in (False, True):
            found = embedded(model, call, sampling=sampling)[-len(reference) :]
            assert all(torch.equal(a, b) for a, b in zip(found, reference, strict=True)), (preset, sampling)


# --- A slice of benchmarks/diffusion_matrix.py: a cell a preset; the whole table is in benchmarks/results.


def test_the_committed_table_has_every_cell_and_no_failure():
    rows = [line for line in RESULT.read_text().splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + 2 * len(CLASSES)
    cells = [cell.strip() for row in rows[1:] for cell in row.strip("| ").split("|")[2:]]
    assert len(cells) == 2 * len(CLASSES) * len(PRESETS)
    assert {cell.split()[0] for cell in cells} == {TRAINS, REFUSED}
    assert all(len(cell.split()) == 2 for cell in cells if cell.startswith(REFUSED))
