"""The manifest: what `optimize` replaced, where, and why something was left alone."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

from ..dtypes import name, to_torch
from ..instance_method import Placement
from ..precision.apply import is_quantised
from ..precision.quantised_base import (
    MOST_UNQUANTISED,
    Quantisation,
    detect_quantisation,
    unquantised_share,
)


@dataclass(slots=True)
class Manifest:
    """What `optimize` changed in a model; `print(manifest)` prints one line for modules that are
    alike.
    """

    precision: str = ""
    entries: list[Placement] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unused: tuple[str, ...] = ()
    """Layers whose result the model itself drops, by the beginning of their names: a weight or an
    adapter there gets no gradient.
    """

    @property
    def replaced(self) -> list[Placement]:
        return [entry for entry in self.entries if entry.op]

    @property
    def left(self) -> list[Placement]:
        return [entry for entry in self.entries if not entry.op]

    def lines(self) -> list[str]:
        alike: dict[tuple[str, str, str | None, str], list[str]] = {}
        for e in self.entries:
            alike.setdefault((e.part, e.kind, e.op, e.reason), []).append(e.module)
        shown = []
        for (part, kind, op, reason), modules in alike.items():
            where = (modules[0] or "(the model)") + (
                f" and {len(modules) - 1} more" if len(modules) > 1 else ""
            )
            shown.append(
                f"{part:10s} {op or 'left alone':22s} {kind:24s} {where}"
                + (f"   {reason}" if reason else "")
            )
        return shown + [f"note       {note}" for note in self.notes]

    def to_dict(self) -> dict[str, object]:
        """For run folders and --json."""
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
    """What the weights that were there before are, in a line each: how they were quantised, and
    what has another dtype than declared.
    """
    notes = []
    found = detect_quantisation(model)
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
        plain = (
            not parameter.requires_grad
            and parameter.is_floating_point()
            and not is_quantised(parameter)
        )
        if plain and parameter.dtype != to_torch(declared):
            odd.setdefault(name(parameter.dtype), []).append(full)
    for dtype, names in odd.items():
        if found is not None and dtype == "fp32":
            by = " (PEFT's prepare_model_for_kbit_training does this)"
        else:
            by = ""
        notes.append(
            f"{len(names)} frozen tensors are {dtype}, declared {declared}: {names[0]} first{by}"
        )
    return notes


def _against(found: Quantisation, precision: Any) -> str:
    declared = getattr(precision, "base", None)
    differs = []
    if declared is not None and declared != found.kind:
        differs.append(f"declared {declared}")
    if declared is not None and found.compute not in (None, precision.compute):
        differs.append(f"declared products in {precision.compute}")
    return f"; {' and '.join(differs)}" if differs else ""
