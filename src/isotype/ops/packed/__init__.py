from .state import PackedState, StackState, quantised, widen

__all__ = ["PackedState", "StackState", "quantised", "widen"]
