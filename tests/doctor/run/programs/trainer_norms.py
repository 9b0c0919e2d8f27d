"""All norms of a bf16 model are cast to fp32, and the Trainer runs without autocast."""

import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

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
    if parameter.ndim == 1:
        parameter.data = parameter.data.float()
rows = [{"input_ids": [2, 5, 6], "labels": [2, 5, 6]} for _ in range(4)]
settings = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    max_steps=1,
    use_cpu=True,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
    bf16="repaired" in sys.argv,
)
Trainer(model, settings, train_dataset=rows).train()
