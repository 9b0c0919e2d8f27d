"""The manifest's lines about the weights of the base."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..dtypes import name, to_torch
from ..precision.apply import is_quantised
from ..precision.quantised_base import MOST_UNQUANTISED, Quantisation, of_model, unquantised_share


def base_notes(model: nn.Module, precision: Any = None) -> list[str]:
    """What the weights that were there before are, in a line each: how they were quantised, and what has another dtype than declared."""
    notes = []
    found = of_model(model)
    if found is not None:
        notes.append(f"base: {found}" + _against(found, precision))
        share, largest = unquantised_share(model)
        if share > MOST_UNQUANTISED:
            notes.append(f"base: {share:.0%} of its matrices are not quantised, such as {largest}")
    declared = getattr(precision, "unquantised", None)
    if declared is None:
        return notes
    odd: dict[str, list[str]] = {}
    for full, parameter in model.named_parameters():
        plain = not parameter.requires_grad and parameter.is_floating_point() and not is_quantised(parameter)
        if plain and parameter.dtype != to_torch(declared):
            odd.setdefault(name(parameter.dtype), []).append(full)
    for dtype, names in odd.items():
        by = " (PEFT's prepare_model_for_kbit_training does this)" if found is not None and dtype == "fp32" else ""
        notes.append(f"{len(names)} frozen tensors are {dtype}, declared {declared}: {names[0]} first{by}")
    return notes


def _against(found: Quantisation, precision: Any) -> str:
    declared = getattr(precision, "base", None)
    differs = []
    if declared is not None and declared != found.kind:
        differs.append(f"declared {declared}")
    if declared is not None and found.compute not in (None, precision.compute):
        differs.append(f"declared products in {precision.compute}")
    return f"; {' and '.join(differs)}" if differs else ""
