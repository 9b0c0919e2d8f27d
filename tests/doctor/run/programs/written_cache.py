"""A function that has returned writes fp16 keys and values into the cache of a bf16 model."""

import sys

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

DTYPE = torch.bfloat16 if "repaired" in sys.argv else torch.float16


def write(layer, keys, values):
    layer.keys = keys
    layer.values = values


def compress(cache):
    for layer in cache.layers:
        restored = []
        for tensor in (layer.keys, layer.values):
            scale = tensor.float().abs().amax(-1, keepdim=True) / 127
            codes = torch.round(tensor.float() / scale)
            restored.append((codes * scale).to(DTYPE))
        write(layer, *restored)
    return cache


config = LlamaConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
)
model = LlamaForCausalLM(config).to(torch.bfloat16)
with torch.no_grad():
    out = model(torch.arange(4)[None], past_key_values=DynamicCache(), use_cache=True)
    cache = compress(out.past_key_values)
    model(torch.arange(1)[None], past_key_values=cache, use_cache=True)
