"""Decoder layers whose two sums are ours: which families have the form, and that they compute what
their own code computes.
"""

import copy

import pytest
import torch
from benchmarks.size import calls_of_a_layer
from transformers import logging

from isotype.instance_method import get_forward_settings
from isotype.optimize import optimize
from tests.api import kernels_unavailable_reason, layers
from tests.models import assert_same_step, step
from tests.optimize.models import batch, tiny

logging.set_verbosity_error()

MORE = {
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "vaultgemma": {"query_pre_attn_scalar": 8},
}
FUSED = ("llama", "gemma2", "gemma3_text", "glm4", "granite", "gpt_oss", "vaultgemma")
AFTER = ("olmo2", "exaone4")
FEW = ("llama", "gemma2", "granite", "gpt_oss", "exaone4")
REST = tuple(name for name in (*FUSED, *AFTER) if name not in FEW)
LEFT = {
    "starcoder2": "it has 0 norms",
    "phi": "it has 0 norms",
    "cohere": "it has 1 norm ",
    "doge": "it has parameters of its own",
    "minimax": "for random inputs, its output differs from x + attention(x)",
    "jetmoe": "for random inputs, its output differs from x + attention(x)",
}


def pair(family, dtype=torch.float32):
    """The model as it is, and with every op."""
    model = tiny(family, dtype=dtype, **MORE.get(family, {})).train()
    mine = copy.deepcopy(model)
    return model, mine, optimize(mine)


def placed(manifest):
    return {(e.op, e.reason) for e in manifest.entries if e.part == layers.PART_NAME}


@pytest.mark.parametrize(
    "families", [FEW, pytest.param(REST, marks=pytest.mark.full)], ids=["few", "rest"]
)
def test_a_step_is_the_models_own(families, subtests):
    for family in families:
        with subtests.test(family):
            model, mine, manifest = pair(family)
            assert {op for op, _ in placed(manifest)} == {
                "add_rms_norm" if family in FUSED else "halves"
            }, str(manifest)
            assert_same_step(
                step(mine, **batch(), use_cache=False), step(model, **batch(), use_cache=False)
            )


def test_layers_of_another_form_run_their_own_code_for_a_reason(subtests):
    for family, why in LEFT.items():
        with subtests.test(family):
            _, mine, manifest = pair(family)
            found = placed(manifest)
            assert found, str(manifest)
            assert all(op is None and reason.startswith(why) for op, reason in found), found
            assert not any(
                isinstance(get_forward_settings(m), layers.LayerSettings) for m in mine.modules()
            )


@pytest.mark.skipif(bool(kernels_unavailable_reason()), reason="the count is that of the kernels")
def test_a_lora_layer_makes_no_more_python_calls_than_with_peft():
    """Each call adds to the time of a small layer, in every step."""
    assert calls_of_a_layer(optimize) <= calls_of_a_layer(lambda model: None)
