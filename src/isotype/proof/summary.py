"""Converts the result of `isotype proof` to text, to JSON, and to a row of the table in
docs/cards.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .parts import PARTS

FORMAT = 1  # version of the format of the result
# the statuses of a part
PASSED = "passed"
FAILED = "failed"
TIMED_OUT = "timed out"
NO_PACKAGE = "package missing"
NOT_RUN = "not run"
# columns of the table in docs/cards.md
COLUMNS = (
    "card",
    "versions",
    "kernels",
    "LoRA",
    "presets",
    "resume",
    "step of 0.5B",
    "layers of 8B",
    "layers of 8B, NF4",
    "memory",
)


@dataclass
class Proof:
    """Contains everything that was checked and measured on a card.

    parts  name of the part -> its status, seconds, rows and error
    left   parts for which no time was left
    """

    card: dict[str, Any]
    is_tiny: bool = False
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)

    def status(self, name: str) -> str:
        return str(self.parts.get(name, {}).get("status", NOT_RUN))

    @property
    def failed(self) -> list[str]:
        return [name for name in self.parts if self.status(name) in (FAILED, TIMED_OUT)]

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "card": self.card,
            "tiny": self.is_tiny,
            "parts": self.parts,
            "left": self.left,
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Proof:
        return cls(content["card"], content["tiny"], dict(content["parts"]))


def card_line(card: dict[str, Any]) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in card["packages"].items())
    details = [
        f"{card['memory_GiB']} GiB",
        card["architecture"],
        card["driver"],
        "dtypes " + " ".join(card["dtypes"]),
    ]
    return f"card      {card['name']}, {', '.join(filter(None, details))}; {packages}"


def part_line(name: str, part: dict[str, Any]) -> str:
    """Returns one line about a part, with its status and with what it found."""
    checks = [row for row in part["rows"] if "passed" in row]
    passed = sum(1 for row in checks if row["passed"])
    details = []
    if checks:
        details.append(f"{passed} of {len(checks)} checks")
    if comparison := compare_steps(part["rows"]):
        details.append(comparison)
    details += describe_other_libraries(part["rows"])
    if ratio := _memory_ratio(part["rows"]):
        details.append(f"measured {ratio:.2f} of the plan")
    details += [f"{row['name']}: {row['skipped']}" for row in part["rows"] if "skipped" in row]
    details += [_failure(row) for row in checks if not row["passed"]]
    if part["error"]:
        details.append(part["error"])
    details.append(f"{part['seconds']:.0f} s")
    return f"{name:<13} {part['status']:<15} {'; '.join(details)}"


def _failure(row: dict[str, Any]) -> str:
    if "error" in row:
        tensor = f" ({row['tensor']})" if row.get("tensor") else ""
        return f"{row['name']}{tensor}: error {row['error']:.1e}, PyTorch {row['plain_error']:.1e}"
    return f"{row['name']} failed"


def compare_steps(rows: list[dict[str, Any]]) -> str:
    """Compares the time and memory of Isotype's step with those of PEFT's step. Returns "" if the
    rows do not contain both steps.
    """
    by_name = {row["name"]: row for row in rows if "ms" in row}
    ours = by_name.get("isotype")
    theirs = by_name.get("peft")
    if ours is None or theirs is None:
        return ""
    return (
        f"{theirs['ms'] / ours['ms']:.2f} times PEFT's speed at"
        f" {ours['peak_GiB'] / theirs['peak_GiB']:.2f} of its memory ({ours['layers']} layers,"
        f" {ours['tokens']} tokens, {ours['ms']:.0f} ms)"
    )


def describe_other_libraries(rows: list[dict[str, Any]]) -> list[str]:
    """Describes the steps of Unsloth and Liger, which are measured without Isotype's step."""
    return [
        f"{row['name']} {row['ms']:.0f} ms, {row['peak_GiB']:.1f} GiB ({row['layers']} layers)"
        for row in rows
        if "ms" in row and row["name"] not in ("isotype", "peft")
    ]


def _memory_ratio(rows: list[dict[str, Any]]) -> float | None:
    return next((float(row["ratio"]) for row in rows if "planned_GiB" in row), None)


def markdown_table(proof: Proof) -> str:
    """Returns the row for the table in docs/cards.md, together with the table's header."""
    card = proof.card
    versions = ", ".join(
        f"{name} {card['packages'][name]}"
        for name in ("torch", "triton")
        if name in card["packages"]
    )
    cells = [
        card["name"],
        f"Isotype {card['isotype']}, {versions}",
        _checks_cell(proof, "kernels"),
        _checks_cell(proof, "adapters", "adapters-nf4"),
        _checks_cell(proof, "presets"),
        _checks_cell(proof, "resume"),
        _steps_cell(proof, "speed-0.5b"),
        _steps_cell(proof, "speed-8b"),
        _steps_cell(proof, "speed-8b-nf4"),
        _memory_cell(proof),
    ]
    lines = [COLUMNS, ("---",) * len(COLUMNS), tuple(cells)]
    note = "\nSizes of a test: the times mean nothing.\n" if proof.is_tiny else ""
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n" + note


def _checks_cell(proof: Proof, *names: str) -> str:
    rows = [row for name in names for row in proof.parts.get(name, {}).get("rows", [])]
    checks = [row for row in rows if "passed" in row]
    if not checks:
        return "; ".join(dict.fromkeys(proof.status(name) for name in names))
    return f"{sum(1 for row in checks if row['passed'])} of {len(checks)}"


def _steps_cell(proof: Proof, name: str) -> str:
    comparison = compare_steps(proof.parts.get(name, {}).get("rows", []))
    return comparison or proof.status(name)


def _memory_cell(proof: Proof) -> str:
    ratio = _memory_ratio(proof.parts.get("memory", {}).get("rows", []))
    return proof.status("memory") if ratio is None else f"{ratio:.2f} of the plan"


def result_lines(proof: Proof, folder: str) -> list[str]:
    """Returns the lines that the command prints at the end."""
    passed_count = sum(1 for name in PARTS if proof.status(name) == PASSED)
    lines = [f"result    {passed_count} of {len(PARTS)} parts passed"]
    if proof.failed:
        lines.append(f"failed    {' '.join(proof.failed)}")
    if proof.left:
        lines.append(
            f"left      {' '.join(proof.left)}: no time was left; the same command goes on with them"
        )
    lines.append(f"written   {folder}/proof.json and {folder}/proof.md; nothing was sent")
    return lines
