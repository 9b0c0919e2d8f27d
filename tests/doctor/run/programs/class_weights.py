"""A module gets fp32 class weights as an argument, and its layers are cast to bf16."""

import sys

import torch
from torch import nn


class Classifier(nn.Module):
    def __init__(self, class_weights):
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.loss_function = nn.CrossEntropyLoss(class_weights, label_smoothing=0.1)

    def forward(self, features, labels):
        return self.loss_function(self.head(features), labels)


model = Classifier(torch.tensor([1.0, 2.0, 4.0]))
part = model if "repaired" in sys.argv else model.head
part.to(torch.bfloat16)
model(torch.randn(6, 4, dtype=torch.bfloat16), torch.tensor([0, 1, 2, 0, 1, 2])).backward()
