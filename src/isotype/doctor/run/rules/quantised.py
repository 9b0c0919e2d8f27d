"""Recognises floats as operands of products of quantised matrices."""

from __future__ import annotations

import torch

from ....dtypes import format_dtype
from ....finding import Finding
from ..evidence import Evidence
from .findings import make_operand_finding

# products of two quantised matrices, with their usual dtype
_QUANTISED_PRODUCTS = {
    "_int_mm": torch.int8,
    "_scaled_mm": torch.float8_e4m3fn,
    "scaled_mm": torch.float8_e4m3fn,
    "_scaled_grouped_mm": torch.float8_e4m3fn,
}


def find_unquantised_operand(evidence: Evidence) -> Finding | None:
    """Finds a float as an operand of a product such as `torch._int_mm`."""
    name = evidence.operation.rpartition(".")[2]
    usual = _QUANTISED_PRODUCTS.get(name)
    # a scale of each tensor and a bias have fewer dimensions
    matrices = [
        operand
        for operand in evidence.operands
        if operand.shape is not None and len(operand.shape) > 1
    ]
    floats = [operand for operand in matrices if operand.dtype.itemsize > 1]
    if usual is None or not floats:
        return None
    quantised_dtypes = [operand.dtype for operand in matrices if operand.dtype.itemsize == 1]
    quantised = quantised_dtypes[0] if quantised_dtypes else usual
    operand = floats[0]
    return make_operand_finding(
        "RN014",
        evidence,
        operand,
        operation=name,
        device=operand.device.type,
        quantised=str(quantised),
        quantised_name=format_dtype(quantised),
        source=evidence.producer_of(operand).describe(operand.dtype_name),
    )
