"""A hook returns fp32 to a library's bf16 norm, and the user's line passes only token ids."""

import sys

import torch
from transformers import OPTConfig, OPTForCausalLM

IS_REPAIRED = "repaired" in sys.argv

config = OPTConfig(
    vocab_size=32,
    hidden_size=16,
    ffn_dim=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    word_embed_proj_dim=16,
    max_position_embeddings=16,
)
model = OPTForCausalLM(config).to(torch.bfloat16)
if not IS_REPAIRED:
    embedding = model.get_input_embeddings()
    embedding.register_forward_hook(lambda module, args, output: output.float())
ids = torch.arange(8)[None]
out = model(ids, labels=ids)
out.loss.backward()
