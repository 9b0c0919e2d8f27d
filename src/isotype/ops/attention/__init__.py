from .documents import Documents
from .function import attention, backend_of
from .reference import attention_reference

__all__ = ["Documents", "attention", "attention_reference", "backend_of"]
