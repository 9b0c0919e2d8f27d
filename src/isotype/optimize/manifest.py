"""The manifest lists the modules that `optimize` replaced, each with its op, and the reasons why
other modules were not replaced.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

from ..dtypes import format_dtype, to_torch
from ..instance_method import Placement
from ..precision.apply import is_quantised
from ..precision.quantised_base import (
    MAX_UNQUANTISED_SHARE,
    Quantisation,
    detect_quantisation,
    unquantised_share,
)


@dataclass(slots=True)
class Manifest:
    """Lists the changes that `optimize` made to a model. `print(manifest)` prints one line for each
    kind of module, not one for each module.

    precision  the declared precision as text; "" without one
    entries    each module that `optimize` considered, and the op that it placed there
    notes      sentences about the whole model, such as how its base is quantised
    """

    precision: str = ""
    entries: list[Placement] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unused: tuple[str, ...] = ()
    """Beginnings of the names of layers whose result the model does not use. A weight or an adapter
    there gets no gradient.
    """

    @property
    def replaced(self) -> list[Placement]:
        return [entry for entry in self.entries if entry.op]

    @property
    def left(self) -> list[Placement]:
        return [entry for entry in self.entries if not entry.op]

    def lines(self) -> list[str]:
        # in an entry, `part` is the kind of place in the model, and `kind` the module's class
        modules_by_entry: dict[tuple[str, str, str | None, str], list[str]] = {}
        for entry in self.entries:
            modules_by_entry.setdefault(
                (entry.part, entry.kind, entry.op, entry.reason), []
            ).append(entry.module)
        rows = []
        for (part, class_name, op, reason), modules in modules_by_entry.items():
            location = modules[0] or "(the model)"
            if len(modules) > 1:
                location += f" and {len(modules) - 1} more"
            row = f"{part:10s} {op or 'left alone':22s} {class_name:24s} {location}"
            if reason:
                row += f"   {reason}"
            rows.append(row)
        return rows + [f"note       {note}" for note in self.notes]

    def to_dict(self) -> dict[str, object]:
        """Returns the content of the manifest for run folders and for `--json`."""
        return {
            "precision": self.precision,
            "entries": [asdict(entry) for entry in self.entries],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        precision = f" ({self.precision})" if self.precision else ""
        return "\n".join(
            [
                (
                    f"optimized: {len(self.replaced)} ops placed, {len(self.left)} left"
                    f" alone{precision}"
                ),
                *self.lines(),
            ]
        )


def base_notes(model: nn.Module, precision: Any = None) -> list[str]:
    """Returns sentences about the weights of the base model. They state how the weights are
    quantised, and which frozen weights have another dtype than declared.
    """
    notes = []
    quantisation = detect_quantisation(model)
    if quantisation is not None:
        notes.append(f"base: {quantisation}" + _describe_mismatch(quantisation, precision))
        share, largest = unquantised_share(model)
        if share > MAX_UNQUANTISED_SHARE:
            notes.append(f"base: {share:.0%} of its matrices are not quantised, such as {largest}")
    declared = getattr(precision, "unquantised", None)
    if declared is None:
        return notes
    names_by_dtype: dict[str, list[str]] = {}
    for parameter_name, parameter in model.named_parameters():
        is_frozen_float = (
            not parameter.requires_grad
            and parameter.is_floating_point()
            and not is_quantised(parameter)
        )
        if is_frozen_float and parameter.dtype != to_torch(declared):
            names_by_dtype.setdefault(format_dtype(parameter.dtype), []).append(parameter_name)
    for dtype, names in names_by_dtype.items():
        if quantisation is not None and dtype == "fp32":
            cause = " (PEFT's prepare_model_for_kbit_training does this)"
        else:
            cause = ""
        notes.append(
            f"{len(names)} frozen tensors are {dtype}, declared {declared}: {names[0]} first{cause}"
        )
    return notes


def _describe_mismatch(quantisation: Quantisation, precision: Any) -> str:
    declared = getattr(precision, "base", None)
    mismatches = []
    if declared is not None and declared != quantisation.weight_format:
        mismatches.append(f"declared {declared}")
    if declared is not None and quantisation.compute not in (None, precision.compute):
        mismatches.append(f"declared products in {precision.compute}")
    return f"; {' and '.join(mismatches)}" if mismatches else ""
