from .state import PackedState, StackState, pack_along_rows, pack_weight, widen, widen_4bit

__all__ = ["PackedState", "StackState", "pack_along_rows", "pack_weight", "widen", "widen_4bit"]
