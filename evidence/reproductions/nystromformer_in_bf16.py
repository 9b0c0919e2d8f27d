"""transformers 5.23.0, LT007: Nystromformer in bf16 with its default configuration: `torch.eye` without a dtype."""

import torch
from transformers import NystromformerConfig, NystromformerModel

config = NystromformerConfig(
    vocab_size=64,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=32,
    segment_means_seq_len=16,
    num_landmarks=4,
)
NystromformerModel(config).bfloat16()(torch.arange(16)[None])
