"""Ensures that the saved model equals the trained model. For this, the module compares the weights
bit for bit in their saved dtype, and corrects config.json.

The entry `tie_word_embeddings` matters because programs that obey it use the embedding as the head,
and ignore a head in the file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import RunError
from .packed import read_tensor_parts

Digests = Mapping[str, str]  # name of a tensor -> a hash of its bytes


def cast_tensors(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Casts floating-point tensors to `dtype`. Tensors that share memory still share it, so that a
    tied head is stored once.
    """
    cast_by_memory: dict[tuple[Any, ...], Tensor] = {}
    result = {}
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            result[name] = tensor
            continue
        memory_key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.is_meta or not tensor.numel() or memory_key not in cast_by_memory:
            cast_by_memory[memory_key] = tensor.to(dtype)
        result[name] = cast_by_memory[memory_key]
    return result


def unshare_memory(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies each tensor that shares memory with an earlier tensor, so that every tensor is stored
    under its own name.
    """
    seen_pointers: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        if tensor.numel() and tensor.data_ptr() in seen_pointers:
            result[name] = tensor.clone()
        else:
            result[name] = tensor
        seen_pointers.add(tensor.data_ptr())
    return result


def embedding_and_head(model: Any) -> tuple[str, str] | None:
    """Returns the names of the embedding's weight and of the head's weight. Returns None if the
    model has no embedding or no head.
    """
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    names = {id(module): f"{name}.weight" for name, module in model.named_modules()}
    if embedding is None or head is None or id(embedding) not in names or id(head) not in names:
        return None
    return names[id(embedding)], names[id(head)]


def write_config(folder: Path, dtype: torch.dtype, *, tied: bool | None) -> None:
    """Writes the dtype of the weights and `tie_word_embeddings` into config.json. Both are written
    explicitly, because the default of a missing entry differs between families, engines and
    versions of transformers.

    tied  whether head and embedding share one weight; None if this is unknown, and the entry is
          then not changed
    """
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    # otherwise dtype="auto" would load the model in the dtype in which it was trained
    config["dtype"] = str(dtype).removeprefix("torch.")
    if tied is not None:
        config["tie_word_embeddings"] = tied
        for part in config.values():
            if isinstance(part, dict) and "tie_word_embeddings" in part:
                part["tie_word_embeddings"] = tied
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def refuse_wrong_tying(folder: Path, embedding: str, head: str) -> None:
    """Raises RunError SV001 if `tie_word_embeddings` in config.json contradicts the saved tensors.
    This is the case if a head was saved although the entry is true, or if no head was saved
    although the entry is false.

    Some families save the head under another name (`embed_out` of GPT-NeoX). Their files are not
    checked.
    """
    tied = json.loads((folder / "config.json").read_text(encoding="utf-8")).get(
        "tie_word_embeddings"
    )
    names = read_tensor_parts(folder.glob("*.safetensors"))
    # the module that owns the head; "" for the model itself
    owner = head.rpartition(".")[0].rpartition(".")[0]
    head_names = {
        name
        for name in names
        if name.startswith(owner) and "." not in name.removeprefix(owner).removesuffix(".weight")
    }
    if embedding not in names or tied is None or (head not in names and head_names):
        return
    if tied == (head in names):
        contradiction = "and has" if tied else "and lacks"
        raise _difference_error(
            folder,
            f"config.json says tie_word_embeddings: {str(tied).lower()}, {contradiction} {head}",
        )


def digest_tensors(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Digests:
    """Casts each floating-point tensor to `dtype`, and returns a dictionary from the name of each
    tensor to the SHA-256 of its bytes.
    """
    return {
        name: _digest(tensor, dtype)
        for name, tensor in tensors.items()
        if tensor.is_floating_point()
    }


def trained_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns the trained parameters by name. A tied parameter appears under each of its names."""
    return {
        name: p for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad
    }


def refuse_difference(
    folder: Path, expected: Digests, loaded: nn.Module, dtype: torch.dtype
) -> None:
    """Compares the tensors of a model that was loaded from `folder` with the digests of the tensors
    that were saved in `dtype`. Raises RunError SV001 naming the first tensor that differs.
    """
    loaded_tensors = dict(loaded.named_parameters(remove_duplicate=False)) | dict(
        loaded.named_buffers(remove_duplicate=False)
    )
    missing = [name for name in expected if name not in loaded_tensors]
    if missing:
        raise _difference_error(
            folder, f"{missing[0]} is not there when it is loaded ({len(missing)} such)"
        )
    different = [
        name for name, digest in expected.items() if _digest(loaded_tensors[name], dtype) != digest
    ]
    if different:
        raise _difference_error(
            folder,
            f"{different[0]} is not the trained one when it is loaded ({len(different)} of"
            f" {len(expected)} such)",
        )


def _digest(tensor: Tensor, dtype: torch.dtype) -> str:
    value = tensor.detach().to(dtype).contiguous().cpu()
    return hashlib.sha256(value.view(-1).view(torch.uint8).numpy().data).hexdigest()


def _difference_error(folder: Path, message: str) -> RunError:
    return RunError(
        f"{folder}: {message}",
        code="SV001",
        fix="the checkpoints are untouched; report this with env.json",
    )
