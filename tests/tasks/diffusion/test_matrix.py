"""A slice of benchmarks/diffusion_matrix.py: a cell a preset; the whole table is in benchmarks/results."""

from __future__ import annotations

import pytest
import torch
from benchmarks.diffusion_matrix import CLASSES, REFUSED, RESULT, TRAINS, plain_objective, random_batch, try_step

from isotype.config.load import load
from isotype.precision import PRESETS
from isotype.tasks.diffusion.denoiser import built
from isotype.tasks.diffusion.families import Asked
from isotype.tasks.diffusion.loss import picture_losses

SLICE = [
    ("SD3", "bf16-lora", True), ("Flux", "bf16-pure", True), ("PixArt", "nf4-lora", False), ("SDXL U-Net", "fp16-mixed", True),
    ("Qwen-Image", "bf16-lora", False),
]  # fmt: skip


@pytest.mark.parametrize(("name", "preset", "full"), SLICE)
def test_a_step_trains_or_is_refused_with_its_code(name, preset, full):
    make, family = CLASSES[name]
    cell = try_step(make, family, preset, full=full)
    if full and preset in ("bf16-lora", "nf4-lora"):
        assert (cell.status, cell.detail) == (REFUSED, {"bf16-lora": "PR012", "nf4-lora": "PR003"}[preset])
    else:
        assert cell.status == TRAINS, cell


@pytest.mark.parametrize("name", [name if name in ("SD3", "Flux") else pytest.param(name, marks=pytest.mark.full) for name in CLASSES])
def test_every_layer_that_gets_an_adapter_has_a_gradient_or_is_known_to_be_unused(name):
    """SD3 and Qwen-Image drop what their last block makes of the text: no reason for a warning in each of their runs."""
    make, family = CLASSES[name]
    torch.manual_seed(0)
    denoiser, precision = make(), PRESETS["fp32"]
    config = load(None, ["adapter.r=4", "model.device=cpu"]).config
    model, manifest = built(denoiser, family, config, precision, device_type="cpu")
    trained = {full: p for full, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for full, weight in trained.items():
            if "lora_B" in full:  # zero at first, so that A has no gradient
                weight.normal_()
    batch = random_batch(family, denoiser.config, precision)
    picture_losses(model, family, plain_objective(family), batch, Asked(), dtype="fp32").sum().backward()
    lost = {full for full, p in trained.items() if p.grad is None or not p.grad.any()}
    assert lost == {full for full in trained if any(f".{layer}." in full for layer in manifest.unused)}
    assert bool(manifest.unused) == (name in ("SD3", "Qwen-Image"))


def test_the_committed_table_has_every_cell_and_no_failure():
    rows = [line for line in RESULT.read_text().splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + 2 * len(CLASSES)
    cells = [cell.strip() for row in rows[1:] for cell in row.strip("| ").split("|")[2:]]
    assert len(cells) == 2 * len(CLASSES) * len(PRESETS)
    assert {cell.split()[0] for cell in cells} == {TRAINS, REFUSED}
    assert all(len(cell.split()) == 2 for cell in cells if cell.startswith(REFUSED))
