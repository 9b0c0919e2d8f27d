"""`restore` takes out what `optimize` put in, and nothing that others have put around it since."""

from __future__ import annotations

import functools

import pytest
import torch

from isotype.optimize import optimize, restore
from isotype.optimize.instances import foreign
from tests.models import lora, quantised
from tests.optimize.models import batch, tiny


def made(kind):
    model = tiny("llama", attn_implementation="sdpa")
    if kind == "nf4":
        model = quantised(model)
    return model if kind == "plain" else lora(model, init_lora_weights=False)


def wrapped(model, seen):
    """Every module's forward, in a wrapper of a user's."""
    for name, module in model.named_modules():
        inner = module.forward

        @functools.wraps(inner)
        def forward(*args, inner=inner, name=name, **kwargs):
            seen.append(name)
            return inner(*args, **kwargs)

        module.forward = forward


@pytest.mark.parametrize("kind", ["plain", "nf4"])
def test_a_users_wrappers_stay_and_call_the_models_own_code(kind):
    model = made(kind)
    want = model(**batch(length=40)).loss.detach()
    optimize(model)
    seen = []
    wrapped(model, seen)
    wrappers = {name: vars(module)["forward"] for name, module in model.named_modules()}
    optimised = model(**batch(length=40)).loss.detach() * 1
    torch.testing.assert_close(optimised, want, rtol=2e-2, atol=2e-2)
    assert restore(model)
    seen.clear()
    assert torch.equal(model(**batch(length=40)).loss.detach(), want)
    assert len(set(seen)) > 10
    assert {name: vars(module)["forward"] for name, module in model.named_modules()} == wrappers
    assert all(foreign(module) for module in model.modules() if "forward" in vars(module))


@pytest.mark.parametrize(("kind", "order"), [("lora", "offload after"), ("plain", "offload before")])
def test_accelerates_offloading_is_preserved(kind, order):
    from accelerate import cpu_offload
    from accelerate.hooks import remove_hook_from_submodules

    model = made(kind)
    want = model(**batch(length=40)).loss.detach()
    if order == "offload after":
        optimize(model)
    cpu_offload(model, execution_device=torch.device("cpu"))
    if order == "offload before":
        optimize(model)
    with torch.no_grad():
        torch.testing.assert_close(model(**batch(length=40)).loss, want)
    restore(model)
    assert all(p.device.type == "meta" for p in model.parameters()), "still offloaded"
    assert any(hasattr(module, "_hf_hook") for module in model.modules())
    with torch.no_grad():
        assert torch.equal(model(**batch(length=40)).loss, want)
    remove_hook_from_submodules(model)
    assert torch.equal(model(**batch(length=40)).loss.detach(), want)
