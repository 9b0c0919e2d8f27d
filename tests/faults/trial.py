"""One fault and what came of it, and the table of many."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A fault done to a run.

    part, what  the fault, as a row of the table
    wrong       why it did not survive: the command did not end as it should, or say what happened
                in one message, or could not go on
    different   where the run that went on is not, bit for bit, the undisturbed one; None where
                there is no such run
    message     what a user was told, first lines
    """

    part: str
    what: str
    wrong: list[str]
    different: list[str] | None = None
    message: str = ""

    @property
    def passed(self) -> bool:
        return not self.wrong and not self.different


def summarise(trials: Iterable[Trial]) -> list[dict[str, Any]]:
    """A row for each fault: how many, survived, identical, and one message of them."""
    rows: dict[tuple[str, str], list[Trial]] = {}
    for trial in trials:
        rows.setdefault((trial.part, trial.what), []).append(trial)
    return [
        {
            "part": part,
            "what": what,
            "trials": len(those),
            "survived": sum(not t.wrong for t in those),
            "resumed": sum(t.different is not None for t in those),
            "identical": sum(not t.wrong and t.different == [] for t in those),
            "message": next((t.message for t in those if t.message), ""),
            "wrong": ["; ".join(t.wrong + (t.different or [])) for t in those if not t.passed],
        }
        for (part, what), those in rows.items()
    ]


def as_lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The table as Markdown, so that it can be put into a document as it is."""
    yield "| part | fault | trials | survived | bit-identical | message |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        identical = f"{row['identical']} of {row['resumed']}" if row["resumed"] else "–"
        message = row["message"].replace("|", "\\|").replace("\n", " ")
        yield f"| {row['part']} | {row['what']} | {row['trials']} | {row['survived']} | {identical} | {message} |"
    for row in rows:
        for wrong in dict.fromkeys(row["wrong"]):
            yield f"\nFAILED  {row['part']}, {row['what']}: {wrong}"


# --- Whether two runs ended alike, bit for bit: the result, the last checkpoint, the metrics, the
# samples.


# what a clock or another process decides
_OF_THE_MACHINE = {"tokens_per_second", "seconds", "memory_bytes"}


def differences(run: Path, undisturbed: Path) -> list[str]:
    """What differs between two finished runs of one configuration, and what a fault left lying
    about; empty when nothing does.
    """
    found = []
    steps = sorted(
        undisturbed.glob("checkpoints/step_*"), key=lambda p: int(p.name.removeprefix("step_"))
    )
    last = steps[-1].name
    parts = [
        f"checkpoints/{last}/{name}" for name in ("tensors.safetensors", "tensors.1.safetensors")
    ]
    for name in ("adapter/adapter_model.safetensors", "model/model.safetensors", *parts):
        ours, theirs = run / name, undisturbed / name
        if ours.is_file() != theirs.is_file():
            found.append(f"{name} is only on one side")
        elif ours.is_file() and ours.read_bytes() != theirs.read_bytes():
            found.append(f"{name} differs")
    if _state(run / "checkpoints" / last) != _state(undisturbed / "checkpoints" / last):
        found.append(f"checkpoints/{last}/state.json differs")
    if _metrics(run) != _metrics(undisturbed):
        found.append("metrics.jsonl differs")
    if _samples(run) != _samples(undisturbed):
        found.append("samples differ")
    found += [
        f"{p.relative_to(run)} was left behind"
        for p in run.rglob(".*")
        if p.name.endswith((".partial", ".replaced"))
    ]
    return found


def _metrics(run: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in _OF_THE_MACHINE} for row in rows]


def _samples(run: Path) -> dict[str, str]:
    return {p.name: p.read_text() for p in sorted(run.glob("samples/*.json"))}


def _state(checkpoint: Path) -> dict[str, Any] | None:
    if not (checkpoint / "state.json").is_file():
        return None
    state = json.loads((checkpoint / "state.json").read_text())
    state.get("progress", {}).pop("trained_seconds", None)
    return state
