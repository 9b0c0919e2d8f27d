"""The manifest: what `optimize` replaced, where, and why something was left alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field

from ..placement import Placement


@dataclass(slots=True)
class Manifest:
    """What `optimize` changed in a model; `print(manifest)` prints one line for modules that are alike."""

    precision: str = ""
    entries: list[Placement] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unused: tuple[str, ...] = ()
    """Layers whose result the model itself drops, by the beginning of their names: a weight or an adapter there gets no gradient."""

    @property
    def replaced(self) -> list[Placement]:
        return [entry for entry in self.entries if entry.op]

    @property
    def left(self) -> list[Placement]:
        return [entry for entry in self.entries if not entry.op]

    def lines(self) -> list[str]:
        alike = Counter((e.part, e.kind, e.op, e.reason) for e in self.entries)
        first: dict[tuple[str, str, str | None, str], str] = {}
        for e in self.entries:
            first.setdefault((e.part, e.kind, e.op, e.reason), e.module)
        shown = []
        for key, count in alike.items():
            part, kind, op, reason = key
            where = first[key] or "(the model)"
            where += f" and {count - 1} more" if count > 1 else ""
            shown.append(f"{part:10s} {op or 'left alone':22s} {kind:24s} {where}" + (f"   {reason}" if reason else ""))
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
        return "\n".join([f"optimized: {len(self.replaced)} ops placed, {len(self.left)} left alone{precision}", *self.lines()])
