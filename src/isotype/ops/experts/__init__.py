from .op import Adapter, Clamped, experts

__all__ = ["Adapter", "Clamped", "experts"]
