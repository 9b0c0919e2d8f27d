"""Renders the report page of a run from its record, and writes it atomically. This module computes
all contents; the template only lays them out.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import shlex
from collections import Counter
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Any

from ..config.sources import short_source_names
from ..errors import RunError, UsageError
from ..precision import ROLES
from ..runs.checkpoint.atomic_folder import write_text
from ..runs.metrics import read_thinned_rows
from ..wording import (
    format_bytes,
    format_compact,
    format_duration,
    format_number,
    format_percent,
    pluralise,
)
from .plots import SMOOTHED_ABOVE, line_chart, loss_plot, plots, smooth
from .record import (
    AVERAGE,
    RunRecord,
    data_url,
    dict_or_empty,
    list_or_empty,
    prompt_label,
    read_picture,
    read_run,
    rows_or_empty,
    shrink_picture,
    spread_evenly,
)

REPORT = "report.html"
# the files of a saved adapter; the first is the one that diffusers and other programs read
ADAPTER_FILES = ("pytorch_lora_weights.safetensors", "adapter_model.safetensors")
STEPS_SCRIPT = "steps.js"  # the script of a page with pictures
# status of a run -> the colour of its label
_STATUS_RATINGS = {
    "done": "good",
    "running": "busy",
    "failed": "bad",
    "interrupted": "warn",
    "stopped": "warn",
}
_STATUS_LABELS = {"interrupted": "interrupted, can be resumed", "stopped": "stopped without an end"}


@dataclass(frozen=True)
class LiveState:
    """Contains what a page of `isotype watch` shows in addition to the report.

    log       the last lines that the run printed
    process   the id of the training process, if this program can stop it
    stopping  whether the process was asked to stop
    """

    log: str
    process: int | None
    stopping: bool


def write_report(run_folder: Path, out: Path | None = None) -> Path:
    """Writes the page from the files in `run_folder` to report.html in this folder, or to `out`.

    Raises UsageError if the folder holds no run or the file cannot be written.
    """
    target = out or run_folder / REPORT
    # the name of a file may not be valid UTF-8
    text = (
        render(read_run(run_folder, read_metrics=read_thinned_rows))
        .encode("utf-8", "backslashreplace")
        .decode()
    )
    try:
        write_text(target, text)
    except RunError as error:
        fix = error.fix if out else f"{error.fix}, or write it elsewhere: --out FILE"
        raise UsageError(error.message, fix=fix) from None
    return target


def render(record: RunRecord, live: LiveState | None = None) -> str:
    """Returns the page as text. All texts of the run are escaped. The content security policy of
    the page allows no network and no script except the script for pictures.

    live  the additional contents of a served page, which has a script and a form
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("isotype.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script = files(__package__).joinpath(STEPS_SCRIPT).read_text(encoding="utf-8")
    policy = "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    template = environment.get_template("report.html.jinja")
    return template.render(
        page(record), live=live, script=Markup(script), script_hash=policy
    ).lstrip()


# the keys of an entry of manifest.json that the report shows
OP_COLUMNS = ("part", "op", "kind", "reason")


@dataclass(frozen=True)
class Tile:
    """A box at the top of the report with one number or word, such as the final loss."""

    label: str
    value: str
    note: str = ""


def page(record: RunRecord) -> dict[str, Any]:
    """Returns the variables of report.html.jinja."""
    loss = loss_plot(record)
    prompts = samples(record)
    pictures = any(edited["picture"] for sample in prompts for edited in sample["answers"])
    run_commands = commands(record)
    return {
        "verdict": verdict(record) if record.metrics else None,
        "name": record.folder.resolve().name,
        "status": (
            _STATUS_LABELS.get(record.status, record.status),
            _STATUS_RATINGS.get(record.status, "warn"),
        ),
        "progress": progress(record),
        "error": record.result.get("error"),
        "subtitle": subtitle(record),
        "tiles": tiles(record),
        "loss": (loss, line_chart(loss, width=960, height=300)) if loss else None,
        "figures": [(plot, line_chart(plot)) for plot in plots(record)],
        "precision": precision(record),
        "ops": ops(record),
        "preflight": preflight(record),
        "files": written_files(record),
        "samples": prompts,
        "pictures": pictures,
        "drawn": side_by_side(prompts) if pictures else [],
        "loras": adapter_files(record),
        "has_adapter": record.setting("adapter", "kind") not in (None, "none"),
        "sample_command": next((line for line in run_commands if " sample " in line), None),
        "before_edits": {
            prompt: _picture_urls(edited) for prompt, edited in record.before_edits.items()
        },
        "first_is_base": not record.setting("adapter", "start_from"),
        "levels": noise_levels(record),
        "diffusion": record.plan.get("task") == "diffusion",
        "data": data(record),
        "examples": examples(record),
        "commands": run_commands,
        "environment": json.dumps(record.environment, indent=1) if record.environment else "",
        "settings": record.settings_text,
        "changes": record.changes,
        "damaged": record.damaged,
    }


def ops(record: RunRecord) -> list[tuple[dict[str, str], int]]:
    """Returns the ops that the run installed in the model, and the modules that it did not change:
    each kind once, with the number of its modules.
    """
    kinds: dict[tuple[str, ...], int] = {}
    for entry in rows_or_empty(record.manifest.get("entries"), *OP_COLUMNS):
        kind = tuple(entry.values())
        kinds[kind] = kinds.get(kind, 0) + 1
    return [(dict(zip(OP_COLUMNS, kind)), count) for kind, count in kinds.items()]


def progress(record: RunRecord) -> tuple[int, int] | None:
    """Returns (step, total steps) of an unfinished run; None for a finished run."""
    total = record.plan.get("total")
    if record.status == "done" or not isinstance(total, int) or total <= 0:
        return None
    return int(max((step for step, _ in record.curve("loss")), default=0)), total


def subtitle(record: RunRecord) -> str:
    """Returns a line such as `pretrain/model · 1.2M parameters · bf16-lora · LoRA r=16, 2.4%
    trained · on chats.jsonl`. Unknown parts are left out.
    """
    model = record.setting("model", "name") or record.result.get("base")
    kind = record.setting("adapter", "kind")
    training_data = record.setting("data", "train") or record.setting("images", "train")
    parameter_count = _whole_number(record.plan.get("parameters"))
    trained_count = _whole_number(record.plan.get("trained"))
    adapter = {"lora": "LoRA", "lokr": "LoKr"}.get(kind)
    if adapter and record.setting("adapter", "start_from"):
        adapter_text = f"{adapter}, ranks of adapter.start_from"
    elif adapter:
        adapter_text = f"{adapter} r={record.setting('adapter', 'r')}"
    elif kind == "none":
        adapter_text = "every weight trained"
    else:
        adapter_text = None
    parts: list[Any] = []
    if model:
        parts.append("/".join(Path(str(model)).parts[-2:]))
    if parameter_count:
        parts.append(f"{format_compact(parameter_count)} parameters")
    parts.append(record.precision.get("preset"))
    if parameter_count and adapter:
        adapter_text = f"{adapter_text}, {format_percent(trained_count / parameter_count)} trained"
    parts.append(adapter_text)
    if training_data:
        parts.append(f"on {short_source_names(training_data)}")
    return "  ·  ".join(str(part) for part in parts if part)


def _whole_number(value: Any) -> int:
    """Returns the value if it is an integer, else 0."""
    return value if isinstance(value, int) else 0


def tiles(record: RunRecord) -> list[Tile]:
    """Returns the most important numbers of a run. Unknown numbers are left out."""
    result: list[Tile] = []
    units = _speed_unit(record)
    loss = record.curve("loss")
    if loss:
        name = "training loss"
        curve = loss  # the curve that the chart labels
        if len(loss) > SMOOTHED_ABOVE:
            name = "training loss, smoothed"
            curve = smooth(loss)
        result.append(
            Tile(
                name,
                format_number(curve[-1][1]),
                f"from {format_number(curve[0][1])} at step {curve[0][0]:,.0f}",
            )
        )
    if evaluations := record.evaluations():
        step, best = min(evaluations, key=lambda p: p[1])
        first_note = f", from {format_number(evaluations[0][1])}" if len(evaluations) > 1 else ""
        result.append(
            Tile("evaluation loss, best", format_number(best), f"step {step:,.0f}{first_note}")
        )
    if loss:
        total = record.last_value(units)
        result.append(
            Tile(
                "steps",
                f"{max(step for step, _ in loss):,.0f}",
                "" if total is None else f"{format_compact(total)} {units}",
            )
        )
    seconds, speed, memory = (
        finite_values(record, key) for key in ("seconds", f"{units}_per_second", "memory_bytes")
    )
    training_seconds = record.result.get("trained_seconds") or (
        sum(seconds) / record.metrics_rows.step_share
    )
    if isinstance(training_seconds, int | float) and 0 < training_seconds < math.inf:
        result.append(Tile("training time", format_duration(training_seconds), "in steps alone"))
    if speed:
        result.append(Tile(f"{units} per second", format_number(median(speed)), "median"))
    if memory:
        result.append(Tile("peak memory", format_bytes(max(memory))))
    return result


def _speed_unit(record: RunRecord) -> str:
    """Returns the word for the items that the run's speed is counted in."""
    if record.plan.get("task") != "diffusion":
        return "tokens"
    return _picture_noun(record.data)


def finite_values(record: RunRecord, key: str) -> list[float]:
    return [value for _, value in record.curve(key) if math.isfinite(value)]


def samples(record: RunRecord) -> list[dict[str, Any]]:
    """Returns the reference answer of every prompt, and the model's answers at each step. `picture`
    is the picture of a diffusion run, and "" in other runs.
    """
    by_prompt: dict[tuple[str, int], dict[str, Any]] = {}
    for step_record in record.samples:
        occurrences = Counter[str]()  # a prompt may occur again, with another seed
        for sample in step_record["samples"]:
            if not isinstance(sample, dict):
                continue
            prompt = prompt_label(sample)
            occurrences[prompt] += 1
            new_entry: dict[str, Any] = {
                "prompt": prompt,
                "turn": occurrences[prompt],
                "reference": sample.get("reference"),
                "answers": [],
            }
            entry = by_prompt.setdefault((prompt, occurrences[prompt]), new_entry)
            kind, content = shrink_picture(read_picture(record.folder, sample))
            answer = {
                "step": step_record["step"],
                "text": str(sample.get("answer", "")),
                "picture": data_url(content or None, kind),
            }
            entry["answers"].append(
                answer | {"file": str(sample.get("file") or "") if content else ""}
            )
    # puts samples of the averaged weights next to those of the trained weights
    order = list(dict.fromkeys(map(_prompt_and_turn, by_prompt.values())))
    return sorted(by_prompt.values(), key=lambda entry: order.index(_prompt_and_turn(entry)))


def _prompt_and_turn(entry: dict[str, Any]) -> tuple[str, int]:
    """Returns the prompt and a number that distinguishes equal prompts. A prompt may be answered
    twice, with the trained weights and with the averaged weights. Both answers then have the same
    number.
    """
    return entry["prompt"].removesuffix(AVERAGE), entry["turn"]


def side_by_side(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the settings and the pictures of every prompt. There is one picture from before
    training. For each step, there is a picture of the trained weights and a picture of the averaged
    weights.
    """
    prompts: dict[tuple[str, int], dict[str, Any]] = {}
    for entry in entries:
        prompt, _ = prompt_key = _prompt_and_turn(entry)
        prompt_row = prompts.setdefault(
            prompt_key, {"prompt": prompt, "settings": "", "first": None, "steps": {}}
        )
        for answer in entry["answers"]:
            prompt_row["settings"] = answer["text"]
            if answer["step"] == 0:
                prompt_row["first"] = (
                    prompt_row["first"] or answer
                )  # at step 0 the average equals the weights
            else:
                weights = "trained" if prompt == entry["prompt"] else "average"
                prompt_row["steps"].setdefault(answer["step"], {})[weights] = answer
    return list(prompts.values())


def adapter_files(record: RunRecord) -> dict[int, str]:
    """Returns the path of the adapter that was saved in each step with samples, relative to the run
    folder. The result of the run is the adapter of the step `of_step`, which is not the last step
    with `run.save: best`. Steps without a saved adapter are left out.
    """
    paths = {}
    for step in {int(sample["step"]) for sample in record.samples}:
        folders = [f"adapters/step_{step}"]
        if record.result.get("of_step") == step:
            folders.append("adapter")
        candidates = [f"{folder}/{name}" for folder in folders for name in ADAPTER_FILES]
        existing = [path for path in candidates if (record.folder / path).is_file()]
        if existing:
            paths[step] = existing[0]
    return paths


_LEVEL = re.compile(r"eval_loss_t(\d+)_(\d+)")
MAX_EVALUATIONS = 6  # columns of a table of evaluations


def noise_levels(record: RunRecord) -> dict[str, Any] | None:
    """Returns the evaluation loss of a diffusion run for each range of noise levels, at evenly
    spaced steps. Returns None if the run did not record this loss.
    """
    steps = spread_evenly(sorted({int(step) for step, _ in record.evaluations()}), MAX_EVALUATIONS)
    levels = {
        (int(match[1]), int(match[2]))
        for row in record.metrics
        for key in row
        if (match := _LEVEL.fullmatch(key))
    }
    if not levels or not steps or record.plan.get("task") != "diffusion":
        return None
    curves = {
        f"{low:,} to {high:,}": dict(record.curve(f"eval_loss_t{low}_{high}"))
        for low, high in sorted(levels)
    }
    rows = [
        (name, [format_number(losses[step]) if step in losses else "" for step in steps])
        for name, losses in curves.items()
    ]
    return {"steps": steps, "rows": rows}


def data(record: RunRecord) -> dict[str, Any]:
    """Returns the counts, the files and the messages about the training and evaluation data."""
    splits: list[dict[str, Any]] = []
    if record.plan.get("task") == "diffusion":
        splits.append(
            {
                "title": _picture_noun(record.data).capitalize(),
                "facts": _picture_facts(record.data),
                "files": [],
            }
        )
    for key, title in (("train", "Training"), ("eval", "Evaluation")):
        split = record.data.get(key)
        if not isinstance(split, dict) or (key == "eval" and split.get("rows") == 0):
            continue
        dropped = [
            dropped_rows["rows"]
            for dropped_rows in list_or_empty(split.get("dropped"))
            if isinstance(dropped_rows, dict) and isinstance(dropped_rows.get("rows"), int)
        ]
        counts = {**dict_or_empty(split.get("lengths")), **split, "dropped": sum(dropped)}
        splits.append(
            {
                "title": title + (" (held out)" if split.get("held_out") else ""),
                "facts": [
                    (name, f"{n:,}")
                    for fact, name in _ROW_FACTS.items()
                    if isinstance(n := counts.get(fact), int)
                ],
                "files": _sources(split, record.data.get("mix") if key == "train" else None),
            }
        )
    return {
        "sides": splits,
        "notes": [str(note) for note in list_or_empty(record.data.get("notes"))],
    }


_ROW_FACTS = {
    "pairs": "pairs", "rows": "rows", "tokens": "tokens", "supervised_tokens": "learnt tokens", "truncated": "cut at the end",
    "dropped": "dropped", "duplicates": "exact repeats", "median": "tokens of the median row", "longest": "tokens of the longest row",
}  # fmt: skip
_PICTURE_FACTS = {
    "train_pictures": "training {noun}", "eval_pictures": "for evaluation", "regularisation_pictures": "for regularisation",
    "masked_pictures": "with a mask", "unmasked_pictures": "without a mask, learnt whole", "bad_pictures": "left out",
    "captions": "captions", "cut_captions": "captions cut by the text encoder", "first_cut_caption": "the first of them",
    "buckets": "aspect buckets", "frames": "frames of a clip",
    "resolutions": "resolution in pixels", "latent_tokens": "latent tokens", "objective": "learns", "timesteps": "noise levels",
    "shift": "shift of the noise levels", "made": "latents and embeddings made", "found": "found in the cache",
}  # fmt: skip


def _picture_noun(facts: dict[str, Any]) -> str:
    """Returns `clips` if the run trains on clips, else `pictures`."""
    return "clips" if facts.get("frames") else "pictures"


def _picture_facts(facts: dict[str, Any]) -> list[tuple[str, str]]:
    noun = _picture_noun(facts)
    labelled = {
        name.format(noun=noun): facts[key]
        for key, name in _PICTURE_FACTS.items()
        if facts.get(key) not in (None, 0)
    }
    sizes = dict_or_empty(facts.get("train_pictures_by_size")).items()
    return [(name, _format_value(value)) for name, value in labelled.items()] + [
        (f"training {noun} of {size}", _format_value(n)) for size, n in sizes
    ]


def _format_value(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_format_value, value))
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def _sources(split: dict[str, Any], weights: Any) -> list[dict[str, str]]:
    """Returns the sources of the training or evaluation data, with the number of rows of each and
    the number of rows that were used. For weighted sources, the result also says how often a row is
    used.
    """
    sources = rows_or_empty(split.get("files"), "path", "format", "why")
    shares = {
        str(mixed.get("path")): mixed for mixed in list_or_empty(weights) if isinstance(mixed, dict)
    }
    for source, file in zip(
        sources, (file for file in list_or_empty(split.get("files")) if isinstance(file, dict))
    ):
        rows = file.get("rows")
        rows_kept = file.get("kept")
        counts = [pluralise(rows, "row")] if isinstance(rows, int) else []
        if isinstance(rows_kept, int) and rows_kept != rows:
            counts.append(f"{rows_kept:,} here")
        if (share := shares.get(source["path"])) is not None:
            weight, epoch_share, passes = (
                n if isinstance(n := share.get(k), int | float) else math.nan
                for k in ("weight", "share", "passes")
            )
            counts.append(
                f"weight {weight:g}: {epoch_share:.1%} of an epoch, each row {passes:.3g} times"
            )
        source["counts"] = ", ".join(counts)
    return sources


_PICTURE = re.compile(r"data:image/(?:png|webp);base64,[A-Za-z0-9+/=]+")


def _picture_urls(value: Any) -> list[str]:
    """Returns the data URLs of pictures in a list. A run of an older version recorded one URL in
    place of a list.
    """
    urls = [value] if isinstance(value, str) else list_or_empty(value)
    return [url for url in urls if isinstance(url, str) and _PICTURE.fullmatch(url)]


def examples(record: RunRecord) -> list[dict[str, Any]]:
    """Returns training rows, split into parts of text that count in the loss and parts that do not."""
    result = []
    for row in record.examples:
        parts = [
            (str(part.get("text", "")), bool(part.get("learnt")))
            for part in list_or_empty(row.get("parts"))
            if isinstance(part, dict)
        ]
        if parts:
            pictures = _picture_urls(row.get("pictures"))
            facts = {key: row.get(key) for key in ("which", "tokens", "learnt", "left_out")}
            result.append(facts | {"parts": parts, "pictures": pictures})
    return result


def commands(record: RunRecord) -> list[str]:
    """Returns the commands that can be used with the run in its current state."""
    run = record.folder.resolve()
    folder = shlex.quote(str(run))
    has_adapter = (run / "adapter").is_dir()
    has_result = any((run / name).is_dir() for name in ("adapter", "model", "checkpoints"))
    result = []
    if has_result and record.plan.get("task") == "diffusion":
        result = [f"isotype sample {folder} 'Your prompt'"]
    elif has_result and record.setting("train", "objective") != "reward":
        result = [
            f"isotype chat {folder}",
            f"isotype sample {folder} 'Your prompt'",
            f"isotype eval {folder} FILE",
        ]
        if has_adapter:
            result.append(f"isotype merge {folder}")
    if record.status not in ("done", "running"):
        result.append(f"isotype train --resume {folder}")
    return result


# --- The declared and the observed precision of every role, the preflight, and the verdict on the
# run.


_NOT_A_DTYPE = ("rounding", "loss_scaling")


@dataclass(frozen=True)
class Verdict:
    """Contains a sentence about the evaluation loss and a sentence about the precision. `rating` is
    the worse of the ratings of the two sentences.
    """

    learnt: str
    precision: str
    rating: str


def verdict(record: RunRecord) -> Verdict:
    """Compares the evaluation loss before and after training, and tells whether the declared
    precision was kept.
    """
    (learning_sentence, rating), (precision_sentence, precision_rating) = (
        _learning_verdict(record),
        _precision_verdict(record),
    )
    return Verdict(
        learning_sentence,
        precision_sentence,
        next(worst for worst in ("bad", "warn", "good") if worst in (rating, precision_rating)),
    )


def _learning_verdict(record: RunRecord) -> tuple[str, str]:
    evaluations = record.evaluations()
    if not evaluations:
        return (
            "No evaluation: whether it learnt something that holds for other rows is not known.",
            "warn",
        )
    saved_step = record.result.get("of_step")
    (first_step, first_loss), (last_step, last_loss) = evaluations[0], evaluations[-1]
    if isinstance(saved_step, int):  # the step whose weights were saved
        last_step, last_loss = next(
            ((step, loss) for step, loss in reversed(evaluations) if step <= saved_step),
            evaluations[-1],
        )
    if last_step == first_step:
        return (
            (
                f"Evaluation loss {format_number(first_loss)} at step {first_step:,.0f}; no second evaluation to"
                " compare it with."
            ),
            "warn",
        )
    first_label = "before training" if first_step == 0 else f"at step {first_step:,.0f}"
    relative_change = (last_loss - first_loss) / first_loss if first_loss else 0.0
    best_step, best_loss = min(evaluations, key=lambda point: point[1])
    if format_number(last_loss) == format_number(first_loss):
        change = "no change"
    else:
        change = (
            f"{format_percent(abs(relative_change))} {'lower' if relative_change < 0 else 'higher'}"
        )
    sentence = f"Evaluation loss {format_number(first_loss)} {first_label}, {format_number(last_loss)} at step {last_step:,.0f}: {change}"
    result_note = ""
    if isinstance(saved_step, int):
        result_note = f" The result is of step {last_step:,.0f}; run.save: best takes the other."
    if best_step not in (first_step, last_step) and format_number(best_loss) != format_number(
        last_loss
    ):
        return (
            (
                f"{sentence}. It was lower at step {best_step:,.0f}, {format_number(best_loss)}: it learns its"
                f" training rows by heart.{result_note}"
            ),
            "warn",
        )
    return f"{sentence}.", "good" if last_loss < first_loss else "warn"


def _precision_verdict(record: RunRecord) -> tuple[str, str]:
    table = precision(record)
    violation_count = len(table["violations"])
    if violation_count:
        return (
            (
                f"The declared precision was broken: {violation_count}"
                f" {'violation' if violation_count == 1 else 'violations'}."
            ),
            "bad",
        )
    roles = [
        row
        for row in table["rows"]
        if row["role"] not in _NOT_A_DTYPE and row["declared"] is not None
    ]
    observed_rows = [row for row in roles if row["rating"] == "good"]
    if not observed_rows:
        return "The precision was not observed.", "warn"
    unobserved_roles = [str(row["role"]) for row in roles if row not in observed_rows]
    unobserved_note = f"; not observed: {', '.join(unobserved_roles)}" if unobserved_roles else ""
    return (
        f"The declared precision was kept in {len(observed_rows)} of {len(roles)} roles{unobserved_note}.",
        "good",
    )


def precision(record: RunRecord) -> dict[str, Any]:
    """Returns one row per role (the purpose of a tensor, such as `grads`): its declared dtype, the
    reason for it, the observed dtype, and whether both are the same. `why` in the result is the
    most frequent reason.
    """
    declared = dict_or_empty(record.precision.get("declared"))
    observed = dict_or_empty(record.precision.get("observed"))
    unobserved = dict_or_empty(record.precision.get("unobserved"))
    violations = rows_or_empty(record.precision.get("violations"), "code", "message", "declared")
    violated_settings = " ".join(violation["declared"] for violation in violations)
    rows = []
    for role in [role for role in ROLES if role in declared or role in observed] + [
        role for role in {**declared, **observed} if role not in ROLES
    ]:
        if isinstance(declared.get(role), dict):
            setting = declared[role]
        else:
            setting = {"value": declared.get(role)}
        value = setting.get("value")
        if isinstance(setting.get("rest"), str):
            value = f"{value} (rest {setting['rest']})"
        counts = [
            f"{n:,} {dtype}" if isinstance(n, int) else f"{n} {dtype}"
            for dtype, n in dict_or_empty(observed.get(role)).items()
        ]
        if f"precision.{role}:" in violated_settings:
            rating = "bad"
        elif counts and value is not None:
            rating = "good"
        else:
            rating = ""
        observation = ", ".join(counts) or ("" if role in _NOT_A_DTYPE else "not observed")
        rows.append(
            {
                "role": role,
                "declared": value,
                "reason": str(setting.get("reason") or ""),
                "observed": observation,
                "rating": rating,
                "seen": bool(counts),
                "unseen": str(unobserved.get(role, "")),
            }
        )
    reasons = [row["reason"] for row in rows if row["reason"]]
    usual_reason = max(set(reasons), key=reasons.count) if reasons else ""
    return {
        "rows": rows,
        "why": usual_reason,
        "differing": any(reason != usual_reason for reason in reasons),
        "promotions": rows_or_empty(record.precision.get("promotions"), "module", "dtype", "times"),
        "violations": violations,
        "places": [
            {"place": str(role_name), "why": str(explanation)}
            for role_name, explanation in unobserved.items()
            if role_name not in ROLES
        ],
        "not_watched": [str(entry) for entry in list_or_empty(record.precision.get("not watched"))],
        "observed_at": [
            format_number(float(seconds))
            for seconds in list_or_empty(record.precision.get("observed_at"))
            if isinstance(seconds, int)
        ],
    }


def preflight(record: RunRecord) -> dict[str, Any] | None:
    """Returns every check that ran before training, with its result: whether it passed, found a
    fault, or was skipped and why. Returns None if the run has no record of these checks.
    """
    recorded = record.preflight
    if not recorded:
        return None
    findings = rows_or_empty(recorded.get("findings"), "code", "severity", "message", "fix")
    skipped = rows_or_empty(recorded.get("skipped"), "code", "check", "reason")
    ratings = {
        finding["code"]: "bad" if finding["severity"] == "error" else "warn" for finding in findings
    }
    checks = [
        {"code": code, "what": title, "rating": ratings.get(code, "good")}
        for code, title in dict_or_empty(recorded.get("checks")).items()
    ]
    seconds = [
        s for s in dict_or_empty(recorded.get("seconds")).values() if isinstance(s, int | float)
    ]
    passed = sum(check["rating"] == "good" for check in checks)
    return {
        "checks": checks,
        "findings": findings,
        "skipped": skipped,
        "passed": passed,
        "seconds": format_duration(sum(seconds)) if seconds else "",
    }


def written_files(record: RunRecord) -> list[dict[str, Any]]:
    """Returns the files and servers that were compared with the run (verify.json), with their
    losses and differences as text.
    """
    files = []
    for name, result in record.verify.items():
        result = dict_or_empty(result)
        losses = dict_or_empty(result.get("loss"))
        kept = result.get("kept")
        agreement = result.get("agreement")
        files.append(
            {
                "name": str(name),
                "format": str(result.get("format", "")),
                "losses": [
                    _loss_text(losses.get(key), is_server="server" in result)
                    for key in ("base", "trained", "served")
                ],
                "kept": format_percent(kept) if isinstance(kept, int | float) else "unknown",
                "agreement": format_percent(agreement)
                if isinstance(agreement, int | float)
                else "",
                "is_same": result.get("same") is True,
                "summary": str(result.get("summary", "")),
                "differences": rows_or_empty(result.get("differences"), "name", "message"),
                "causes": [
                    (str(cause), f"{change:+.4f}")
                    for cause, change in dict_or_empty(result.get("causes")).items()
                    if isinstance(change, int | float)
                ],
            }
        )
    return files


def _loss_text(loss: Any, *, is_server: bool) -> str:
    if isinstance(loss, int | float):
        return f"{loss:.4f}"
    return "not measured" if is_server else "not finite"
