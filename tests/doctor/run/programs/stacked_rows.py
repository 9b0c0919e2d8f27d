"""A collator stacks the float64 arrays that the dataset makes."""

import sys

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Waves(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        row = {"label": index % 2}
        row["wave"] = np.sin(440 * np.arange(16) / 16000)
        return row


def collate(rows):
    waves = torch.stack([torch.as_tensor(row["wave"]) for row in rows])
    return {"wave": waves.unsqueeze(1), "label": torch.tensor([row["label"] for row in rows])}


model = nn.Sequential(nn.Conv1d(1, 2, 8), nn.Flatten(), nn.Linear(18, 2))
batch = next(iter(DataLoader(Waves(), batch_size=2, collate_fn=collate)))
wave = batch["wave"]
if "repaired" in sys.argv:
    wave = wave.to(torch.float32)
nn.functional.cross_entropy(model(wave), batch["label"]).backward()
