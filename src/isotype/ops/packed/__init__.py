from .state import PackedState, quantised, widen

__all__ = ["PackedState", "quantised", "widen"]
