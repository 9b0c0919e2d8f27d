"""Blocks of diffusers' models recompute one by one, and the numbers stay those of a run without it."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("diffusers")

from tests.tasks.diffusion.models import flux_transformer, pixart_transformer, sd3_transformer, sdxl_unet

from isotype.precision import Precision
from isotype.precision.apply import apply_precision
from isotype.tasks.diffusion.families import Asked
from isotype.tasks.diffusion.families.flow import SD3, Flux
from isotype.tasks.diffusion.families.noise import SDXL, PixArtAlpha
from isotype.training.memory.recomputation import LAYERS, NONE, Checkpointing, apply_checkpointing, checkpointable

pytestmark = pytest.mark.full

MODELS = {
    "sd3": (sd3_transformer, SD3(), 2), "flux": (flux_transformer, Flux(), 2), "pixart": (pixart_transformer, PixArtAlpha(), 2),
    "sdxl": (sdxl_unet, SDXL(), 12),
}  # fmt: skip


def gradients(model, family):
    config, generator = model.config, torch.Generator().manual_seed(0)
    text = {
        name: torch.randn(2, *shape, generator=generator) if name != "mask" else torch.ones(2, *shape)
        for name, shape in family.text_shapes(config, 4).items()
    }
    time = torch.tensor([0.3, 0.8]) if family.objectives == ("flow_matching",) else torch.tensor([300, 800])
    made = family.predict(model.train(), torch.randn(2, 4, 8, 8, generator=generator), time, text, Asked())
    made.float().square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


class Counts:
    def __init__(self):
        self.calls = 0

    def __call__(self, module, args, output):
        self.calls += 1


@pytest.mark.parametrize(("kind", "preset"), zip(MODELS, ["fp32", "bf16-mixed"] * 2))
def test_recomputed_blocks_give_the_same_gradients(kind, preset):
    make, family, blocks = MODELS[kind]
    torch.manual_seed(0)
    plain = make()
    apply_precision(plain, Precision.preset(preset), device_type="cpu")
    recomputing = copy.deepcopy(plain)
    found = checkpointable(recomputing)
    assert len(found) == blocks
    apply_checkpointing(recomputing, Checkpointing(LAYERS, (0,), blocks))
    inner = [next(m for m in block.modules() if not list(m.children()) and m is not block) for block in (found[0], found[-1])]
    counts = [Counts(), Counts()]
    for module, count in zip(inner, counts):
        module.register_forward_hook(count)
    ours = gradients(recomputing, family)
    assert [count.calls for count in counts] == [2, 1], "the first block's modules run again in backward, the last one's do not"
    for a, b in zip(ours, gradients(plain, family), strict=True):
        assert torch.equal(a, b)
    apply_checkpointing(recomputing, Checkpointing(NONE))
    for p in recomputing.parameters():
        p.grad = None
    gradients(recomputing, family)
    assert [count.calls for count in counts] == [3, 2]
