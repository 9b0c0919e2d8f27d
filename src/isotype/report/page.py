"""Computes the content of the report page from a run's record; the template only lays it out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config.sources import short_names
from .chart import line_chart
from .dataset import data, examples
from .plots import MANY, loss_plot, plots, smoothed
from .record import RunRecord
from .sampled_pictures import as_data, asked, picture_of
from .settings import differences
from .use import use
from .verdicts import precision, preflight, verdict
from .words import bytes_written, count, duration, percent, plain

_MOODS = {"done": "good", "running": "busy", "failed": "bad", "interrupted": "warn", "stopped": "warn"}
_WORDS = {"interrupted": "interrupted, can be resumed", "stopped": "stopped without an end"}
MOST_EVENTS = 50


@dataclass(frozen=True)
class Tile:
    label: str
    value: str
    note: str = ""


def page(record: RunRecord) -> dict[str, Any]:
    """The variables of report.html.jinja."""
    loss = loss_plot(record)
    small = plots(record)
    shown = samples(record)
    return {
        "verdict": verdict(record) if record.metrics else None,
        "name": record.folder.resolve().name,
        "status": status(record),
        "progress": progress(record),
        "error": record.result.get("error"),
        "subtitle": subtitle(record),
        "tiles": tiles(record),
        "loss": (loss, line_chart(loss, width=960, height=300)) if loss else None,
        "figures": [(plot, line_chart(plot)) for plot in small if plot.constant is None],
        "constants": [(plot.title, plot.constant, plot.note) for plot in small if plot.constant is not None],
        "precision": precision(record),
        "preflight": preflight(record),
        "samples": shown,
        "pictures": any(one["picture"] for sample in shown for one in sample["answers"]),
        "data": data(record),
        "examples": examples(record),
        "use": use(record),
        "differences": differences(record) if record.settings else None,
        "preset": record.setting("precision", "preset"),
        "environment": environment(record),
        "settings": record.settings_text,
        "changes": record.changes,
        "damaged": record.damaged,
        "events": [row for row in record.metrics if row.get("event") not in (None, "evaluation")][:MOST_EVENTS],
    }


def status(record: RunRecord) -> tuple[str, str]:
    """Words and mood."""
    said = record.status
    return _WORDS.get(said, said), _MOODS.get(said, "warn")


def progress(record: RunRecord) -> tuple[int, int] | None:
    """(step, all steps) of a run that is not at its end."""
    total = record.plan.get("total")
    if record.status == "done" or not isinstance(total, int) or total <= 0:
        return None
    return int(max((step for step, _ in record.curve("loss")), default=0)), total


def subtitle(record: RunRecord) -> str:
    """`pretrain/model, 1.2M parameters, bf16-lora, LoRA r=16 (2.4% trained), on chats.jsonl`, as far as it is known."""
    model = record.setting("model", "name") or record.result.get("base")
    kind, train = record.setting("adapter", "kind"), record.setting("data", "train") or record.setting("images", "train")
    total, trained = (n if isinstance(n := record.plan.get(key), int) else 0 for key in ("parameters", "trained"))
    how = f"LoRA r={record.setting('adapter', 'r')}" if kind == "lora" else "every weight trained" if kind == "none" else None
    parts = [
        "/".join(Path(str(model)).parts[-2:]) if model else None,
        f"{count(total)} parameters" if total else None,
        record.precision.get("preset"),
        f"{how}, {percent(trained / total)} trained" if total and kind == "lora" else how,
        f"on {short_names(train)}" if train else None,
    ]
    return "  ·  ".join(str(part) for part in parts if part)


def tiles(record: RunRecord) -> list[Tile]:
    """The key numbers of a run; unknown ones are left out."""
    found: list[Tile] = []
    units = "pictures" if record.plan.get("task") == "diffusion" else "tokens"
    loss = record.curve("loss")
    if loss:
        many = len(loss) > MANY
        line = smoothed(loss) if many else loss  # the line that the chart labels
        name = "training loss" + (", smoothed" if many else "")
        found.append(Tile(name, plain(line[-1][1]), f"from {plain(line[0][1])} at step {line[0][0]:,.0f}"))
    evaluations = record.evaluations()
    if evaluations:
        step, best = min(evaluations, key=lambda p: p[1])
        first = f", from {plain(evaluations[0][1])}" if len(evaluations) > 1 else ""
        found.append(Tile("evaluation loss, best", plain(best), f"step {step:,.0f}{first}"))
    steps = max((s for s, _ in loss), default=None)
    if steps is not None:
        seen = [v for _, v in record.curve(units) if math.isfinite(v)]
        found.append(Tile("steps", f"{steps:,.0f}", f"{count(seen[-1])} {units}" if seen else ""))
    seconds = record.result.get("trained_seconds") or sum(v for _, v in record.curve("seconds") if math.isfinite(v))
    if isinstance(seconds, int | float) and seconds > 0:
        found.append(Tile("training time", duration(seconds), "in steps alone"))
    speed = sorted(v for _, v in record.curve(f"{units}_per_second") if math.isfinite(v))
    if speed:
        found.append(Tile(f"{units} per second", plain(speed[len(speed) // 2]), "median"))
    memory = [v for _, v in record.curve("memory_bytes") if math.isfinite(v)]
    if memory:
        found.append(Tile("peak memory", bytes_written(max(memory))))
    return found


def samples(record: RunRecord) -> list[dict[str, Any]]:
    """For every prompt its reference and the answers over time; `picture` is one of a diffusion run, else empty."""
    by_prompt: dict[str, dict[str, Any]] = {}
    for moment in record.samples:
        for sample in moment["samples"]:
            if not isinstance(sample, dict):
                continue
            prompt = asked(sample)
            entry = by_prompt.setdefault(prompt, {"prompt": prompt, "reference": sample.get("reference"), "answers": []})
            picture = as_data(picture_of(record.folder, sample))
            entry["answers"].append({"step": moment["step"], "text": str(sample.get("answer", "")), "picture": picture})
    return list(by_prompt.values())


def environment(record: RunRecord) -> list[tuple[str, str]]:
    """The facts that answer most questions about a run, with the list of all installed packages last."""
    said = {key: value for key, value in record.environment.items() if key != "distributions"}
    distributions = record.environment.get("distributions")
    return flat(said) + (flat({"distributions": distributions}) if distributions else [])


def flat(value: dict[str, Any], prefix: str = "", depth: int = 0) -> list[tuple[str, str]]:
    """Nested facts as rows of a table."""
    rows: list[tuple[str, str]] = []
    for key, item in value.items():
        name = f"{prefix}{key}"
        if isinstance(item, dict) and item and depth < 4:
            rows += flat(item, f"{name}.", depth + 1)
        elif isinstance(item, list):
            for i, one in enumerate(item):
                if isinstance(one, dict) and depth < 4:
                    rows += flat(one, f"{name}[{i}].", depth + 1)
            plainly = [one for one in item if not isinstance(one, dict) or depth >= 4]
            if plainly or not item:
                rows.append((name, ", ".join(str(one) for one in plainly) or "none"))
        else:
            rows.append((name, "none" if item is None or item == {} else str(item)))
    return rows
