"""The manifest: what `optimize` replaced, where, and why something was left alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Entry:
    """One place in the model.

    part     norm, gated mlp, rotary, attention, head, lora, 4-bit, generate, experts, or foreign
    place    the module's path in the model
    kind     its class
    op       the op that runs there now; None when it was left alone
    why      the reason why it was left alone, or what the probe established
    """

    part: str
    place: str
    kind: str
    op: str | None
    why: str = ""


@dataclass(slots=True)
class Manifest:
    """What `optimize` did to a model; `print(manifest)` shows it, one line for places that are alike."""

    precision: str = ""
    entries: list[Entry] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, part: str, place: str, module: object, op: str | None, why: str = "") -> None:
        self.entries.append(Entry(part, place, type(module).__name__, op, why))

    @property
    def replaced(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.op]

    @property
    def left(self) -> list[Entry]:
        return [entry for entry in self.entries if not entry.op]

    def lines(self) -> list[str]:
        alike = Counter((e.part, e.kind, e.op, e.why) for e in self.entries)
        first: dict[tuple[str, str, str | None, str], str] = {}
        for e in self.entries:
            first.setdefault((e.part, e.kind, e.op, e.why), e.place)
        shown = []
        for key, count in alike.items():
            part, kind, op, why = key
            where = first[key] or "(the model)"
            where += f" and {count - 1} more" if count > 1 else ""
            shown.append(f"{part:10s} {op or 'left alone':22s} {kind:24s} {where}" + (f"   {why}" if why else ""))
        return shown + [f"note       {note}" for note in self.notes]

    def to_dict(self) -> dict[str, object]:
        """For run folders and --json."""
        return {
            "precision": self.precision,
            "entries": [{"part": e.part, "place": e.place, "kind": e.kind, "op": e.op, "why": e.why} for e in self.entries],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        head = f"optimized: {len(self.replaced)} places, {len(self.left)} left alone" + (f" ({self.precision})" if self.precision else "")
        return "\n".join([head, *self.lines()])
