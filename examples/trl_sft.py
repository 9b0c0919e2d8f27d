"""TRL's `SFTTrainer` with PEFT's LoRA, fused by `optimize`. Add the adapter first, so that
`optimize` finds its layers.
"""

from __future__ import annotations

import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import isotype

rows = [
    {"prompt": f"What is {a} plus {b}? ", "completion": f"{a} plus {b} is {a + b}."}
    for a in range(10)
    for b in range(4)
]


def small_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([row["prompt"] + row["completion"] for row in rows], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


torch.manual_seed(0)
tokenizer = small_tokenizer()
base = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
)
model = get_peft_model(
    base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
)
manifest = isotype.optimize(model)
print(manifest)

with tempfile.TemporaryDirectory() as folder:
    arguments = SFTConfig(
        output_dir=folder, max_steps=8, per_device_train_batch_size=4, learning_rate=2e-3, logging_steps=1, bf16=True, use_cpu=True,
        report_to=[], save_strategy="no", disable_tqdm=True, max_length=64, gradient_checkpointing=False,
    )  # fmt: skip
    trainer = SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print("losses", losses)
assert len(losses) == 8
assert losses[-1] < losses[0]
assert "lora" in str(manifest).lower()
