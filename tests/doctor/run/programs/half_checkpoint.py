"""`from_pretrained` keeps the fp16 of a checkpoint, and a loss scaler gets fp16 gradients."""

import sys
import tempfile

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

DTYPE = torch.float32 if "repaired" in sys.argv else "auto"

config = LlamaConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
)


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPE)


with tempfile.TemporaryDirectory() as folder:
    LlamaForCausalLM(config).half().save_pretrained(folder)
    model = load(folder)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
ids = torch.arange(8)[None]
with torch.autocast("cpu", dtype=torch.float16):
    loss = model(input_ids=ids, labels=ids).loss
scaler.scale(loss).backward()
scaler.unscale_(optimizer)
scaler.step(optimizer)
