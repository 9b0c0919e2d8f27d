"""The gated MLP in one function: PEFT's results for every activation, kind of weight and member,
and its own code otherwise.
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from isotype.lora import fuse_lora
from tests.api import gated as placing

from .layers import FEATURES, adapted, assert_same, fused_nodes, inputs, nf4_linear, results

INNER = 80
ACTIVATIONS = {
    "silu_mul": F.silu,
    "gelu_mul exact": F.gelu,
    "gelu_mul tanh": lambda x: F.gelu(x, approximate="tanh"),
}


class Mlp(nn.Module):
    def __init__(self, kind="silu_mul", *, bias=True, nf4=False):
        super().__init__()

        def make(features, out):
            if not nf4:
                return nn.Linear(features, out, bias=bias)
            return nf4_linear(features=features, out=out, compute=torch.float32)

        self.gate_proj, self.up_proj, self.down_proj = (
            make(FEATURES, INNER),
            make(FEATURES, INNER),
            make(INNER, FEATURES),
        )
        self.act_fn = ACTIVATIONS[kind]
        self.is_loaded_in_4bit = nf4

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def optimized(model):
    """A copy, its MLP placed by structure, and what the manifest says of it."""
    made = copy.deepcopy(model)
    fuse_lora(made)
    placed = placing.place_gated_mlp("", made.base_model.model)
    return made, (placed.op, placed.reason)


def ran(model) -> int:
    """How often the one function runs in a call of the model."""
    return fused_nodes(model(inputs())).get("LoraMlp", 0)


CASES = {
    "ranks and scales": {
        "rank_pattern": {"up_proj": 2, "down_proj": 7},
        "alpha_pattern": {"gate_proj": 3, "down_proj": 11},
    },
    "down alone": {"target_modules": ["down_proj"]},
    "up and down with dropout": {"target_modules": ["up_proj", "down_proj"], "lora_dropout": 0.25},
}


def test_result_is_pefts_in_one_function(subtests):
    for case in CASES:
        with subtests.test(case):
            in_one_function(case)


def in_one_function(case):
    model = adapted(Mlp(nf4=case == "down alone"), **CASES[case])
    # a 4-bit layer fixes its compute dtype at its first call
    for layer in model.modules():
        if hasattr(layer, "compute_type_is_set"):
            layer.compute_type_is_set = True
    fused, (op, why) = optimized(model)
    assert (op, why) == ("lora_mlp", "silu_mul")
    assert_same(results(fused, inputs()), results(model, inputs()), relative=4e-6)
    assert ran(fused) == 1


def test_every_activation_with_trainable_weights():
    for kind, bias in zip(ACTIVATIONS, (False, True, False), strict=True):
        model = adapted(Mlp(kind, bias=bias))
        model.requires_grad_()
        fused, placed = optimized(model)
        assert placed == ("lora_mlp", kind)
        got = results(fused, inputs())
        assert_same(got, results(model, inputs()), relative=4e-6)
        assert len(got) == (14 if bias else 11)
        assert ran(fused) == 1


def test_saves_neither_the_activation_nor_the_product():
    model = adapted(Mlp(bias=False)).bfloat16()
    fused, _ = optimized(model)

    def saved(each):
        sizes = {}

        def pack(t):
            if not any(
                t.untyped_storage().data_ptr() == p.untyped_storage().data_ptr()
                for p in each.parameters()
            ):
                sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = each(inputs(torch.bfloat16, rows=64).requires_grad_())
        del y
        return sum(sizes.values())

    wide = 128 * INNER * 2
    # gate and up, x, and what a rank of 4 makes small; PEFT's holds gate, silu(gate), up and their
    # product at least
    assert saved(fused) < 2 * wide + 128 * FEATURES * 2 + wide / 2
    assert saved(model) > saved(fused) + 1.9 * wide


STATES = {
    "a hook on a layer": lambda mlp: mlp.up_proj.register_forward_hook(
        lambda module, args, output: output * 3
    ),
    "disabled": lambda mlp: mlp.down_proj.enable_adapters(False),
    "another forward": lambda mlp: setattr(
        mlp.down_proj, "forward", lambda x: type(mlp.down_proj).forward(mlp.down_proj, x) * 2
    ),
}


def test_a_state_that_is_not_plain_is_pefts(subtests):
    for state in STATES:
        with subtests.test(state):
            is_pefts(state)


def is_pefts(state):
    model = adapted(Mlp())
    fused, _ = optimized(model)
    before = results(fused, inputs())
    for each in (model, fused):
        STATES[state](each.base_model.model)
    fuse_lora(fused)
    assert_same(results(fused, inputs()), results(model, inputs()), relative=4e-6)
    assert not torch.equal(results(fused, inputs())["y"], before["y"])
    assert not ran(fused)
    if state == "a hook on a layer":
        assert optimized(model)[1] == (
            "silu_mul",
            "not with its LoRA layers in one function: a hook on a layer",
        )


def test_compiled_in_one_graph():
    model = adapted(Mlp())
    fused, _ = optimized(model)
    got = results(torch.compile(fused, backend="aot_eager", fullgraph=True), inputs())
    assert_same(
        {name.removeprefix("_orig_mod."): value for name, value in got.items()},
        results(model, inputs()),
        relative=4e-6,
    )
