"""A layer's last sum made with the next norm: the same values everywhere, one pass fewer, and only where nothing else reads between."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from isotype.optimize import boundary, optimize, restore
from isotype.optimize.ahead import take
from tests.optimize.models import batch, tiny

BF16 = torch.bfloat16


class Sums(TorchDispatchMode):
    """Counts additions of two whole tensors of hidden states."""

    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        self.number += function is torch.ops.aten.add.Tensor and len(tensors) == 2 and tensors[0].dim() == 3
        return function(*args, **(kwargs or {}))


def pair(family="llama", layers=3, dtype=BF16):
    """(optimized, optimized without what this module adds)"""
    model = tiny(family, dtype=dtype, num_hidden_layers=layers, **({"layer_types": None} if family == "gemma2" else {})).train()
    optimize(model)
    plain = copy.deepcopy(model)
    for module in plain.modules():
        boundary.unlink(module)
    return model, plain


def linked(model):
    return [module for module in model.modules() if "_isotype_next" in vars(module)]


def trained(model, **more):
    """(loss, logits, every hidden state where they are asked for, every gradient)"""
    model.zero_grad()
    out = model(**batch(rows=2, length=12), use_cache=False, **more)
    out.loss.backward()
    return [out.loss, out.logits, *(out.hidden_states or ()), *(p.grad for p in model.parameters() if p.grad is not None)]


def same(ours, theirs):
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs):
        assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))


def sums(model):
    with Sums() as mode:
        model(input_ids=batch(rows=2, length=12)["input_ids"], use_cache=False)
    return mode.number


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "mixtral"])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_values_and_gradients_are_the_same_with_a_pass_less_a_layer(family, dtype):
    model, plain = pair(family, dtype=dtype)
    assert len(linked(model)) == 3
    same(trained(model), trained(plain))
    assert sums(plain) - sums(model) == 3
    assert all(layer._isotype_next.misses == 0 for layer in linked(model))
    same(trained(model, output_hidden_states=True), trained(plain, output_hidden_states=True))


def test_a_norm_is_called_where_the_model_calls_it():
    model, _ = pair()
    norm, order = model.model.layers[1].input_layernorm, []
    second = model.model.layers[1].self_attn
    real = boundary.norms.norm_forward
    model.model.layers[0].register_forward_pre_hook(lambda *_: order.append("first layer"))
    second.register_forward_pre_hook(lambda *_: order.append("attention"))
    given = []

    def see(module, args, output):
        order.append("norm")
        given.append((args[0], output))

    norm.register_forward_hook(see)
    states = model(**batch(rows=2, length=12), output_hidden_states=True).hidden_states
    assert order == ["first layer", "norm", "attention"]
    assert torch.equal(given[0][0], states[1])
    assert torch.equal(given[0][1], real(norm, given[0][0]))


def steer(module, args, output):
    """Writes to a layer's output in place, as steering by activations does."""
    output.add_(1.0)


def replace(module, args, output):
    return output + 1.0


@pytest.mark.parametrize("hook", [steer, replace])
def test_hooks_on_a_layer_change_what_the_next_one_reads(hook):
    model, plain = pair()
    for m in (model, plain):
        m.model.layers[0].register_forward_hook(hook)
    same(trained(model), trained(plain))


def test_a_hook_before_a_layer_may_write_to_what_it_is_given():
    model, plain = pair()
    for m in (model, plain):
        m.model.layers[1].register_forward_pre_hook(lambda module, args: (args[0].add_(1.0),))
    with torch.no_grad():
        ids = batch(rows=2, length=12)
        same([model(**ids).logits], [plain(**ids).logits])


@pytest.mark.parametrize("recomputed", [(0, 1, 2), (1,), (0,), (2,)])
def test_recomputed_layers_are_next_to_others(recomputed):
    model, plain = pair()
    truth = trained(plain)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for i, layer in enumerate(model.model.layers):
        layer.gradient_checkpointing = i in recomputed
    same(trained(model), truth)


def in_segments(model, segments, **how):
    """(loss, every gradient) with the model's layers run in these groups, each group one checkpoint of the caller's own."""
    model.zero_grad()
    whole, ids = model.model, batch(rows=2, length=12)["input_ids"]
    x = whole.embed_tokens(ids)
    tables = whole.rotary_emb(x, torch.arange(ids.shape[1])[None])

    def run(layers, x):
        for i in layers:
            x = whole.layers[i](x, position_embeddings=tables)
        return x

    for layers in segments:
        x = checkpoint(partial(run, layers), x, **how) if len(layers) > 1 else run(layers, x)
    loss = model.lm_head(whole.norm(x)).float().square().mean()
    loss.backward()
    return [loss, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("segments", [[(0, 1), (2, 3)], [(0,), (1, 2), (3,)]])
@pytest.mark.parametrize("reentrant", [False, True])
def test_several_layers_are_recomputed_by_a_checkpoint_of_the_callers(segments, reentrant):
    model, plain = pair(layers=4)
    truth = in_segments(plain, [(0,), (1,), (2,), (3,)])
    # more often than sums are made in vain: neither run of a checkpoint depends on how many were
    for _ in range(boundary.MISSES + 1):
        same(in_segments(model, segments, use_reentrant=reentrant), truth)


def test_layers_taken_out_or_exchanged_are_followed():
    model, plain = pair(layers=4)
    for m in (model, plain):
        m.model.layers = nn.ModuleList([m.model.layers[i] for i in (0, 2, 1, 3)])
    for _ in range(boundary.MISSES + 1):
        same(trained(model), trained(plain))
    # three sums were made with a norm that did not follow: no longer
    stopped = [layer._isotype_next.misses >= boundary.MISSES for layer in model.model.layers]
    assert stopped == [True, True, True, False]


def test_samples_and_inference_mode():
    model, plain = pair(dtype=torch.float32)
    ids = batch(rows=2, length=12)["input_ids"]
    with torch.inference_mode():
        same([model.eval()(ids).logits], [plain.eval()(ids).logits])
    same([model.generate(ids, max_new_tokens=4, do_sample=False)], [plain.generate(ids, max_new_tokens=4, do_sample=False)])


def wrapped(layer, write):
    forward = layer.forward

    def around(x, *args, **kwargs):
        made = forward(x, *args, **kwargs)
        write(made)
        return made

    layer.forward = around


@pytest.mark.parametrize("write", [lambda x: x.data.add_(0.5), lambda x: x.detach().numpy().__iadd__(0.5), lambda x: x.add_(0.5)])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_wrapper_around_a_layer_may_write_to_what_it_returns(write, mode):
    """Neither NumPy, nor `.data`, nor inference mode counts what is written."""
    outputs = []
    for model in pair(dtype=torch.float32):
        for layer in model.model.layers:
            wrapped(layer, write)
        with mode():
            outputs.append(model(**batch(), use_cache=False).logits.clone())
    same(*outputs)


def test_a_loop_of_the_callers_may_ask_for_the_gradient_of_what_frozen_layers_give():
    gradients = []
    for model in pair(dtype=torch.float32):
        model.requires_grad_(False)
        inner = model.model
        x = inner.embed_tokens(batch()["input_ids"])
        positions = torch.arange(x.shape[1])[None]
        tables = inner.rotary_emb(x, positions)
        x = inner.layers[0](x, position_embeddings=tables, position_ids=positions, attention_mask=None)
        middle = x.requires_grad_()
        for layer in inner.layers[1:]:
            x = layer(x, position_embeddings=tables, position_ids=positions, attention_mask=None)
        model.lm_head(inner.norm(x)).logsumexp(-1).mean().backward()
        gradients.append(middle.grad)
    torch.testing.assert_close(*gradients)


def test_a_note_holds_for_its_tensor_norm_and_moment_only():
    model, _ = pair()
    layer, norm = model.model.layers[0], model.model.layers[1].input_layernorm

    def noted():
        x = torch.randn(1, 3, norm.weight.shape[0], dtype=BF16)
        return boundary.sum_before(layer._isotype_next, x, x)

    total = noted()
    assert take(norm, total.clone()) is None
    assert take(norm, total) is not None
    assert take(norm, total) is None
    assert take(model.model.norm, noted()) is None
    written = noted()
    written.add_(1.0)
    assert take(norm, written) is None
    total = noted()
    with torch.no_grad():
        assert take(norm, total) is None
        total = noted()
        norm.weight.mul_(2.0)
        assert take(norm, total) is None


def test_restore_and_copies():
    model, plain = pair()
    same(trained(copy.deepcopy(model)), trained(plain))
    assert linked(copy.deepcopy(model))[0]._isotype_next.norm is not linked(model)[0]._isotype_next.norm
    restore(model)
    assert not linked(model)


class Loops:
    def plain(self, x, mask):
        for layer in self.layers[: self.depth]:
            x = layer(x, mask=mask)
        x = self.norm(x)
        return x

    def counted(self, x):
        for i, layer in enumerate(self.blocks):
            x = layer(x, self.kinds[i])
        return self.norm(x)

    def writes_between(self, x):
        for layer in self.layers:
            x = layer(x)
            x[:, 0] += 1.0
        x = self.norm(x)

    def takes_it_twice(self, x):
        for layer in self.layers:
            x = layer(x, residual=x)

    def another_variable(self, x):
        for layer in self.layers:
            y = layer(x)
        return y

    def in_tuples(self, x):
        for layer in self.layers:
            x = layer(x)[0]

    def scaled_before_the_norm(self, x):
        for layer in self.layers:
            x = layer(x)
        x = x * 2
        x = self.norm(x)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("plain", ("layers", "norm")), ("counted", ("blocks", None)), ("writes_between", None), ("takes_it_twice", None),
        ("another_variable", None), ("in_tuples", None), ("scaled_before_the_norm", ("layers", None)),
    ],
)  # fmt: skip
def test_only_a_loop_that_hands_on_and_does_nothing_else_is_known(name, found):
    assert boundary.loop_of(getattr(Loops, name)) == found
