"""A Trainer's collator casts all tensors of the batch to bf16."""

import sys
import tempfile

import torch
from transformers import OPTConfig, OPTForCausalLM, Trainer, TrainingArguments


def collate(rows):
    ids = torch.tensor([row["input_ids"] for row in rows])
    batch = {"input_ids": ids, "labels": ids.clone()}
    if "repaired" in sys.argv:
        return batch
    return {name: tensor.to(torch.bfloat16) for name, tensor in batch.items()}


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
rows = [{"input_ids": [2, 5, 6, 7]} for _ in range(4)]
settings = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    max_steps=1,
    use_cpu=True,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
)
Trainer(model, settings, data_collator=collate, train_dataset=rows).train()
