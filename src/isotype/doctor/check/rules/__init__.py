"""The rules: each registers itself under its code when its module is imported."""

from . import (  # noqa: F401
    accelerate,
    deepspeed,
    fp16_and_bf16,
    fsdp,
    lightning,
    mixed_precision,
    near_miss_keys,
    quantisation,
    refused_values,
    repeated_keys,
    sheets,
    silent_losses,
    simpletuner,
    versions,
)
from .base import RULES as _REGISTERED
from .base import page

RULES = dict(sorted(_REGISTERED.items()))  # by code: which file a rule lies in decides nothing

__all__ = ["RULES", "page"]
