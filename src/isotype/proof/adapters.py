"""Checks the gradients of LoRA on a decoder layer of an 8B model. They are compared with gradients
in fp64 and with PEFT's gradients.

Three models have the same weights and adapters. The first model uses Isotype's ops and LoRA layers,
the second is PEFT's model under autocast, and the third is PEFT's model in fp64. The gradients of
the third model count as exact. If the base is in NF4, it is dequantised for the third model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.tolerance import allowed_error, relative_error
from ..optimize import optimize
from ..precision import PRESETS
from ..precision.apply import apply_precision
from .parts import ResultRow, Scale

RANK = 16  # of the adapters
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TOKENS = 1024  # of one input
TINY_TOKENS = 24  # of one input if `Scale.is_tiny`
SIZES_8B = {
    "vocab_size": 2048,  # the embedding is not checked here
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 1,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
TINY_SIZES = SIZES_8B | {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def check_bf16_base(scale: Scale) -> Iterator[ResultRow]:
    yield from _check_gradients(scale, "bf16-lora")


def check_nf4_base(scale: Scale) -> Iterator[ResultRow]:
    yield from _check_gradients(scale, "nf4-lora")


def build_llama(
    sizes: dict[str, Any], device: str, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16
) -> Any:
    """Builds a Llama model of these sizes with random, frozen weights on the device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(LlamaConfig(**sizes, use_cache=False))
    finally:
        torch.set_default_dtype(default_dtype)
    return model.requires_grad_(False).train()


def quantise_to_nf4(model: Any) -> None:
    """Replaces every linear layer of the decoder by bitsandbytes' NF4 layer, as transformers does
    when it loads a model for QLoRA.
    """
    from bitsandbytes.nn import Linear4bit, Params4bit

    model.is_loaded_in_4bit = True  # PEFT reads this
    for name, linear in list(model.model.named_modules()):
        if not isinstance(linear, nn.Linear):
            continue
        layer: Any = Linear4bit(
            linear.in_features,
            linear.out_features,
            bias=False,
            compute_dtype=torch.bfloat16,
            quant_type="nf4",
        )
        layer.weight = Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4")
        parent_name, _, child_name = name.rpartition(".")
        setattr(model.model.get_submodule(parent_name), child_name, layer.to(linear.weight.device))


def add_adapters(model: Any) -> Any:
    """Returns the model with PEFT's LoRA in fp32 on all linear layers. B is not zero, so that A has
    a gradient.
    """
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    adapted: Any = get_peft_model(
        model, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=TARGETS)
    )
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.02)
    return adapted.train()


def _check_gradients(scale: Scale, preset: str) -> Iterator[ResultRow]:
    sizes = TINY_SIZES if scale.is_tiny else SIZES_8B
    base = build_llama(sizes, scale.device)
    if preset == "nf4-lora":
        quantise_to_nf4(base)
    model = add_adapters(base)
    tokens = TINY_TOKENS if scale.is_tiny else TOKENS
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, sizes["vocab_size"], (1, tokens), generator=generator).to(scale.device)

    plain = _gradients(model, ids, autocast_dtype=torch.bfloat16)
    truth = _gradients(_widen(model), ids)
    precision = PRESETS[preset]
    device_type = torch.device(scale.device).type
    optimize(model, precision, device_type=device_type)
    apply_precision(model, precision, device_type=device_type)
    results = _gradients(model, ids)
    for target in TARGETS:
        yield _compare_target(target, results, plain, truth)


def _compare_target(
    target: str,
    results: dict[str, Tensor],
    plain: dict[str, Tensor],
    truth: dict[str, Tensor],
) -> ResultRow:
    names = [name for name in truth if f".{target}." in name]
    error = max(relative_error(results[name], truth[name]) for name in names)
    plain_error = max(relative_error(plain[name], truth[name]) for name in names)
    ratio = error / allowed_error(plain_error, torch.bfloat16)
    return {
        "name": target,
        "passed": ratio <= 1.0,
        "error": error,
        "plain_error": plain_error,
        "ratio": ratio,
    }


def _gradients(
    model: Any, ids: Tensor, autocast_dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    with torch.autocast(
        ids.device.type, dtype=autocast_dtype or torch.bfloat16, enabled=autocast_dtype is not None
    ):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    gradients = {
        name: parameter.grad.double().cpu()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    model.zero_grad(set_to_none=True)
    return gradients


def _widen(model: Any) -> Any:
    """Returns a copy of the model in fp64, in which 4-bit layers are replaced by plain linear
    layers.
    """
    wide = copy.deepcopy(model)
    for name, module in list(wide.named_modules()):
        quant_state = getattr(getattr(module, "weight", None), "quant_state", None)
        if quant_state is None or not name.endswith("base_layer"):
            continue  # PEFT's layer around a 4-bit layer shows the same weight
        from bitsandbytes.functional import dequantize_4bit

        linear = nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
        values = dequantize_4bit(module.weight.data, quant_state)
        linear.weight = nn.Parameter(values.double(), requires_grad=False)
        parent_name, _, child_name = name.rpartition(".")
        setattr(wide.get_submodule(parent_name), child_name, linear)
    return wide.double()
