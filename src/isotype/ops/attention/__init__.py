from .gpu import Documents
from .op import attention, attention_reference, backend_of

__all__ = ["Documents", "attention", "attention_reference", "backend_of"]
