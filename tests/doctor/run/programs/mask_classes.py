"""A dataset reads masks in uint8; the loss needs classes in int64, twice."""

import sys

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class MaskDataset(Dataset):
    def __init__(self):
        self.masks = np.zeros((2, 4, 4), dtype=np.uint8)

    def __len__(self):
        return len(self.masks)

    def __getitem__(self, index):
        mask = torch.from_numpy(self.masks[index])
        return torch.rand(3, 4, 4), mask.long() if "repaired" in sys.argv else mask


class OverlapLoss(nn.Module):
    def forward(self, logits, target):
        onehot = nn.functional.one_hot(target, 3).permute(0, 3, 1, 2)
        overlap = (logits.softmax(1) * onehot).sum()
        return nn.functional.cross_entropy(logits, target) - overlap


criterion = OverlapLoss()
for image, mask in DataLoader(MaskDataset(), batch_size=2):
    criterion(image, mask)
