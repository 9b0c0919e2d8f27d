from .gpu import Documents
from .op import attention, attention_reference, choose_backend

__all__ = ["Documents", "attention", "attention_reference", "choose_backend"]
