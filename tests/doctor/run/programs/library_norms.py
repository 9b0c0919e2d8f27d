"""The norms of a library's model are fp32, and the user's line passes only token ids."""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

IS_REPAIRED = "repaired" in sys.argv

config = LlamaConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
)
model = LlamaForCausalLM(config).to(torch.bfloat16)
for parameter in model.parameters():
    if parameter.ndim == 1 and not IS_REPAIRED:
        parameter.data = parameter.data.float()
ids = torch.arange(8)[None]
out = model(input_ids=ids, labels=ids)
out.loss.backward()
