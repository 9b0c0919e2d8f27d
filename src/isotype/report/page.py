"""What stands on the page, worked out from a run's record; the template only places it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from markupsafe import Markup

from .chart import Guide, Series, bar_chart, line_chart, smoothed
from .record import RunRecord
from .words import bytes_written, count, duration, percent, plain

_TORCH = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}
_STATUS = {
    "done": ("done", "good"),
    "failed": ("failed", "bad"),
    "interrupted": ("interrupted, can be resumed", "warn"),
}
_NOISY = ("grad_norm", "tokens_per_second", "mfu", "share_changed")
ROLES = ("base", "trainable", "compute", "grads", "reduce", "optimizer", "loss", "norms", "generate", "save")


@dataclass(frozen=True)
class Figure:
    """A chart with its title, one sentence that says how to read it, and its legend."""

    title: str
    note: str
    drawing: Markup
    legend: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Tile:
    label: str
    value: str
    note: str = ""


def page(record: RunRecord) -> dict[str, Any]:
    """The variables of report.html.jinja."""
    return {
        "name": record.folder.resolve().name,
        "status": status(record),
        "error": record.result.get("error"),
        "subtitle": subtitle(record),
        "tiles": tiles(record),
        "figures": figures(record),
        "loss": loss_figure(record),
        "precision": precision_rows(record),
        "promotions": [p for p in _list(record.precision.get("promotions")) if isinstance(p, dict)],
        "violations": [v for v in _list(record.precision.get("violations")) if isinstance(v, dict)],
        "observed_at": [plain(float(s)) for s in _list(record.precision.get("observed_at")) if isinstance(s, int)],
        "samples": samples(record),
        "data": data(record),
        "use": use(record),
        "environment": flat(record.environment),
        "settings": record.settings_text,
        "damaged": record.damaged,
        "events": [row for row in record.metrics if row.get("event") not in (None, "evaluation")][:50],
    }


def status(record: RunRecord) -> tuple[str, str]:
    """Words and mood. A run without a result is running, or was killed."""
    said = record.result.get("status")
    return _STATUS.get(said, (str(said), "warn")) if said is not None else ("not finished: running, or killed", "warn")


def subtitle(record: RunRecord) -> str:
    """`stories260k, bf16-lora, lora r=16`, as far as it is known."""
    model = record.setting("model", "name") or record.result.get("base")
    kind = record.setting("adapter", "kind")
    train = record.setting("data", "train")
    parts = [
        "/".join(Path(str(model)).parts[-2:]) if model else None,
        record.precision.get("preset"),
        f"LoRA r={record.setting('adapter', 'r')}" if kind == "lora" else "every weight trained" if kind == "none" else None,
        f"on {', '.join(Path(str(t)).name for t in (train if isinstance(train, list) else [train]))}" if train else None,
    ]
    return "  ·  ".join(str(part) for part in parts if part)


def tiles(record: RunRecord) -> list[Tile]:
    """The numbers of a run at a glance; one that is not known is left out."""
    found: list[Tile] = []
    loss = record.curve("loss")
    if loss:
        average = smoothed(loss)[-1][1]
        found.append(Tile("training loss", plain(average), f"from {plain(loss[0][1])} at step {loss[0][0]:,.0f}"))
    evaluations = [(s, v) for s, v in record.curve("eval_loss") if math.isfinite(v)]
    if evaluations:
        step, best = min(evaluations, key=lambda p: p[1])
        first = f", from {plain(evaluations[0][1])}" if len(evaluations) > 1 else ""
        found.append(Tile("best evaluation loss", plain(best), f"at step {step:,.0f}{first}"))
    steps = max((s for s, _ in loss), default=None)
    if steps is not None:
        tokens = [v for _, v in record.curve("tokens") if math.isfinite(v)]
        found.append(Tile("steps", f"{steps:,.0f}", f"{count(tokens[-1])} tokens" if tokens else ""))
    seconds = record.result.get("trained_seconds")
    if isinstance(seconds, int | float):
        found.append(Tile("training time", duration(seconds)))
    speed = sorted(v for _, v in record.curve("tokens_per_second") if math.isfinite(v))
    if speed:
        found.append(Tile("tokens per second", plain(speed[len(speed) // 2]), "median"))
    memory = [v for _, v in record.curve("memory_bytes") if math.isfinite(v)]
    if memory:
        found.append(Tile("peak memory", bytes_written(max(memory))))
    return found


def loss_figure(record: RunRecord) -> Figure | None:
    """Training loss, raw and smoothed, with the evaluations."""
    loss, evaluations = record.curve("loss"), record.curve("eval_loss")
    many = len(loss) > 30
    series = [Series("training loss", loss, "faint" if many else "line")]
    series += [Series("training loss, smoothed", smoothed(loss))] if many else []
    series += [Series("evaluation loss", evaluations, "dots", colour=2)] if evaluations else []
    drawing = line_chart(series, label="Loss over steps", written=plain, width=960, height=300)
    if not drawing:
        return None
    legend = [("c1", "training, smoothed over 4% of the steps" if many else "training")] if loss else []
    legend += [("c2", "evaluation, weighted by tokens")] if evaluations else []
    lost = sum(not math.isfinite(v) for _, v in loss + evaluations)
    note = f"{lost} values are not finite: marked at the top." if lost else ""
    return Figure("Loss", note, drawing, tuple(legend) if len(legend) > 1 else ())


def figures(record: RunRecord) -> list[Figure]:
    """The smaller charts; a metric that the run did not write has none."""
    clip = record.setting("train", "clip")
    clipped = isinstance(clip, int | float) and clip > 0
    norm = record.curve("grad_norm")
    over = sum(v > clip for _, v in norm) / len(norm) if clipped and norm else 0.0
    said = f"Clipped above {plain(float(clip))}: {percent(over)} of the steps were." if clipped else "Not clipped."
    every: list[tuple[str, str, str, Any, bool, list[Guide]]] = [
        ("grad_norm", "Gradient norm", said, plain, True, [Guide(float(clip), f"clip {plain(float(clip))}")] if clipped else []),
        (
            "share_changed",
            "Share changed",
            "Trainable elements that a step really moved (sampled). Low means that updates vanish in rounding.",
            percent,
            True,
            [],
        ),
        ("learning_rate", "Learning rate", "", plain, True, []),
        ("tokens_per_second", "Tokens per second", "", count, True, []),
        ("memory_bytes", "Peak memory", "", bytes_written, True, []),
        ("mfu", "Model FLOPs utilisation", "Against this machine's measured matrix product peak.", percent, True, []),
        ("promotions", "Unintended promotions", "Module outputs wider than the declared compute dtype, a step.", plain, True, []),
        ("loss_scale", "Loss scale", "A scale that keeps falling means overflowing gradients.", count, True, []),
    ]
    found = []
    for key, title, note, written, zero, guides in every:
        points = record.curve(key)
        if key == "promotions" and not any(v for _, v in points):
            continue
        noisy = len(points) > 30 and key in _NOISY
        series = [Series(title, points, "faint"), Series(title, smoothed(points))] if noisy else [Series(title, points)]
        drawing = line_chart(series, label=f"{title} over steps", written=written, guides=guides, from_zero=zero)
        if drawing:
            found.append(Figure(title, note, drawing))
    return found


def precision_rows(record: RunRecord) -> list[dict[str, Any]]:
    """One row a role: declared, why, observed, and whether they agree."""
    declared, observed = _dict(record.precision.get("declared")), _dict(record.precision.get("observed"))
    broken = " ".join(str(v.get("declared")) for v in _list(record.precision.get("violations")) if isinstance(v, dict))
    rows = []
    for role in [r for r in ROLES if r in declared or r in observed] + [r for r in {**declared, **observed} if r not in ROLES]:
        setting = declared.get(role)
        value, reason = (setting.get("value"), setting.get("reason")) if isinstance(setting, dict) else (setting, None)
        seen = observed.get(role)
        words = [f"{n:,} {dtype}" if isinstance(n, int) else f"{n} {dtype}" for dtype, n in seen.items()] if isinstance(seen, dict) else []
        if seen is not None and not isinstance(seen, dict):
            words = [str(seen)]
        mood = "bad" if f"precision.{role}:" in broken else "good" if words and value is not None else ""
        rows.append({"role": role, "declared": value, "reason": reason, "observed": ", ".join(words), "mood": mood})
    return rows


def samples(record: RunRecord) -> list[dict[str, Any]]:
    """For every prompt its reference and the answers over time."""
    by_prompt: dict[str, dict[str, Any]] = {}
    for moment in record.samples:
        for sample in moment["samples"]:
            if not isinstance(sample, dict):
                continue
            prompt = str(sample.get("prompt", ""))
            entry = by_prompt.setdefault(prompt, {"prompt": prompt, "reference": sample.get("reference"), "answers": []})
            entry["answers"].append({"step": moment["step"], "text": str(sample.get("answer", ""))})
    return list(by_prompt.values())


def data(record: RunRecord) -> dict[str, Any]:
    """Counts, files, lengths and notes of both sides."""
    sides = []
    for key, title in (("train", "Training"), ("eval", "Evaluation")):
        side = record.data.get(key)
        if not isinstance(side, dict):
            continue
        lengths = _dict(side.get("lengths"))
        bars = [(f"≤{bar['up_to']}", bar["rows"]) for bar in _list(lengths.get("histogram")) if _is_bar(bar)]
        facts = [
            ("rows", side.get("rows")),
            ("tokens", side.get("tokens")),
            ("learnt tokens", side.get("supervised_tokens")),
            ("cut at the end", side.get("truncated")),
            ("dropped", sum(d.get("rows", 0) for d in _list(side.get("dropped")) if isinstance(d, dict))),
            ("exact repeats", side.get("duplicates")),
            ("longest row", lengths.get("longest")),
        ]
        sides.append(
            {
                "title": title + (" (held out)" if side.get("held_out") else ""),
                "facts": [(name, f"{value:,}") for name, value in facts if isinstance(value, int)],
                "files": [file for file in _list(side.get("files")) if isinstance(file, dict)],
                "lengths": bar_chart(bars, label=f"Rows of {title.lower()} data by length in tokens"),
            }
        )
    return {"sides": sides, "notes": [str(note) for note in _list(record.data.get("notes"))]}


def use(record: RunRecord) -> dict[str, Any]:
    """How to load the result: Python that needs no Isotype, and the commands that take the run folder."""
    run = record.folder.resolve()
    adapter, model = run / "adapter", run / "model"
    base = record.result.get("base") or record.setting("model", "name") or "BASE MODEL"
    compute = _dict(_dict(record.precision.get("declared")).get("compute")).get("value")
    dtype = _TORCH.get(str(compute).split(",")[0], "torch.float32")
    code = ""
    if adapter.is_dir():
        code = (
            "import torch\nfrom peft import PeftModel\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
            f"base = AutoModelForCausalLM.from_pretrained({json.dumps(str(base))}, dtype={dtype})\n"
            f"model = PeftModel.from_pretrained(base, {json.dumps(str(adapter))})\n"
            f"tokenizer = AutoTokenizer.from_pretrained({json.dumps(str(adapter))})\n"
        )
    elif model.is_dir():
        code = (
            "import torch\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
            f"model = AutoModelForCausalLM.from_pretrained({json.dumps(str(model))}, dtype={dtype})\n"
            f"tokenizer = AutoTokenizer.from_pretrained({json.dumps(str(model))})\n"
        )
    commands = [
        ("chat", f"isotype chat {run}"),
        ("sample", f'isotype sample {run} "Your prompt"'),
        ("merge", f"isotype merge {run}"),
        ("eval", f"isotype eval {run}"),
    ]
    known = [line for name, line in commands if find_spec(f"isotype.cli.{name}") is not None] if code else []
    if record.result.get("status") != "done":
        known.append(f"isotype train --resume {run}")
    return {"code": code, "commands": known}


def flat(value: dict[str, Any], prefix: str = "", depth: int = 0) -> list[tuple[str, str]]:
    """Nested facts as rows of a table."""
    rows: list[tuple[str, str]] = []
    for key, item in value.items():
        name = f"{prefix}{key}"
        if isinstance(item, dict) and item and depth < 4:
            rows += flat(item, f"{name}.", depth + 1)
        elif isinstance(item, list):
            rows.append((name, ", ".join(i if isinstance(i, str) else json.dumps(i, default=str) for i in item) or "none"))
        else:
            rows.append((name, item if isinstance(item, str) else json.dumps(item, default=str)))
    return rows


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _is_bar(bar: Any) -> bool:
    return isinstance(bar, dict) and isinstance(bar.get("up_to"), int) and isinstance(bar.get("rows"), int)
