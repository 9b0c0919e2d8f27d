"""A Trainer's callback casts the model to bf16 to generate faster."""

import copy
import sys
import tempfile

import torch
from transformers import OPTConfig, OPTForCausalLM, Trainer, TrainerCallback, TrainingArguments


class Samples(TrainerCallback):
    def on_step_end(self, args, state, control, model=None, **kwargs):
        if "repaired" in sys.argv:
            model = copy.deepcopy(model)
        model.to(torch.bfloat16)
        model(torch.tensor([[2, 5, 6]]))


config = OPTConfig(
    vocab_size=32,
    hidden_size=16,
    ffn_dim=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    word_embed_proj_dim=16,
    max_position_embeddings=16,
)
rows = [{"input_ids": torch.arange(4), "labels": torch.arange(4)} for _ in range(4)]
settings = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    max_steps=2,
    use_cpu=True,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
)
samples = Samples()
trainer = Trainer(OPTForCausalLM(config), settings, train_dataset=rows, callbacks=[samples])
trainer.train()
