"""Loading a base in the dtype of its files: transformers then maps the files, and a weight is read when it is used.

This serves processes that share a model: each casts only the rows that it keeps (`precision.part`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..dtypes import to_torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_DTYPES = {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}  # safetensors' names
_ALWAYS_FP32 = ("inv_freq", "original_inv_freq")  # buffers of rotary embeddings


def dtype_of_files(name: str, revision: str | None) -> torch.dtype | None:
    """The dtype of all floating-point tensors in the model's safetensors files; None where there are several or no such files.

    name  a folder or hub id; files of the hub are fetched as `from_pretrained` would
    """
    found: set[str] = set()
    for file in _files(name, revision):
        from safetensors import safe_open

        with safe_open(file, framework="pt") as tensors:
            found |= {tensors.get_slice(key).get_dtype() for key in tensors.keys()}  # noqa: SIM118  # not a dictionary
    floating = {dtype for dtype in found if not dtype.startswith(("I", "U", "BOOL"))}
    (one,) = floating if len(floating) == 1 else ("",)
    return to_torch(_DTYPES[one]) if one in _DTYPES else None


def _files(name: str, revision: str | None) -> list[str]:
    from transformers.utils import cached_file

    options: dict[str, Any] = {"revision": revision, "_raise_exceptions_for_missing_entries": False}
    index = cached_file(name, INDEX, **options)
    names = {SINGLE} if index is None else set(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values())
    files = [cached_file(name, each, **options) for each in sorted(names)]
    return [] if None in files else [file for file in files if file is not None]


def depends_on_dtype(model: PreTrainedModel) -> bool:
    """Whether a buffer may have been computed in the dtype that the model was loaded in: a later cast of the weights would leave it so."""
    return any(b.is_floating_point() and full.rpartition(".")[2] not in _ALWAYS_FP32 for full, b in model.named_buffers())


def declare(config: Any, dtype: torch.dtype) -> None:
    """Writes into a model's configuration the dtype that its weights will have, as `from_pretrained` does."""
    for part in [config, *(getattr(config, name, None) for name in config.sub_configs)]:
        if part is not None:
            part.dtype = dtype
