"""Blocks of diffusers' models recompute one by one, and the gradients stay those of a run without it."""

import copy

import pytest
import torch

pytest.importorskip("diffusers")

from benchmarks.diffusion_matrix import CLASSES, plain_objective, random_batch

from isotype.precision import PRESETS
from isotype.tasks.diffusion.families import Asked
from isotype.tasks.diffusion.loss import picture_losses
from isotype.training.memory.recomputation import LAYERS, Checkpointing, apply_checkpointing, checkpointable

pytestmark = pytest.mark.full


@pytest.mark.parametrize("kind", ["SD3", "Flux", "PixArt", "SDXL U-Net"])
def test_recomputed_blocks_give_the_same_gradients(kind):
    make, family = CLASSES[kind]
    torch.manual_seed(0)
    plain = make().train()
    recomputing = copy.deepcopy(plain)
    blocks = checkpointable(recomputing)
    apply_checkpointing(recomputing, Checkpointing(LAYERS, (0,), len(blocks)))
    calls = []
    for number in (0, -1):
        inner = next(m for m in blocks[number].modules() if not list(m.children()) and m is not blocks[number])
        inner.register_forward_hook(lambda *_, number=number: calls.append(number))
    batch = random_batch(family, plain.config, PRESETS["fp32"])
    for model in (plain, recomputing):
        picture_losses(model, family, plain_objective(family), batch, Asked(), dtype="fp32").sum().backward()
    assert sorted(calls) == [-1, 0, 0], "the first block's modules run again in backward, the last one's do not"
    for ours, theirs in zip(recomputing.parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None and theirs.grad is None) or torch.equal(ours.grad, theirs.grad)
