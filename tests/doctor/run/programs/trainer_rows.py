"""The dataset of a Trainer makes float64 tensors, which a library's model multiplies."""

import sys
import tempfile

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import PatchTSTConfig, PatchTSTForRegression, Trainer, TrainingArguments


class Series(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        values = np.random.default_rng(index).normal(size=(8, 1))
        series = torch.from_numpy(values - values.mean())
        if "repaired" in sys.argv:
            series = series.to(torch.float32)
        return {"past_values": series, "target_values": torch.zeros(1)}


config = PatchTSTConfig(
    num_input_channels=1, context_length=8, patch_length=4, patch_stride=4, num_hidden_layers=1,
    d_model=8, num_attention_heads=2, ffn_dim=8, num_targets=1,
)  # fmt: skip
settings = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    max_steps=1,
    use_cpu=True,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
)
Trainer(PatchTSTForRegression(config), settings, train_dataset=Series()).train()
