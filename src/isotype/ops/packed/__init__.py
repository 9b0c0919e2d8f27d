from .state import PackedState, widen, word_of_state

__all__ = ["PackedState", "widen", "word_of_state"]
