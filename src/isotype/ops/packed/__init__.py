from .state import PackedState, StackState, in_rows, quantised, widen, widen_4bit

__all__ = ["PackedState", "StackState", "in_rows", "quantised", "widen", "widen_4bit"]
