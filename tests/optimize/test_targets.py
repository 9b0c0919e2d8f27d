"""A causal LM that is given targets: its head computes the loss, the same as that of its logits,
and no logits exist.
"""

import copy

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from isotype import optimize, restore
from isotype.precision import PRESETS
from isotype.precision.apply import apply_precision
from isotype.tasks.language.batches import collate, next_tokens
from tests.api import Targets, compute_loss, takes_targets
from tests.models import lora, rows, tiny

BATCH = collate(rows(4), pad_id=0)
INPUTS = BATCH.inputs


def gradients(model, loss):
    model.zero_grad()
    loss.sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


class Shifted(LlamaForCausalLM):
    """Adds to its logits, which is no scale and no softcap."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits + 0.5
        return output


def test_the_heads_loss_is_that_of_the_logits(monkeypatch, subtests):
    for family, each in (("llama", True), ("gemma2", False), ("cohere", False), ("granite", True)):
        with subtests.test(family), monkeypatch.context() as patch:
            as_of_the_logits(family, each, patch)


def as_of_the_logits(family, each, patch):
    model = tiny(family, **({"logits_scaling": 3.0} if family == "granite" else {}))
    targets = next_tokens(BATCH, every_row=not each)
    targets = Targets(targets.classes, targets.rows, divisor=None if each else 7, per_row=each)
    wanted = targets.loss_from_logits(model(**INPUTS).logits)
    theirs = gradients(model, wanted)
    optimize(model)
    assert takes_targets(model)
    patch.setattr(F, "cross_entropy", None)  # of logits
    output = model(**INPUTS, targets=targets)
    torch.testing.assert_close(output.loss, wanted)
    assert output.logits.numel() == 0
    torch.testing.assert_close(gradients(model, output.loss), theirs, rtol=1e-4, atol=1e-5)
    assert restore(model)
    assert not takes_targets(model)


def test_another_forward_gets_logits_and_the_manifest_says_why():
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    model = Shifted(LlamaConfig(**sizes, pad_token_id=0))
    targets = next_tokens(BATCH, every_row=True)
    wanted = compute_loss(model, INPUTS, targets)
    (entry,) = [entry for entry in optimize(model).entries if entry.part == "head"]
    assert not takes_targets(model)
    assert (
        entry.reason
        == "deferred logits; takes no targets: its forward does more to the logits than a scale and a softcap"
    )
    torch.testing.assert_close(compute_loss(model, INPUTS, targets), wanted)


def test_wrappers_of_adapter_and_precision_hand_targets_on():
    model = lora(tiny("gemma2", dtype=torch.bfloat16))
    optimize(model, PRESETS["bf16-lora"])
    apply_precision(model, PRESETS["bf16-lora"], device_type="cpu")
    targets = Targets(next_tokens(BATCH, every_row=True).classes, divisor=5)
    loss = compute_loss(model, INPUTS, targets)
    assert (loss.dtype, takes_targets(model)) == (torch.float32, True)
    found = copy.deepcopy(model)
    assert torch.equal(compute_loss(found, INPUTS, targets), loss)
    torch.testing.assert_close(
        targets.loss_from_logits(model(**INPUTS).logits.float()), loss, rtol=1e-2, atol=0.0
    )
