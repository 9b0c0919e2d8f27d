"""An optimised model equals the original: loss, gradients, weights after three steps, greedy
tokens, for many families.
"""

import copy

import pytest
import torch
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration, logging
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNorm, Zamba2RMSNormGated

from isotype.optimize import optimize, restore
from tests.models import assert_same_step, step
from tests.optimize.models import FAMILIES, batch, tiny

logging.set_verbosity_error()


# each op and each form of layer once; the other families, and tied heads, in full
IN_DEFAULT = ("llama", "qwen3", "gemma2", "phi3", "glm4", "cohere", "mixtral")


@pytest.mark.parametrize(
    ("families", "tied"),
    [
        (IN_DEFAULT, False),
        pytest.param(
            tuple(name for name in FAMILIES if name not in IN_DEFAULT),
            False,
            marks=pytest.mark.full,
        ),
        pytest.param(FAMILIES, True, marks=pytest.mark.full),
    ],
    ids=["some", "others", "tied"],
)
def test_fp32_loss_gradients_weights_and_tokens(families, tied, subtests):
    for family in families:
        with subtests.test(family):
            trains_alike(family, tied)


def trains_alike(family, tied):
    model = tiny(family, tied=tied)
    mine = copy.deepcopy(model)
    manifest = optimize(mine)
    assert any(e.op == "linear_cross_entropy" for e in manifest.entries), str(manifest)
    for model_ in (model, mine):
        model_.train()
    for items in (None, torch.tensor(31)):
        inputs = batch() | ({} if items is None else {"num_items_in_batch": items})
        assert_same_step(step(mine, **inputs), step(model, **inputs))
    for model_ in (model, mine):
        optimizer = torch.optim.SGD(model_.parameters(), lr=0.05)
        for seed in range(3):
            step(model_, **batch(seed=seed))
            optimizer.step()
        model_.eval()
    torch.testing.assert_close(
        dict(mine.named_parameters()), dict(model.named_parameters()), rtol=1e-4, atol=1e-5
    )
    prompt = batch()["input_ids"][:, :5]
    tokens = [m.generate(prompt, max_new_tokens=6, do_sample=False) for m in (model, mine)]
    assert torch.equal(*tokens)


def test_each_family_gets_the_ops_that_fit_its_modules():
    replaced = {f: {(e.part, e.op) for e in optimize(tiny(f)).replaced} for f in FAMILIES}
    for family, found in replaced.items():
        assert ("rotary", "rope") in found, family
        assert ("head", "linear_cross_entropy") in found, family
    assert ("norm", "rms_norm") in replaced["llama"] & replaced["gemma"] & replaced["olmo2"]
    assert ("gated mlp", "silu_mul") in replaced["llama"] & replaced["phi3"] & replaced["glm4"]
    assert ("gated mlp", "gelu_mul tanh") in replaced["gemma"] & replaced["gemma2"] & replaced[
        "gemma3_text"
    ]
    assert ("gated mlp", "gelu_mul exact") in {
        (e.part, e.op)
        for e in optimize(tiny("gemma2", hidden_activation="gelu", hidden_act="gelu")).replaced
    }
    # LayerNorms and ungated MLPs are not what the ops compute
    assert not {part for part, _ in replaced["starcoder2"]} & {"norm", "gated mlp"}
    assert "norm" not in {part for part, _ in replaced["cohere"]}


def test_every_module_without_an_op_has_a_reason():
    assert ("norm", "for random inputs, its output differs from that of RMSNorm") in {
        (e.part, e.reason) for e in optimize(tiny("cohere")).left
    }
    # without its gate, which a model always gives, it is an RMSNorm
    gated, plain = optimize(
        nn.ModuleList([Zamba2RMSNormGated(16, group_size=16), Zamba2RMSNorm(16)])
    ).entries
    assert (gated.op, gated.reason) == (None, "its forward takes gate beside its input")
    assert plain.op == "rms_norm"


def with_dropout(family, dropout):
    """A model whose gated MLP has a dropout after it (Seed-OSS) or within it (T5), in evaluation
    mode as from_pretrained gives it.
    """
    if family == "seed_oss":
        return tiny(family, residual_dropout=dropout, attention_dropout=0.0).eval()
    torch.manual_seed(0)
    sizes = {
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 2,
        "num_heads": 4,
        "vocab_size": 96,
    }
    tokens = {"pad_token_id": 0, "decoder_start_token_id": 0}
    return T5ForConditionalGeneration(
        T5Config(**sizes, **tokens, dropout_rate=dropout, feed_forward_proj="gated-gelu")
    ).eval()


def test_a_dropout_acts_though_the_model_was_in_evaluation_mode():
    """An MLP that was probed in that mode alone was replaced by a product without its dropout."""
    for family in ("seed_oss", "t5"):
        with_its_dropout(family)


def with_its_dropout(family):
    model = with_dropout(family, 0.5)
    mine = copy.deepcopy(model)
    optimize(mine)
    losses = []
    for m in (model, mine):
        torch.manual_seed(1)
        losses.append(step(m.train(), **batch())[0])
    torch.testing.assert_close(*losses)
    assert any(e.part == "gated mlp" for e in optimize(with_dropout(family, 0.0)).replaced)


def test_restore_gives_back_the_original():
    model = tiny("gemma2")
    before = {n: dict(m.__dict__) for n, m in model.named_modules()}
    hooks = {
        n: (dict(m._forward_hooks), dict(m._forward_pre_hooks)) for n, m in model.named_modules()
    }
    classes = {type(m): type(m).forward for m in model.modules()}
    manifest = optimize(model)
    assert all(c.forward is f for c, f in classes.items())
    assert restore(model) == len(manifest.replaced)
    for name, module in model.named_modules():
        assert module.__dict__.keys() == before[name].keys(), name
        assert (dict(module._forward_hooks), dict(module._forward_pre_hooks)) == hooks[name]
    assert restore(model) == 0
    assert "already optimized" not in str(optimize(model))
