"""Every state a PEFT layer can be in: fused or PEFT's own code, said in the manifest, and always
PEFT's result.
"""

import copy

import peft
import torch
from torch import nn

from isotype.lora import fuse_lora, unfuse_lora

from .layers import (
    Checkpointed,
    adapted,
    assert_same,
    fused_nodes,
    inputs,
    layer_of,
    nf4_linear,
    results,
)


def fused(model) -> int:
    """How many fused functions a call of the model runs."""
    return sum(fused_nodes(model(inputs())).values())


def fused_copy(model):
    made = copy.deepcopy(model)
    fuse_lora(made)
    return made


VARIED = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "dropout": {"lora_dropout": 0.3},
    "all dropped": {"lora_dropout": 0.999},
    "dora": {"use_dora": True},
    "lora_bias": {"lora_bias": True},
    "trainable bias": {"bias": "all"},
}


def test_output_and_gradients_of_each_configuration_are_pefts(subtests):
    for name, config in VARIED.items():
        with subtests.test(name):
            model = adapted(**config)
            twin = fused_copy(model)
            assert_same(results(twin, inputs()), results(model, inputs()), relative=1e-5)
            plain = "lora_bias" not in config
            assert fused(twin) == plain
            (line,) = fuse_lora(model)
            assert line.op == (
                ("lora_dora" if "use_dora" in config else "lora_linear") if plain else None
            )
            assert bool(line.reason) != plain


def test_disabled_merged_switched_replaced_and_back():
    model = adapted()
    second = peft.LoraConfig(r=2, target_modules=["proj"], init_lora_weights=False)
    model.add_adapter("second", second)
    twin = fused_copy(model)

    def same(runs: bool) -> None:
        assert_same(results(twin, inputs()), results(model, inputs()))
        assert fused(twin) == runs

    same(True)
    with model.disable_adapter(), twin.disable_adapter():
        same(False)
    same(True)
    for each in (model, twin):
        each.set_adapter("second")
    same(True)
    for each in (model, twin):
        each.base_model.set_adapter(["default", "second"])
    same(False)
    assert "several" in fuse_lora(twin)[0].reason
    for each in (model, twin):
        each.set_adapter("default")
        each.merge_adapter()
    same(False)
    for each in (model, twin):
        each.unmerge_adapter()
    same(True)
    for each in (model, twin):
        each.set_adapter("second")
        each.delete_adapter("second")
        torch.manual_seed(4)
        each.add_adapter(
            "second",
            peft.LoraConfig(r=3, target_modules=["proj"], init_lora_weights=False, use_dora=True),
        )
        each.set_adapter("second")
    same(True)


def test_a_hook_is_honoured_once_the_layer_is_looked_at():
    for part in ("base_layer", "lora_A"):
        honoured(part)


def honoured(part):
    model = adapted(lora_dropout=0.1).eval()
    twin = fused_copy(model)
    handles = []
    for each in (model, twin):
        module = getattr(layer_of(each), part)
        module = module if part == "base_layer" else module["default"]
        handles.append(module.register_forward_hook(lambda module, args, output: output * 2))
    assert "hook" in fuse_lora(twin)[0].reason
    assert_same(results(twin, inputs()), results(model, inputs()))
    assert not fused(twin)
    for handle in handles:
        handle.remove()
    fuse_lora(twin)
    assert_same(results(twin, inputs()), results(model, inputs()))
    assert fused(twin)


def test_other_kinds_of_layers_and_replaced_forwards_are_left_alone():
    embedding = peft.get_peft_model(
        nn.Sequential(nn.Embedding(8, 4), nn.Conv1d(3, 3, 1)),
        peft.LoraConfig(target_modules=["0", "1"]),
    )
    replaced = adapted()
    layer_of(replaced).forward = lambda x: x
    for model, why in ((embedding, "no fused op"), (replaced, "another library")):
        before = {id(module): dict(vars(module)) for module in model.modules()}
        assert all(line.op is None and why in str(line) for line in fuse_lora(model))
        unfuse_lora(model)
        assert before == {id(module): dict(vars(module)) for module in model.modules()}


def test_unfuse_restores_every_attribute_and_class():
    model = adapted(nf4_linear())
    before = {id(module): dict(vars(module)) for module in model.modules()}
    classes = [type(module) for module in model.modules()]
    fuse_lora(model)
    fuse_lora(model)
    results(model, inputs())
    unfuse_lora(model)
    model.zero_grad()
    assert before == {id(module): dict(vars(module)) for module in model.modules()}
    assert classes == [type(module) for module in model.modules()]
    unfuse_lora(model)


def test_gradients_with_dropout_under_checkpointing_are_pefts():
    model = adapted(nf4_linear(compute=torch.float32), lora_dropout=0.2)
    twin = fused_copy(model)
    for reentrant in (False, True):
        assert_same(
            results(Checkpointed(twin, reentrant), inputs()),
            results(Checkpointed(model, reentrant), inputs()),
        )
