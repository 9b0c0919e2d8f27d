from .op import Gated, gated_gradients, gated_gradients_, gated_product

__all__ = ["Gated", "gated_gradients", "gated_gradients_", "gated_product"]
