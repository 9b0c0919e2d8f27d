"""A Trainer's collator makes float64 targets; the loss fails in backward."""

import sys
import tempfile

import numpy as np
import torch
from torch import nn
from transformers import Trainer, TrainingArguments


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, features, labels=None):
        prediction = self.linear(features)[:, 0]
        return {"loss": nn.functional.huber_loss(prediction, labels), "logits": prediction}


def collate(rows):
    features = torch.stack([row["features"] for row in rows])
    scores = np.array([row["score"] for row in rows])
    if "repaired" in sys.argv:
        return {"features": features, "labels": torch.tensor(scores, dtype=torch.float32)}
    return {"features": features, "labels": torch.tensor(scores)}


rows = [{"features": torch.randn(3), "score": 0.5} for _ in range(4)]
settings = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    max_steps=1,
    use_cpu=True,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
    remove_unused_columns=False,
)
Trainer(Regressor(), settings, data_collator=collate, train_dataset=rows).train()
