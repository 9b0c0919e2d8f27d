from .state import (
    PackedState,
    StackState,
    dequantise_4bit,
    dequantise_packed,
    pack_along_rows,
    pack_weight,
)

__all__ = [
    "PackedState",
    "StackState",
    "dequantise_4bit",
    "dequantise_packed",
    "pack_along_rows",
    "pack_weight",
]
