"""An adapter's products are judged by `model.lora_branch`, whoever computes them."""

from __future__ import annotations

import types

import pytest
import torch

from isotype.observe import Observer
from isotype.optimize import optimize
from isotype.precision import PRESETS
from isotype.precision.apply import use_generate_dtype
from tests.models import lora, tiny
from tests.observe.run import BATCH, set_up, watched_step

BF16 = PRESETS["bf16-lora"]


def multiplying_in(dtype):
    """A LoRA model whose first adapter matrices multiply in `dtype`, whatever autocast says."""

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return torch.nn.functional.linear(x.to(dtype), self.weight.to(dtype)).to(x.dtype)

    model = lora(tiny(), init_lora_weights=False)
    for name, module in model.named_modules():
        if name.endswith("lora_A.default"):
            module.forward = types.MethodType(forward, module)
    return model


def violations_of(model, branch):
    run = set_up(model, BF16)
    run.observer = Observer(model, BF16, lora_branch=branch)
    return watched_step(run, 1).violations


@pytest.mark.parametrize(
    ("dtype", "branch", "word"),
    [
        (torch.bfloat16, "fp32", "bf16"),
        (torch.float32, "compute", "fp32"),
        (torch.float64, "fp32", "fp64"),
    ],
)
def test_products_outside_the_branchs_dtype_are_violations(dtype, branch, word):
    found = violations_of(multiplying_in(dtype), branch)
    assert any(
        "lora_A.default" in finding.message and finding.observed == word for finding in found
    )


@pytest.mark.parametrize(("dtype", "branch"), [(torch.bfloat16, "compute"), (torch.float32, None)])
def test_products_in_the_branchs_dtype_are_none(dtype, branch):
    assert [finding.message for finding in violations_of(multiplying_in(dtype), branch)] == []


def test_a_family_whose_adapters_have_no_op_does_not_have_the_branch_in_fp32():
    """GPT-2's Conv1D: PEFT's own code runs, under autocast."""
    model = lora(tiny("gpt2", n_embd=32, n_layer=2, n_head=4, n_positions=128, n_inner=48))
    optimize(model, BF16, lora_branch="fp32")
    found = violations_of(model, "fp32")
    assert any(
        "lora_A.default multiplies in bf16, declared fp32" in finding.message for finding in found
    )
    assert {finding.fix for finding in found} == {"model.lora_branch: compute"}


def test_ops_compute_the_branch_in_fp32():
    model = lora(tiny(), lora_dropout=0.1)
    optimize(model, BF16, lora_branch="fp32")
    run = set_up(model, BF16)
    run.observer = Observer(model, BF16, lora_branch="fp32")
    model.train()
    seen = watched_step(run, 1)
    assert seen.violations == []
    assert set(seen.dtypes["lora_branch"]) == {"fp32"}
    model.eval()
    with torch.no_grad(), use_generate_dtype(model), run.observer.watch(0, role="generate") as made:
        model.generate(
            input_ids=BATCH.input_ids[:1, :5],
            max_new_tokens=2,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
    assert made.violations == []
