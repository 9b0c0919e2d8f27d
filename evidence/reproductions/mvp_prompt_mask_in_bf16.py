"""transformers 5.23.0, LT007: MVP with prompts in bf16: the mask of the prompt is made without a dtype."""

import torch
from transformers import MvpConfig, MvpModel

config = MvpConfig(
    vocab_size=64, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
    encoder_ffn_dim=32, decoder_ffn_dim=32, use_prompt=True, prompt_length=4, prompt_mid_dim=8,
)  # fmt: skip
ids = torch.arange(3, 11)[None]
print("fp32:", MvpModel(config)(ids, attention_mask=torch.ones_like(ids)).last_hidden_state.dtype)
MvpModel(config).bfloat16()(ids, attention_mask=torch.ones_like(ids))
