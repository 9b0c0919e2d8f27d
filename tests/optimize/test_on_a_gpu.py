"""Optimised models on a GPU: the original's loss, gradients and tokens, and a head whose logits
never exist.
"""

import copy

import pytest
import torch

from isotype.optimize import optimize
from tests.gpu import DEVICE, kernels, on_a_gpu
from tests.ops.trials import FACTOR, error
from tests.optimize.models import batch, tiny


def on_device(inputs):
    return {name: t.to(DEVICE) for name, t in inputs.items()}


def step(model, inputs, cast=None):
    model.zero_grad()
    with torch.autocast(DEVICE, cast or torch.bfloat16, enabled=cast is not None):
        loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), {
        n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
    }


def total(grads, truth):
    return error(
        torch.cat([g.double().flatten() for g in grads.values()]),
        torch.cat([truth[n].flatten() for n in grads]),
    )


@on_a_gpu
@pytest.mark.parametrize("cast", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_narrow_loss_and_gradients_are_as_near_to_fp64_as_the_originals(family, cast):
    dtype = torch.bfloat16 if cast is None else torch.float32
    model = tiny(family, dtype=dtype).to(DEVICE)
    mine, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    optimize(mine)
    inputs = on_device(batch())
    truth, true_grads = step(exact, inputs)
    theirs, their_grads = step(model, inputs, cast)
    with kernels():
        ours, our_grads = step(mine, inputs, cast)
    assert {n: g.dtype for n, g in our_grads.items()} == {
        n: g.dtype for n, g in their_grads.items()
    }
    assert abs(ours.double() - truth) <= FACTOR * abs(theirs.double() - truth) + 2e-2 * abs(truth)
    assert total(our_grads, true_grads) <= FACTOR * total(their_grads, true_grads)


@on_a_gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="counts the device's memory")
def test_the_logits_are_never_held():
    model = tiny("llama", vocab_size=128256, hidden_size=64).to(DEVICE, torch.bfloat16)
    optimize(model)
    ids = torch.randint(3, 1000, (4, 2048), device=DEVICE)
    peaks = []
    for frozen in (False, True):
        model.requires_grad_(not frozen)
        model.model.layers[0].input_layernorm.weight.requires_grad_()
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model(input_ids=ids, labels=ids).loss.backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    # 1 GiB of fp32 logits and half of it for their gradient; all of them would be 4.2 GB and as
    # much again
    assert max(peaks) < 2.2 * 2**30, peaks
