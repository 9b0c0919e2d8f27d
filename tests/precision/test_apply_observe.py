import pytest
import torch

from isotype.errors import DtypeError
from isotype.observe import Observer
from isotype.precision import PRESETS
from isotype.precision.accumulate import GradientAccumulator
from isotype.precision.apply import apply_precision, remove_precision, use_generate_dtype
from tests.models import lora, tiny

IDS = torch.arange(24).view(2, 12)


def prepared(preset: str):
    model = tiny()
    model = lora(model, init_lora_weights=False) if preset.endswith("lora") else model
    apply_precision(model, PRESETS[preset], device_type="cpu")
    return model


@pytest.mark.parametrize("preset", ["fp32", "bf16-mixed", "bf16-lora", "bf16-pure", "fp16-mixed"])
def test_a_step_uses_the_declared_dtypes(preset):
    model, precision = prepared(preset), PRESETS[preset]
    observer = Observer(model, precision)
    accumulator = GradientAccumulator(model.parameters(), dtype=precision.grads)
    with observer.watch(1) as seen:
        out = model(input_ids=IDS)
        out.logits.float().logsumexp(-1).mean().backward()
    observer.observe_tensors(seen, gradient=accumulator.gradient)
    assert seen.violations == []
    assert set(seen.dtypes["compute"]) == {precision.compute}
    assert set(seen.dtypes["grads"]) == {precision.grads}
    assert set(seen.dtypes["trainable"]) == {precision.trainable}
    assert set(seen.dtypes["norms"]) == {"fp32"}
    assert not any(
        "forward" in module.__dict__
        for module in model.modules()
        if type(module).__name__ == "LlamaRMSNorm"
    )
    assert not seen.promotions, seen.promotions


def test_fp32_norm_weights_do_not_promote_the_residual_stream():
    """The set-up in which QLoRA generation failed: fp32 norms, bf16 everything else."""
    model = prepared("bf16-lora")
    for module_name, parameter in model.named_parameters():
        if "norm" in module_name:
            parameter.data = parameter.data.float()
    with torch.no_grad():
        assert model.generate(
            input_ids=IDS[:1, :4], max_new_tokens=2, do_sample=False, pad_token_id=0
        ).shape == (1, 6)


def test_a_callers_autocast_cannot_narrow_a_declared_fp32_run():
    model = prepared("fp32")
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert model(input_ids=IDS).logits.dtype == torch.float32


class NarrowRMSNorm(torch.nn.Module):
    """A norm that sums in the dtype it is given."""

    def __init__(self, inner):
        super().__init__()
        self.weight, self.eps = inner.weight, inner.variance_epsilon

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def test_a_norm_that_sums_in_bf16_is_named():
    model = tiny()
    model.model.layers[1].input_layernorm = NarrowRMSNorm(model.model.layers[1].input_layernorm)
    apply_precision(model, PRESETS["bf16-mixed"], device_type="cpu")
    with Observer(model, PRESETS["bf16-mixed"]).watch(1) as seen:
        model(input_ids=IDS)
    assert set(seen.dtypes["norms"]) == {"fp32", "bf16"}
    (found,) = [f for f in seen.violations if f.declared == "precision.norms: fp32"]
    assert str(found.place.file).endswith("test_apply_observe.py")
    assert "its forward" in str(found.cause)
    with pytest.raises(
        DtypeError, match=r"arithmetic of model\.layers\.1\.input_layernorm is bf16, declared fp32"
    ):
        seen.raise_if_violated()


def test_generate_of_an_encoder_decoder_model_runs_its_encoder_under_the_precision():
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=64,
            d_model=16,
            d_ff=32,
            d_kv=8,
            num_layers=1,
            num_heads=2,
            decoder_start_token_id=0,
            pad_token_id=0,
        )
    ).eval()
    apply_precision(model, PRESETS["bf16-mixed"], device_type="cpu")
    ids = torch.tensor([[5, 6, 7]])
    with use_generate_dtype(model):
        tokens = model.generate(input_ids=ids, max_new_tokens=3)
    assert tokens.shape[0] == 1
    assert model.get_encoder()(input_ids=ids).last_hidden_state.dtype == torch.bfloat16
    remove_precision(model)
    assert model.get_encoder()(input_ids=ids).last_hidden_state.dtype == torch.float32


def test_a_setting_that_computes_fp32_products_in_bf16_is_a_violation():
    model = prepared("fp32")
    observer = Observer(model, PRESETS["fp32"])
    before = torch.backends.mkldnn.matmul.fp32_precision
    try:
        for setting, violations in (
            ("ieee", []),
            ("bf16", ["products of fp32 tensors are computed in bf16"]),
            ("tf32", []),
        ):
            torch.backends.mkldnn.matmul.fp32_precision = setting
            with observer.watch(1) as seen:
                model(input_ids=IDS, labels=IDS).loss.backward()
            assert [finding.message for finding in seen.violations] == violations
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before
