"""`from_pretrained` keeps the bf16 of a checkpoint, and the modules around the model are fp32."""

import sys
import tempfile

import torch
from torch import nn
from transformers import LlamaConfig, LlamaModel

DTYPE = torch.float32 if "repaired" in sys.argv else "auto"

config = LlamaConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
)


class SpeechModel(nn.Module):
    def __init__(self, folder):
        super().__init__()
        self.backbone = LlamaModel.from_pretrained(folder, dtype=DTYPE)
        self.speech_embedding = nn.Embedding(8, 16)
        self.score = nn.Linear(16, 8)

    def forward(self, tokens):
        embeddings = self.speech_embedding(tokens)
        hidden = self.backbone(inputs_embeds=embeddings).last_hidden_state
        return self.score(hidden)


with tempfile.TemporaryDirectory() as folder:
    LlamaModel(config).bfloat16().save_pretrained(folder)
    model = SpeechModel(folder)
model(torch.arange(4)[None])
