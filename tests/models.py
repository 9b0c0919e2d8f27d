"""Tiny random models of the families that Isotype supports, a tokenizer trained on the spot, and
rows for them.
"""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from isotype.data.rows import Row

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

# what a family needs besides SIZES
FAMILIES: dict[str, dict] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 16},
    "gemma3_text": {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 16},
    "mistral": {"sliding_window": None},
    "phi3": {},
}


_EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "head_dim": 8,
}

# mixtures of experts; gpt-oss has biases, the transposed form and its own gate, DeepSeek-V3 a dense
# layer and a shared expert
MIXTURES: dict[str, dict] = {
    "qwen3_moe": _EXPERTS,
    "mixtral": _EXPERTS,
    "olmoe": _EXPERTS,
    "deepseek_v3": {
        **_EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
        "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4,
    },
    "gpt_oss": {**_EXPERTS, "sliding_window": 16, "layer_types": ["full_attention", "sliding_attention"], "rope_parameters": {
        "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}},
}  # fmt: skip
FAMILIES |= MIXTURES


def tiny(family: str = "llama", *, seed: int = 0, **changes):
    """A random model of `family` with about 20,000 parameters, in fp32."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES.get(family, {}), **changes})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def save_with_tokenizer(family: str, of: Path, folder: Path, **changes) -> Path:
    """Saves a tiny model of `family` with the tokenizer of the folder `of`, whose ids it has, where
    there is no such folder yet.
    """
    if not folder.exists():
        tokenizer = AutoTokenizer.from_pretrained(of)
        ids = {
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
        }
        tiny(family, **{"vocab_size": len(tokenizer), **ids, **changes}).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


def lora(model, *, seed: int = 1, **changes):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    return get_peft_model(
        model,
        LoraConfig(**{"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **changes}),
    )


def step(model, **inputs):
    """(the loss of one call, the gradient of every parameter that has one)"""
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


def assert_same_step(got, want, *, rtol=1e-4, atol=1e-6):
    torch.testing.assert_close(got[0], want[0])
    torch.testing.assert_close(got[1], want[1], rtol=rtol, atol=atol)


def rows(count: int = 16, *, seed: int = 0, longest: int = 24) -> list[Row]:
    """Rows of different lengths; the first third of each is a prompt without loss."""
    g = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        n = int(torch.randint(6, longest, (1,), generator=g))
        ids = tuple(torch.randint(3, 96, (n,), generator=g).tolist())
        prompt = n // 3
        made.append(Row(ids, (-100,) * prompt + ids[prompt:], prompt))
    return made


def stepper(model, preset: str = "fp32", **train):
    """The steps of a run on this model, which gets the preset's dtypes; `train` are settings of the
    section.
    """
    from functools import partial

    from isotype.config.schema import TrainSection
    from isotype.precision import PRESETS
    from isotype.precision.apply import apply_precision
    from isotype.tasks.language.objective import batch_loss_sum
    from tests.api import assemble_stepper

    precision, section = PRESETS[preset], TrainSection(**train)
    apply_precision(model, precision, device_type="cpu")
    return assemble_stepper(
        model, section, precision, partial(batch_loss_sum, dtype=precision.loss)
    )


def quantised(
    model,
    *,
    compute: torch.dtype = torch.bfloat16,
    kind: str = "nf4",
    double: bool = True,
    storage: torch.dtype = torch.uint8,
):
    """Every linear layer but the head as bitsandbytes' own, as transformers loads them: `kind` is
    nf4, fp4 or int8.
    """
    bitsandbytes = pytest.importorskip("bitsandbytes")

    head = model.get_output_embeddings()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if not isinstance(child, torch.nn.Linear) or child is head:
                continue
            sizes = child.in_features, child.out_features, child.bias is not None
            if kind == "int8":
                layer = bitsandbytes.nn.Linear8bitLt(*sizes, has_fp16_weights=False)
                layer.weight = bitsandbytes.nn.Int8Params(
                    child.weight.data, requires_grad=False, has_fp16_weights=False
                )
            else:
                layer = bitsandbytes.nn.Linear4bit(
                    *sizes,
                    compute_dtype=compute,
                    compress_statistics=double,
                    quant_type=kind,
                    quant_storage=storage,
                )
                layer.weight = bitsandbytes.nn.Params4bit(
                    child.weight.data,
                    requires_grad=False,
                    compress_statistics=double,
                    quant_type=kind,
                    quant_storage=storage,
                )
            if child.bias is not None:
                layer.bias = child.bias
            setattr(parent, name, layer.to("cpu"))
    model.requires_grad_(False)
    setattr(model, "is_loaded_in_8bit" if kind == "int8" else "is_loaded_in_4bit", True)
    return model
