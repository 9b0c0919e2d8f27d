"""An optimised model under what people do to models: PEFT, deepcopy, both checkpointings, compile, saving."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from isotype.errors import UsageError
from isotype.optimize import optimize, restore
from isotype.precision import PRESETS
from tests.optimize.models import batch, tiny
from tests.optimize.test_families import loss_and_gradients


def same_training(model, mine, **tolerance):
    want, theirs = loss_and_gradients(model, batch())
    got, grads = loss_and_gradients(mine, batch())
    torch.testing.assert_close(got, want, **tolerance)
    assert grads.keys() == theirs.keys()
    for name in theirs:
        torch.testing.assert_close(grads[name], theirs[name], **(tolerance or {"rtol": 1e-4, "atol": 1e-6}))


def with_peft(model, **more):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "gate_proj", "down_proj"], init_lora_weights=False, **more)
    return get_peft_model(model, config)


@pytest.mark.parametrize(("when", "more"), [("before", {}), ("after", {}), ("after", {"modules_to_save": ["lm_head"]})])
def test_optimize_before_or_after_peft_trains_the_same(when, more):
    model, mine = with_peft(tiny("qwen2"), **more), tiny("qwen2")
    if when == "before":
        optimize(mine)
    mine = with_peft(mine, **more)
    if when == "after":
        manifest = optimize(mine)
        assert manifest.replaced
    same_training(model, mine)
    prompt = batch()["input_ids"][:, :4]
    assert torch.equal(*(m.generate(input_ids=prompt, max_new_tokens=4, do_sample=False) for m in (model, mine)))
    with mine.disable_adapter(), model.disable_adapter(), torch.no_grad():
        torch.testing.assert_close(mine(**batch()).loss, model(**batch()).loss)


def test_deepcopy_trains_its_own_weights_and_restores_alone():
    model = tiny("llama")
    mine = copy.deepcopy(model)
    optimize(mine)
    twin = copy.deepcopy(mine)
    with torch.no_grad():
        for p in mine.parameters():
            p.zero_()
    same_training(model, twin)
    restore(twin)
    same_training(model, twin)
    assert restore(mine)


@pytest.mark.parametrize("reentrant", [True, False])
def test_training_under_checkpointing_is_the_same(reentrant):
    model = tiny("gemma2")
    mine = copy.deepcopy(model)
    optimize(mine)
    for m in (model, mine):
        m.train()
        m.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    same_training(model, mine)


@pytest.mark.full
@pytest.mark.slow
def test_compile_without_a_graph_break():
    torch._dynamo.reset()
    model = tiny("llama")
    mine = copy.deepcopy(model)
    optimize(mine)

    def loss_of(m):
        return torch.compile(lambda **inputs: m(**inputs).loss, backend="aot_eager", fullgraph=True)

    want = model(**batch()).loss
    got = loss_of(mine)(**batch())
    torch.testing.assert_close(got, want)
    got.backward()
    want.backward()
    for p, q in zip(model.parameters(), mine.parameters()):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-6)


def test_an_optimized_model_is_saved_and_loaded_as_a_plain_one(tmp_path):
    model = tiny("llama")
    optimize(model)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    restore(model)
    same_training(model, again)


def test_what_is_no_known_model_is_reported_or_refused():
    assert "nothing in this model was recognised" in str(optimize(nn.Linear(2, 2)))
    with pytest.raises(UsageError, match="takes a model, not a str"):
        optimize("llama")


@pytest.mark.parametrize("precision", ["bf16", torch.bfloat16, PRESETS["bf16-lora"], "bf16-lora grads=bf16"], ids=str)
def test_a_precision_in_any_form(precision):
    model = tiny("llama")
    assert "norms give bf16" in str(optimize(model, precision))
    assert model.model.norm(torch.randn(2, 32)).dtype == torch.bfloat16


@pytest.mark.parametrize(("precision", "says"), [("bf16-lra", "expected one of fp32 bf16-mixed bf16-lora"), (16, "not a int")])
def test_a_precision_that_is_none(precision, says):
    with pytest.raises(UsageError, match=says):
        optimize(tiny("llama"), precision)


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16])
def test_berts_loss_under_autocast_is_fp32_with_its_gradients(cast):
    """Its own code hands the logits to cross_entropy as they are; a GradScaler multiplies what comes out by 65,536."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = BertForMaskedLM(BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
    mine = copy.deepcopy(model)
    assert any(e.op == "linear_cross_entropy" for e in optimize(mine).replaced)
    inputs = batch(rows=8, length=48)
    seen = []
    for each in (model, mine):
        with torch.autocast("cpu", cast):
            loss = each(**inputs).loss
        (loss * 65536).backward()
        seen.append((loss.detach() * 1, each.cls.predictions.bias.grad))
    assert seen[1][0].dtype == seen[0][0].dtype == torch.float32
    torch.testing.assert_close(seen[1][0], seen[0][0], rtol=2e-3, atol=0)
    assert torch.isfinite(seen[1][1]).all()


def exchanged_activation(model):
    model.model.layers[0].mlp.act_fn = nn.ReLU()


def another_epsilon(model):
    model.model.norm.variance_epsilon = 0.5


def doubled_activation(model):
    model.model.layers[1].mlp.act_fn.register_forward_hook(lambda module, args, output: output * 2)


@pytest.mark.parametrize("change", [exchanged_activation, another_epsilon, doubled_activation])
def test_what_changes_on_a_module_after_optimize_is_computed(change):
    model, mine = tiny("llama"), tiny("llama")
    assert optimize(mine).replaced
    for each in (model, mine):
        loss_and_gradients(each, batch())
        change(each)
    same_training(model, mine)
    copied = copy.deepcopy(mine)
    same_training(model, copied)


def rounded_mlp(self, x):
    y = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
    return y + (torch.round(y.detach() * 1000) / 1000 - y).detach()


def rounded_norm(self, x):
    y = self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
    return torch.round(y * 10_000) / 10_000


@pytest.mark.parametrize(("kind", "forward"), [("LlamaMLP", rounded_mlp), ("LlamaRMSNorm", rounded_norm)])
def test_a_module_that_rounds_its_result_is_not_replaced(kind, forward):
    """A probe's tolerance is for the order of sums: a grid within it would be lost without a word."""
    model = tiny("llama")
    for module in model.modules():
        if type(module).__name__ == kind:
            module.__class__ = type("Rounded" + kind[5:], (type(module),), {"forward": forward})
    assert not [entry for entry in optimize(model).replaced if entry.kind.startswith("Rounded")]


class HalfTheGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g / 2


def damped_layer(self, hidden_states, attention_mask=None, position_ids=None, past_key_values=None, use_cache=False,
                 position_embeddings=None, **kwargs):  # fmt: skip
    x, _ = self.self_attn(
        hidden_states=self.input_layernorm(hidden_states),
        attention_mask=attention_mask,
        position_ids=position_ids,
        past_key_values=past_key_values,
        use_cache=use_cache,
        position_embeddings=position_embeddings,
        **kwargs,
    )
    hidden_states = hidden_states + HalfTheGradient.apply(x)
    return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


def test_a_layer_with_a_backward_of_its_own_is_not_replaced():
    """Its output is the op's: a probe of outputs alone exchanges the gradients that the program is about."""
    model = tiny("llama")
    for module in model.modules():
        if type(module).__name__ == "LlamaDecoderLayer":
            module.__class__ = type("OwnLayer", (type(module),), {"forward": damped_layer})
    mine = copy.deepcopy(model)
    assert not [entry for entry in optimize(mine).replaced if entry.kind.startswith("Own")]
    (loss, gradients), (plain, theirs) = (loss_and_gradients(each, batch()) for each in (mine, model))
    torch.testing.assert_close(loss, plain, rtol=1e-6, atol=0)
    for name, gradient in theirs.items():
        assert (gradients[name] - gradient).norm() <= 1e-3 * gradient.norm(), name


def test_a_model_whose_class_has_no_input_embeddings_is_optimised():
    """transformers raises NotImplementedError for models of time series."""
    from transformers import PatchTSTConfig, PatchTSTForPrediction

    sizes = {"num_hidden_layers": 1, "d_model": 16, "num_attention_heads": 2, "ffn_dim": 32, "head_dropout": 0.0, "do_mask_input": False}
    torch.manual_seed(0)
    lengths = {"context_length": 16, "patch_length": 4, "patch_stride": 4, "prediction_length": 4}
    model = PatchTSTForPrediction(PatchTSTConfig(num_input_channels=2, **lengths, **sizes))
    mine, values = copy.deepcopy(model), {"past_values": torch.randn(2, 16, 2), "future_values": torch.randn(2, 4, 2)}
    optimize(mine)
    torch.testing.assert_close(mine.eval()(**values).loss, model.eval()(**values).loss)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_model_outlined_on_the_meta_device_is_optimised_and_filled(family):
    """As `torch.device("meta")` makes it, for `load_state_dict(assign=True)`: its tables are asked for their form, and have no values."""
    plain = tiny(family)
    with torch.device("meta"):
        model = type(plain)(plain.config)
    placed = optimize(model, device_type="cpu")
    assert all(buffer.is_meta for _, buffer in model.named_buffers())
    assert [(e.module, e.op) for e in placed.entries] == [(e.module, e.op) for e in optimize(tiny(family)).entries]
    model.load_state_dict(plain.state_dict(), assign=True)
    for name, buffer in plain.named_buffers():
        path, _, leaf = name.rpartition(".")
        model.get_submodule(path).register_buffer(leaf, buffer, persistent=False)
    same_training(plain, model)
