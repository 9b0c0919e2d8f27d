"""An unmodified Hugging Face `Trainer` with a model in which `optimize` placed ops. The losses
equal those of the plain model.
"""

from __future__ import annotations

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import isotype


def train(optimized: bool) -> list[float]:
    """Returns the losses of ten steps."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
        )
    )
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 256, (40, 32))]
    if optimized:
        isotype.optimize(model)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=10, per_device_train_batch_size=4, learning_rate=1e-3, logging_steps=1, bf16=True,
            use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(model=model, args=arguments, train_dataset=rows)
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


plain = train(optimized=False)
with_ops = train(optimized=True)
print("plain    ", plain)
print("optimized", with_ops)
assert len(plain) == len(with_ops) == 10
# two correct bf16 implementations differ by rounding
assert max(abs(a - b) for a, b in zip(plain, with_ops, strict=True)) < 0.02
