"""The adapter was saved in bf16, and the server reads it into NumPy arrays."""

import sys
import tempfile
from pathlib import Path

import safetensors.torch
import torch
from safetensors.numpy import load_file


def save_adapter(path):
    safetensors.torch.save_file({"lora_A": torch.ones(2, 4, dtype=torch.bfloat16)}, path)


def read_adapter(path):
    if "repaired" in sys.argv:
        tensors = safetensors.torch.load_file(path)
        return {name: tensor.float().numpy() for name, tensor in tensors.items()}
    return load_file(path)


with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "adapter.safetensors"
    save_adapter(path)
    print(read_adapter(path)["lora_A"].shape)
