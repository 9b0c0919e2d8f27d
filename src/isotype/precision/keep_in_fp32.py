"""Modules that a model's class keeps in fp32 in any dtype of the model: `_keep_in_fp32_modules` of transformers and diffusers.

Both libraries do so while loading; a later cast of the whole model undoes it. The names are parts of a module's path.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def names_kept_in_fp32(model: Any, dtype: torch.dtype) -> frozenset[str]:
    """The names that stay fp32 in a model of `dtype`. transformers keeps `_keep_in_fp32_modules` in fp16 only, and its strict list in bf16
    too; diffusers keeps its one list in both."""
    if dtype not in (torch.float16, torch.bfloat16):
        return frozenset()
    strict, plain = getattr(model, "_keep_in_fp32_modules_strict", ()), getattr(model, "_keep_in_fp32_modules", None) or ()
    of_transformers = hasattr(type(model), "_keep_in_fp32_modules_strict")
    taken = set(strict or ())
    if not of_transformers or dtype == torch.float16:
        taken |= {plain} if isinstance(plain, str) else set(plain)
    return frozenset(taken)


def is_kept_in_fp32(full: str, in_fp32: frozenset[str]) -> bool:
    """Whether a module or parameter of this path is among them; an adapter's own weights are not."""
    path = f".{full}."
    return ".lora_" not in path and any(f".{name}." in path for name in in_fp32)


def modules_kept_in_fp32(model: nn.Module, dtype: torch.dtype) -> set[nn.Module]:
    """Every such module, and every module below one."""
    in_fp32 = names_kept_in_fp32(model, dtype)
    return {module for full, module in model.named_modules() if is_kept_in_fp32(full, in_fp32)} if in_fp32 else set()
