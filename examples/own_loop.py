"""`optimize` in your own training loop: fp32 weights under bf16 autocast, the manifest of replaced
modules, and `restore`.
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import isotype

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
)  # fmt: skip
model = LlamaForCausalLM(config)
print(isotype.optimize(model))  # each replaced module, and the reason for each that was not

optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
rows = torch.randint(0, 512, (4, 48))  # random tokens, which the model memorises
losses = []
for _step in range(20):
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=rows, labels=rows).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print("losses", [round(loss, 2) for loss in losses[::5]])

isotype.restore(model)  # undoes `optimize`: the model runs the code of transformers again
with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
    plain = model(input_ids=rows, labels=rows).loss.item()
print("after restore", round(plain, 2))
assert losses[-1] < losses[0] - 1
assert plain < losses[0] - 1
