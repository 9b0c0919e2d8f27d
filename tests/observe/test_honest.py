"""Plain practice is not accused: families of transformers, LoRA, 4-bit bases, recomputation, eager
attention, dropout, tied weights.

Arithmetic that is none of the watched kinds is counted.
"""

import peft
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from isotype.optimize import optimize
from isotype.precision import PRESETS
from isotype.precision.apply import use_generate_dtype
from tests.models import SIZES, lora, quantised
from tests.models import tiny as tiny_llama

from .broken import MAKERS, dropout
from .run import BATCH, set_up, watched_step
from .tiny import MLP, Rotary, Tiny, tiny

EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "gemma2": {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 16},
    # attention with dropout is made of fp32 products inside PyTorch's own
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "n_inner": 48},
    # a router in fp32, and the weights of all experts in one tensor
    "mixtral": {"num_local_experts": 4},
    # widens the residual stream by itself
    "xglm": {"ffn_dim": 48, "attention_heads": 4, "num_layers": 2, "d_model": 32},
    # casts its table of positions to the dtype of its activations, and keeps it so
    "ctrl": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "dff": 48},
    # a logsumexp of scores in attention
    "granite_swa": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    # switch autocast off for what they want in fp32: scores, the mixing of streams
    "flint": {"head_dim": 8},
    "hy_v4": dict.fromkeys(
        (
            "q_lora_rank",
            "kv_lora_rank",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "v_head_dim",
            "head_dim",
        ),
        8,
    )
    | {
        "n_routed_experts": 4,
        "num_key_value_heads": 4,
        "index_head_dim": 16,
        "index_n_heads": 2,
        "index_topk": 8,
        **EXPERTS,
    },
    # its decays are buffers of the model's file: a base in bf16 has them in bf16
    "minimax": {
        "num_local_experts": 4,
        "head_dim": 8,
        "block_size": 16,
        "layer_types": ["linear_attention", "full_attention"],
    },
}
CASES = [
    *((family, "bf16-mixed", "") for family in FAMILIES),
    ("llama", "bf16-pure", "optimized"),
    ("llama", "fp16-mixed", ""),
    ("llama", "bf16-lora", "optimized"),
    ("llama", "nf4-lora", "optimized"),
    ("llama", "bf16-mixed", "reentrant"),
    ("gemma2", "nf4-lora", "recomputed"),
    ("hy_v4", "bf16-lora", "recomputed"),
    ("gemma2", "bf16-mixed", "eager"),
]


def built(family: str, preset: str, how: str):
    torch.manual_seed(0)
    more = {"attn_implementation": "eager"} if how == "eager" else {}
    config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family], **more})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if preset == "nf4-lora":
        pytest.importorskip("bitsandbytes")
        model = quantised(model)
    if preset.endswith("lora"):
        model = lora(model, lora_dropout=0.1)
    if how == "optimized":
        optimize(model, PRESETS[preset])
    if how in ("recomputed", "reentrant"):
        model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": how == "reentrant"}
        )
        model.enable_input_require_grads()
    return model


OFTEN = {"llama", "gpt2", "gemma2", "mixtral"}


@pytest.mark.parametrize(
    ("family", "preset", "how"),
    [
        pytest.param(
            *case,
            id="-".join(filter(None, case)),
            marks=[] if case[0] in OFTEN else [pytest.mark.full],
        )
        for case in CASES
    ],
)
def test_common_practice_gives_no_violation(family, preset, how):
    run = set_up(built(family, preset, how), PRESETS[preset])
    run.model.train()
    for step in (1, 2):
        seen = watched_step(run, step)
        assert [finding.message for finding in seen.violations] == []
        assert not seen.unobserved
    run.model.eval()
    with (
        torch.no_grad(),
        use_generate_dtype(run.model),
        run.observer.watch(0, role="generate") as made,
    ):
        run.model.generate(
            input_ids=BATCH.input_ids[:1, :5],
            max_new_tokens=2,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
    assert [finding.message for finding in made.violations] == []
    assert not made.unobserved


def angles_in_fp64(length: int) -> torch.Tensor:
    frequencies = 1.0 / 10000 ** (torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies)
    return torch.cat([angles, angles], -1)


class FrequenciesOfAnObject:
    """No module: the table is made at the first call, as Z-Image's."""

    table: torch.Tensor | None = None

    def __call__(self, length: int) -> torch.Tensor:
        if self.table is None:
            self.table = angles_in_fp64(length).float()
        return self.table


class WideTable(Rotary):
    """Positions in fp64, by a module, an object, complex numbers or a buffer of fp64."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place, self.frequencies = place, FrequenciesOfAnObject()
        # with a weight beside the table, as in the outermost module of a model
        self.scale = torch.nn.Parameter(torch.ones(8))
        if place == "buffer":
            self.register_buffer("angles", angles_in_fp64(128), persistent=False)

    def forward(self, x):
        length = x.shape[1]
        if self.place == "object":
            angles = self.frequencies(length)
        elif self.place == "buffer":
            angles = self.angles[:length]
        else:
            angles = angles_in_fp64(length)
        if self.place == "complex":
            turns = torch.polar(torch.ones_like(angles), angles)
            cos, sin = turns.real, turns.imag
        else:
            cos, sin = angles.cos(), angles.sin()
        return cos.to(x.dtype) * self.scale.to(x.dtype), sin.to(x.dtype)


@pytest.mark.parametrize("place", ["module", "object", "complex", "buffer"])
def test_a_table_that_the_models_class_makes_in_fp64_is_no_violation(place):
    run = set_up(tiny(rotary=lambda: WideTable(place)), PRESETS["bf16-mixed"])
    for step in (1, 2):
        assert [finding.message for finding in watched_step(run, step).violations] == []


class FadedMLP(MLP):
    """Its result is multiplied by a table that stays in fp64."""

    def forward(self, x):
        y = super().forward(x)
        fading = angles_in_fp64(x.shape[1]).cos().mean(-1, keepdim=True)
        return (y * fading).to(y.dtype)


def test_a_table_in_fp64_that_an_activation_meets_is_reported():
    run = set_up(tiny(mlp=FadedMLP), PRESETS["bf16-mixed"])
    messages = [finding.message for finding in watched_step(run, 1).violations]
    assert any(message.startswith("mul in fp64 (layers.1.mlp") for message in messages)
    assert not any(message.startswith(("cos", "mean", "outer")) for message in messages)


def turned(x, weight):
    angles = torch.outer(
        torch.arange(x.shape[1]).float(), 10000 ** -(torch.arange(x.shape[2]) / x.shape[2])
    )
    return x.float() * angles.cos()


ISLANDS = {
    "RoPE": turned,
    "norm": lambda x, weight: x.float() * x.float().pow(2).mean(-1, keepdim=True).rsqrt(),
    "router": lambda x, weight: (
        x.float() * torch.nn.functional.linear(x.float(), weight.float()).softmax(-1).topk(1).values
    ),
    "FFT": lambda x, weight: torch.fft.fft(x.float()).real,
    "product": lambda x, weight: torch.nn.functional.linear(x.float(), weight.float()).mean(
        -1, keepdim=True
    ),
}


@pytest.mark.parametrize("island", ISLANDS)
def test_islands_in_fp32_are_activations_while_samples_are_made(island):
    """PEFT's `generate` calls the model inside it: what that one is given is the input. Only a
    plain product is none of common practice.
    """
    model = tiny_llama()
    mlp = model.model.layers[1].mlp
    mlp.scores = torch.nn.Parameter(torch.randn(4, model.config.hidden_size), requires_grad=False)

    def forward(x, inner=mlp.forward):
        with torch.autocast("cpu", enabled=False):
            wide = ISLANDS[island](x, mlp.scores)
        return inner(x) + wide.to(x.dtype)

    mlp.forward = forward
    run = set_up(lora(model), PRESETS["bf16-lora"])
    with (
        torch.no_grad(),
        use_generate_dtype(run.model),
        run.observer.watch(0, role="generate") as made,
    ):
        run.model.generate(
            input_ids=BATCH.input_ids[:1, :5],
            max_new_tokens=3,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
    assert any("layers.1.mlp" in place for place, _ in made.arithmetic)
    assert [
        "multiplies in fp32, declared bf16" in finding.message for finding in made.violations
    ] == [True] * (island == "product")


def test_a_narrowed_table_of_rotary_positions_is_a_violation():
    run = set_up(built("llama", "bf16-mixed", ""), PRESETS["bf16-mixed"])
    rotary = run.model.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq.bfloat16()
    assert any("inv_freq is bf16" in finding.message for finding in watched_step(run, 1).violations)


class LogProbabilities(MLP):
    """Features from log-probabilities, and from their sum, as a layer of remote code may have them."""

    def __init__(self):
        super().__init__()
        self.log_softmax = torch.nn.LogSoftmax(-1)

    def forward(self, x):
        y = self.up(x)
        return self.down(self.log_softmax(y) - y.logsumexp(-1, keepdim=True))


class TokenShift(MLP):
    """Mixes each position with the one before by a weight of its own, cast to the dtype of the
    activations, in two places.
    """

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.mix = torch.nn.Parameter(torch.full((self.up.in_features,), 0.3))

    def forward(self, x):
        mix = self.mix.to(x.dtype)
        return super().forward(x * mix + torch.nn.functional.pad(x, (0, 0, 1, -1)) * (1 - mix))


def test_a_table_of_rotations_in_compute_under_fused_lora_gives_no_violation():
    """The gradient of what a table rotated is summed into an adapter's fp32 gradient by Isotype's
    own product.
    """
    settings = peft.LoraConfig(r=4, target_modules=["qkv", "out"])
    narrow = tiny().to(torch.bfloat16)
    narrow.rotary = type(narrow.rotary)()
    model = peft.get_peft_model(narrow, settings)
    optimize(model, PRESETS["bf16-lora"])
    assert [
        finding.message
        for finding in watched_step(set_up(model, PRESETS["bf16-lora"]), 1).violations
    ] == []


class OfPyTorchs(MLP):
    """Attention with dropout by PyTorch's own layer, a quantile, random slopes, and a table of a
    list of numbers.
    """

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.attention = torch.nn.MultiheadAttention(
            self.up.in_features, 4, dropout=0.1, batch_first=True
        )

    def forward(self, x):
        y = x + self.attention(x, x, x, need_weights=False)[0]
        y = y * (y >= y.float().quantile(0.1, -1, keepdim=True).to(y.dtype))
        slopes = torch.tensor([2.0**-i for i in range(8)]).repeat(y.shape[-1] // 8).to(y.dtype)
        return super().forward(torch.nn.functional.rrelu(y * slopes, training=True))


@pytest.mark.parametrize("mlp", [MLP, LogProbabilities, TokenShift, OfPyTorchs])
@pytest.mark.parametrize("preset", ["fp32", "bf16-mixed"])
def test_layers_of_plain_pytorch_give_no_violation(mlp, preset):
    run = set_up(tiny(mlp=mlp), PRESETS[preset])
    for step in (1, 2):
        seen = watched_step(run, step)
        assert [finding.message for finding in seen.violations] == []
        assert not seen.unobserved


@pytest.mark.parametrize(
    ("preset", "declared", "other"),
    [
        ("fp32", torch.float32, torch.bfloat16),
        pytest.param("bf16-mixed", torch.bfloat16, torch.float16, marks=pytest.mark.full),
    ],
)
def test_numbers_made_in_compute_and_exact_numbers_give_no_violation(
    preset, declared, other, subtests
):
    for name, make in MAKERS.items():
        wide = torch.float32 if name in ("linspace", "arange") else declared
        for dtype, number in ((wide, 1 / 0.9), (other, 0.5), (other, -0.75)):
            with subtests.test(f"{name} of {number} in {dtype}"):
                seen = watched_step(
                    set_up(tiny(mlp=dropout(make, dtype, number)), PRESETS[preset]), 1
                )
                assert [finding.message for finding in seen.violations] == []
                assert not seen.unobserved


class RoundedWeight(MLP):
    """Weights rounded to 16 levels at each call, as in quantisation-aware training."""

    def forward(self, x):
        scale = self.up.weight.detach().abs().amax(1, keepdim=True) / 7
        levels = (self.up.weight / scale).round().clamp(-8, 7) * scale
        return self.down(
            self.act(
                torch.nn.functional.linear(x, self.up.weight + (levels - self.up.weight).detach())
            )
        )


class WideFromTheStart(Tiny):
    def embedded(self, input_ids):
        return self.embed(input_ids).float()


@pytest.mark.parametrize(
    ("build", "preset", "counted"),
    [
        (lambda: tiny(mlp=RoundedWeight), "bf16-mixed", None),
        (WideFromTheStart, "bf16-mixed", ("layers.0", "fp32")),
    ],
)
def test_other_arithmetic_is_counted_and_never_accused(build, preset, counted):
    seen = watched_step(set_up(build(), PRESETS[preset]), 1)
    assert [finding.message for finding in seen.violations] == []
    assert counted is None or (seen.arithmetic + seen.promotions)[counted] > 0
