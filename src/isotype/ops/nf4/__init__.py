from .op import widen_4bit

__all__ = ["widen_4bit"]
