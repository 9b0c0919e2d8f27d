import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from isotype.errors import DtypeError
from isotype.precision import PRESETS
from isotype.precision.accumulate import GradientAccumulator
from isotype.precision.apply import apply_precision, generating, precision_of
from isotype.precision.observe import Observer


def tiny_llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    return LlamaForCausalLM(config)


def lora(model):
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False))


IDS = torch.arange(24).view(2, 12)
CPU_PRESETS = ("fp32", "bf16-mixed", "bf16-lora", "bf16-pure", "fp16-mixed")


def prepared(preset: str):
    model = tiny_llama()
    model = lora(model) if preset.endswith("lora") else model
    apply_precision(model, PRESETS[preset], device_type="cpu")
    return model


@pytest.mark.parametrize("preset", CPU_PRESETS)
def test_a_step_keeps_the_declaration(preset):
    model, precision = prepared(preset), PRESETS[preset]
    observer = Observer(model, precision)
    accumulator = GradientAccumulator(model.parameters(), dtype=precision.grads)
    with observer.watch(1) as seen:
        out = model(input_ids=IDS)
        out.logits.float().logsumexp(-1).mean().backward()
    observer.look(seen, gradient=accumulator.gradient)
    assert seen.violations == []
    assert set(seen.dtypes["compute"]) == {precision.compute}
    assert set(seen.dtypes["grads"]) == {"fp32"}
    assert set(seen.dtypes["trainable"]) == {precision.trainable}
    assert not seen.promotions, seen.promotions


@pytest.mark.parametrize("preset", CPU_PRESETS)
def test_generation_runs_under_the_declared_precision(preset):
    model = prepared(preset).eval()
    with torch.no_grad(), generating(model):
        out = model.generate(input_ids=IDS[:1, :4], max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert out.shape == (1, 8)


def test_fp32_norm_weights_do_not_promote_the_residual_stream():
    """The set-up in which QLoRA generation failed: fp32 norms, bf16 everything else."""
    model = prepared("bf16-lora")
    for module_name, parameter in model.named_parameters():
        if "norm" in module_name:
            parameter.data = parameter.data.float()
    with torch.no_grad():
        assert model.generate(input_ids=IDS[:1, :4], max_new_tokens=2, do_sample=False, pad_token_id=0).shape == (1, 6)


def test_a_deepcopy_has_its_own_precision():
    model = prepared("bf16-mixed")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        assert torch.equal(model(input_ids=IDS).logits, twin(input_ids=IDS).logits)
        twin.model.embed_tokens.weight.add_(1)
        assert not torch.equal(model(input_ids=IDS).logits, twin(input_ids=IDS).logits)
    assert precision_of(twin) == PRESETS["bf16-mixed"]


def test_a_callers_autocast_cannot_narrow_a_declared_fp32_run():
    model = prepared("fp32")
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert model(input_ids=IDS).logits.dtype == torch.float32


def test_a_parameter_changed_behind_the_contract_is_named():
    model = prepared("bf16-lora")
    observer = Observer(model, PRESETS["bf16-lora"])
    culprit = model.base_model.model.model.layers[1].self_attn.q_proj.lora_A["default"]
    culprit.weight.data = culprit.weight.data.bfloat16()
    with observer.watch(1) as seen:
        model(input_ids=IDS)
    with pytest.raises(DtypeError, match=r"layers\.1\.self_attn\.q_proj\.lora_A.*is bf16, declared fp32"):
        observer.look(seen).raise_if_violated()


def test_a_promoting_module_is_named():
    model = prepared("bf16-lora")
    inner = model.get_base_model()
    inner.model.layers[0].self_attn.o_proj.register_forward_hook(lambda m, a, out: out.float())
    with Observer(model, PRESETS["bf16-lora"]).watch(1) as seen:
        model(input_ids=IDS)
    assert seen.promotions
    assert any("layers.0" in module for module, _ in seen.promotions)


def test_optimizer_states_and_averages_are_looked_at():
    model, precision = prepared("bf16-mixed"), PRESETS["bf16-mixed"]
    states = {id(p): {"exp_avg": torch.zeros_like(p, dtype=torch.bfloat16)} for p in model.parameters()}
    observer = Observer(model, precision)
    with observer.watch(1) as seen:
        pass
    observer.look(seen, states=lambda p: states[id(p)], averages=[("ema.weight", torch.zeros(2, dtype=torch.bfloat16))])
    assert {f.message.split(" ")[0] for f in seen.violations} == {"exp_avg", "average"}
