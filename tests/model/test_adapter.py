"""`model.lora_branch`: refused where it would have no effect, and what it reaches."""

from __future__ import annotations

import pytest

from isotype.config.load import load
from isotype.environment.hardware import detect
from isotype.errors import UsageError
from isotype.lora.call import call_of
from isotype.lora.plain import lora_layers
from isotype.model.adapter import check_branch
from isotype.tasks.language.outline import outline
from isotype.training.setup import resolve_precision
from tests.models import tiny


def resolved(*settings, preset="bf16-lora"):
    loaded = load(None, ["model.lora_branch=fp32", *settings], preset=preset)
    return loaded.config, resolve_precision(loaded.config, loaded.sources, detect("cpu")).precision


@pytest.mark.parametrize(
    ("settings", "preset", "message"),
    [
        (["adapter.kind=none"], "bf16-mixed", "no effect with adapter.kind: none"),
        (["model.optimize=false"], "bf16-lora", "no effect with model.optimize: false"),
        ([], "fp32", "no effect with precision.compute: fp32"),
    ],
)
def test_a_branch_without_effect_is_refused(settings, preset, message):
    with pytest.raises(UsageError, match=message):
        check_branch(*resolved(*settings, preset=preset))


@pytest.mark.parametrize("wanted", ["fp32", "compute"])
def test_every_adapter_of_a_run_has_it(wanted):
    config, precision = resolved(f"model.lora_branch={wanted}")
    check_branch(config, precision)
    made = outline(tiny("llama").config, config, precision, device_type="cpu")
    layers = [layer for _, layer in lora_layers(made.model)]
    assert len(layers) == 14
    assert {call_of(layer, layer.weight).branch_fp32 for layer in layers} == {wanted == "fp32"}
