"""Whether two runs ended alike, bit for bit: the result, the last checkpoint, the metrics, the samples."""

import json
from pathlib import Path
from typing import Any

# what a clock or another process decides
_OF_THE_MACHINE = {"tokens_per_second", "seconds", "memory_bytes", "mfu"}


def differences(run: Path, undisturbed: Path) -> list[str]:
    """What differs between two finished runs of one configuration, and what a fault left lying about; empty when nothing does."""
    found = []
    steps = sorted(undisturbed.glob("checkpoints/step_*"), key=lambda p: int(p.name.removeprefix("step_")))
    last = steps[-1].name
    parts = [f"checkpoints/{last}/{name}" for name in ("tensors.safetensors", "tensors.1.safetensors")]
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
    found += [f"{p.relative_to(run)} was left behind" for p in run.rglob(".*") if p.name.endswith((".partial", ".replaced"))]
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
    for name in ("trained_seconds", "sampled_seconds"):
        state.get("progress", {}).pop(name, None)
    return state
