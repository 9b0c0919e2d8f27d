"""The start of a run, and of each part that goes on with it: the files that describe it, what has
changed since the last start, the header.

`plan.json` has what the run was last started with. `resumes.json` has the steps after which it was
resumed, and what has been different since; it is written before the other files of the run folder,
which describe the part that was started last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn

from ..config.compare import compare
from ..config.load import LoadedConfig, config_of, load
from ..config.schema import RunConfig
from ..config.write import resolved_yaml
from ..distributed.world import World
from ..environment.hardware import detect
from ..environment.versions import environment
from ..errors import UsageError
from ..model.adapter import trainable_share
from ..model.architecture import AUTO, attention_of, has_attention
from ..model.architecture import attention_line as attention_of_transformers
from ..model.build import resolve_precision
from ..optimize import joint_attention
from ..precision.parts import local_part
from ..precision.precision import Precision
from ..runs.checkpoint.snapshot import rows_here
from ..runs.folder import RESOLVED, RunFolder
from ..wording import format_bytes, pluralise
from .base import BASE, compare_bases, describe_base
from .console import RunConsole
from .loop import Loop
from .memory.device import returns_freed_blocks
from .schedule import RunSchedule
from .setup import Prepared
from .task import Task

RESUMES = "resumes.json"
# of a change
ROWS = "rows"
EVALUATION_ROWS = "evaluation rows"
OTHER_ROWS = "earlier steps were trained on other rows: resumes.json says until which step"
# in plan.json
OBJECTIVE = "objective"
SETTINGS = "settings"
DATA = "data"
_KINDS = (
    ("training", ROWS, "it goes on at the same place in them"),
    (
        "evaluation",
        EVALUATION_ROWS,
        "their losses are not compared with the earlier ones, and the best is chosen anew",
    ),
)


@dataclass(frozen=True)
class Changed:
    """`of`: settings, rows, evaluation rows, objective or base."""

    of: str
    what: str


def compare_with_before(
    loaded: LoadedConfig, task: Task, folder: RunFolder, console: RunConsole
) -> list[Changed]:
    """The differences from the configuration that the run was started with, printed too. Refuses
    those that would make it another run.
    """
    resolved = resolve_precision(
        loaded.config, loaded.sources, detect(loaded.config.model.device), task.roles
    )
    changes = compare(
        settings_before(folder), loaded.config, auto=resolved.preset, base=resolved.from_checkpoint
    )
    edited = [c.key for c in changes if c.key not in loaded.given]
    if edited and loaded.path == folder.path / RESOLVED:
        console.print_line(
            f"note      {folder.path / RESOLVED} was edited by hand: {', '.join(edited)}"
        )
    forbidden = [c for c in changes if not c.allowed and not loaded.consent]
    if forbidden:
        raise UsageError(
            "resuming would be another run:\n" + "\n".join(f"  {c}" for c in forbidden),
            fix=(
                "resume without these, start a new run, or accept them: --yes (from Python:"
                " accept_changes=True)"
            ),
        )
    return [_changed(console, SETTINGS, str(change)) for change in changes]


def compare_objectives(
    loaded: LoadedConfig, now: str | None, folder: RunFolder, console: RunConsole
) -> list[Changed]:
    """The change of a user's objective, printed too; refuses another kind of loss. Only the
    objective's name is compared.

    now  the objective's name; None for the task's own loss
    """
    recorded = folder.read_json("plan.json")
    before = recorded.get(OBJECTIVE)
    # a run from before this was recorded is not compared
    if OBJECTIVE not in recorded or before == now:
        return []
    if (before is None or now is None) and not loaded.consent:
        was, become = (
            f"an objective of your own ({name})" if name else "the loss of the task"
            for name in (before, now)
        )
        with_it = "isotype.train(resume=..., objective=...) with the same function"
        without = "leave the objective out, or start a new run"
        raise UsageError(
            f"resuming would be another run: it was trained with {was}, and would go on with"
            f" {become}",
            fix=with_it if before else without,
        )
    return [_changed(console, OBJECTIVE, f"objective: {before} -> {now}")]


def compare_data(
    task: Task, folder: RunFolder, console: RunConsole, settings: Sequence[Changed] = ()
) -> list[Changed]:
    """What has changed since the run was last started, printed too. A run from before this was
    recorded is not compared.

    settings  those that this start changes
    """
    before = folder.read_json("plan.json").get(DATA)
    recorded = folder.read_json("data.json")
    if not isinstance(before, dict):
        return []
    facts = task.records().get("data.json", {})
    now = task.fingerprints()
    by_settings = [
        change.what.partition(":")[0] for change in settings if change.what.startswith(f"{DATA}.")
    ]
    found: list[Changed] = []
    for kind, of, follows in _KINDS:
        files = _changed_files(recorded, facts, evaluation=of == EVALUATION_ROWS)
        # the rows that were compared are the first ones only
        streamed = bool(facts.get("stream")) and of == ROWS
        if now[kind] == before.get(kind) and not (streamed and files):
            continue
        if of == EVALUATION_ROWS and not files and found:  # held out of the training files
            files = _changed_files(recorded, facts, evaluation=False)
        what = (
            ", ".join([*files[:5], *by_settings])
            or "the files are the same: the tokenizer, its chat template or a library"
        )
        was = _rows(recorded)
        are = _rows(facts)
        if of == ROWS and was != are and not streamed:
            what += f"; training rows: {was} before, {are} now"
        found.append(
            _changed(
                console, of, f"the {of} are not those of the run's last start ({what}): {follows}"
            )
        )
    return found


def compare_base(
    loaded: LoadedConfig, prepared: Prepared, folder: RunFolder, console: RunConsole
) -> list[Changed]:
    """The change of the base model, printed too; refuses another one."""
    precision = prepared.resolved.precision
    current = describe_base(prepared.base, prepared.model, precision)
    message = compare_bases(folder.read_json("plan.json").get(BASE), current, loaded)
    return [_changed(console, BASE, message)] if message else []


def _changed(console: RunConsole, of: str, what: str) -> Changed:
    console.print_line(f"changed   {what}")
    return Changed(of, what)


def _changed_files(old: dict[str, Any], new: dict[str, Any], *, evaluation: bool) -> list[str]:
    """The files of the evaluation, or the others, that data.json names with another checksum than
    before.
    """
    before, after = (
        dict(
            _checksums(
                facts.get("eval") if evaluation else {k: v for k, v in facts.items() if k != "eval"}
            )
        )
        for facts in (old, new)
    )
    return sorted(
        path for path in before.keys() | after.keys() if before.get(path) != after.get(path)
    )


def _rows(facts: dict[str, Any]) -> Any:
    train = facts.get("train")
    return train.get("rows") if isinstance(train, dict) else None


def _checksums(facts: Any) -> Iterator[tuple[str, str]]:
    """(path, checksum) of each file that data.json names, wherever it does."""
    if isinstance(facts, dict):
        if isinstance(facts.get("path"), str) and isinstance(facts.get("sha256"), str):
            yield facts["path"], facts["sha256"]
        facts = list(facts.values())
    for part in facts if isinstance(facts, list) else ():
        yield from _checksums(part)


def settings_before(folder: RunFolder) -> RunConfig:
    """The settings with which the run was last started, from plan.json; a run from before they were
    kept there has resolved.yaml alone.
    """
    try:
        return RunConfig.model_validate(folder.read_json("plan.json")[SETTINGS])
    except (KeyError, ValidationError):
        return load(folder.path / RESOLVED, [], {}).config


def record_resume(folder: RunFolder, step: int | None, changed: Sequence[Changed]) -> None:
    """Records a resume after this step, with what it changes; None where the run begins again, so
    that nothing before it counts.
    """
    if step is None:
        (folder.path / RESUMES).unlink(missing_ok=True)
        return
    steps, changes = _read(folder)
    # steps that are done again, since their checkpoint was damaged, have the later settings
    changes = [change | {"after_step": min(change["after_step"], step)} for change in changes]
    made = ({"after_step": step, **asdict(one)} for one in changed)
    # those of a resume that was killed at once are there
    changes += [one for one in made if one not in changes]
    folder.write_json(
        RESUMES,
        {"steps": [*(s for s in steps if s <= step), step]}
        | ({"changes": changes} if changes else {}),
    )


def _read(folder: RunFolder) -> tuple[list[int], list[dict[str, Any]]]:
    """(steps, changes) as far as the file has them in the form that this module writes."""
    found = folder.read_json(RESUMES)
    steps = found.get("steps")
    changes = found.get("changes")
    return (
        [step for step in steps if type(step) is int] if isinstance(steps, list) else [],
        (
            [c for c in changes if isinstance(c, dict) and type(c.get("after_step")) is int]
            if isinstance(changes, list)
            else []
        ),
    )


def refuse_fewer_steps(loop: Loop, made: int | None) -> None:
    """Raises UsageError where the run has made more steps than it is to have: its settings would be
    untrue.
    """
    if made is not None and made > loop.plan.total:
        raise UsageError(
            f"train.steps: {loop.plan.total}, and the run has made {pluralise(made, 'step')}",
            fix=f"more than {made} to go on; for a shorter run, give another folder",
        )


def restore(loop: Loop, step: int | None, console: RunConsole) -> None:
    """Restores the checkpoint of this step, the newest whole one, or begins at step 1 where there
    is none. Says which.
    """
    world = loop.world
    if step is None:
        if world.first:
            loop.store.tidy(None)
            loop.metrics.cut_after(-1)
        console.print_line("resume    no whole checkpoint: starting from the beginning")
        return
    wrote = loop.restore(loop.store.load(step, rows_here(loop.model)))
    if world.first:
        loop.store.tidy(loop.progress.best_step)
    if wrote != world.size:
        of_then, now = (pluralise(count, "process", "processes") for count in (wrote, world.size))
        said = (
            f"saved by {of_then}, goes on with {now}: the same rows; dropout, where the model has"
            " any, draws differently"
        )
        console.print_line(f"resume    {said}")
    ended = ""
    if step >= loop.plan.total:
        ended = f", which was the last: train.steps={2 * step} or train.epochs=N goes on"
    elif loop.ended_early:
        ended = (
            f", where early stopping ended the run: train.patience={2 * loop.progress.without_gain}"
            " goes on"
        )
    console.print_line(f"resume    from step {step}{ended}")


def write_start(
    loaded: LoadedConfig,
    task: Task,
    prepared: Prepared,
    plan: RunSchedule,
    folder: RunFolder,
    world: World,
    objective: str | None,
    *,
    resuming: bool,
) -> None:
    """Writes a new run's `resolved.yaml` last, since it marks the folder as a run. `objective`: the
    name of a user's own.
    """
    # of the part that a resumed run goes on from
    (folder.path / "result.json").unlink(missing_ok=True)
    if not resuming:
        folder.metrics.unlink(missing_ok=True)
        # as given at first; a resumed run reads resolved.yaml
        folder.write_text("config.yaml", loaded.text)
    folder.write_json("env.json", environment())
    folder.write_json("manifest.json", prepared.manifest.to_dict())
    task.begin(folder.path, resuming=resuming)
    had_other_rows = resuming and any(change.get("of") == ROWS for change in _read(folder)[1])
    for name, content in task.records().items():
        if name == "data.json" and had_other_rows:
            content = content | {"notes": [*content.get("notes", []), OTHER_ROWS]}
        folder.write_json(name, content)
    resolved = _resolved_text(loaded, prepared, folder, resuming=resuming)
    trainable, total = trainable_share(prepared.model)
    described = {
        **asdict(plan),
        "task": task.kind,
        "parameters": total,
        "trained": trainable,
        OBJECTIVE: objective,
        DATA: task.fingerprints(),
        BASE: describe_base(prepared.base, prepared.model, prepared.resolved.precision),
        "processes": world.size,
        "machines": world.nodes,
        SETTINGS: config_of(resolved, RESOLVED).model_dump(mode="json"),
    }
    # settings that a kill keeps out of plan.json are found in resolved.yaml, and compared with
    # plan.json's again
    if resuming:
        folder.write_text(RESOLVED, resolved)
    folder.write_json("plan.json", described)
    if not resuming:
        folder.write_text(RESOLVED, resolved)


def _resolved_text(
    loaded: LoadedConfig, prepared: Prepared, folder: RunFolder, *, resuming: bool
) -> str:
    """`resolved.yaml`: each setting with its source, and what the run chose for those left open."""
    resolved = prepared.resolved
    model = prepared.model
    reasons = {f"precision.{role}": reason for role, reason in resolved.reasons.items()} | {
        "precision.preset": resolved.why_preset
    }
    values = {f"precision.{role}": value for role, value in resolved.precision.items()} | {
        "precision.preset": resolved.preset
    }
    if base := resolved.from_checkpoint:
        loaded = _with(loaded, "precision", "base", base, resolved.reasons["base"])
    if loaded.config.model.attention == AUTO and has_attention(model):
        values["model.attention"] = attention_of(model)
        reasons["model.attention"] = attention_of_transformers(model, AUTO)
    if loaded.config.train.gradient_checkpointing == AUTO:
        settings = prepared.checkpointing.as_settings()
        values |= settings
        reasons |= dict.fromkeys(settings, prepared.checkpointing.reason)
    given = loaded.config.run.folder
    # it was copied or renamed
    if resuming and "{name}" not in given and Path(given).resolve() != folder.path.resolve():
        loaded = _with(loaded, "run", "folder", str(folder.path), "where the run was resumed")
    return resolved_yaml(loaded, reasons, values)


def _with(loaded: LoadedConfig, section: str, key: str, value: str, source: str) -> LoadedConfig:
    """The same with another value of one setting."""
    part = getattr(loaded.config, section).model_copy(update={key: value})
    config = loaded.config.model_copy(update={section: part})
    return replace(loaded, config=config, sources={**loaded.sources, f"{section}.{key}": source})


def header_rows(
    task: Task, prepared: Prepared, plan: RunSchedule, folder: RunFolder, world: World
) -> list[tuple[str, str]]:
    """Environment, model, precision, data, memory and schedule: what will happen, on one screen."""
    config = task.config
    hardware = prepared.hardware
    resolved = prepared.resolved
    train = config.train
    trainable, total = trainable_share(prepared.model)
    p = resolved.precision
    if config.adapter.kind != "none":
        how = f"{config.adapter.kind} r={config.adapter.r}"
    else:
        how = "every weight"
    weights = sum(local_part(p).numel() * p.element_size() for p in prepared.model.parameters())
    line = attention_line(
        prepared.model, config.model.attention, p, device_type=prepared.device.type
    )
    measured = "isotype plan estimates the peak, each step shows the measured one"
    if returns_freed_blocks():
        returned = "; freed memory is given back at once, since it may become scarce"
    else:
        returned = ""
    rows = [
        ("run", str(folder.path)),
        ("device", f"{hardware.name}, torch {torch.__version__}"),
        *_processes_row(world, prepared, config.parallel.kind),
        (
            "model",
            (
                f"{task.base_name}  {total:,} parameters, {trainable:,} trained"
                f" ({trainable / total:.2%}, {how})"
            ),
        ),
        ("precision", f"{resolved.text}  ({resolved.why_preset})"),
        ("", "  ".join(f"{role} {value}" for role, value, _ in resolved.rows())),
        *task.header(),
        ("ops", "\n".join(prepared.manifest.lines())),
        ("attention", line),
        ("recompute", str(prepared.checkpointing)),
        (
            "memory",
            f"weights {format_bytes(weights)} of {format_bytes(hardware.memory)}; {measured}{returned}",
        ),
        (
            "schedule",
            (
                f"{pluralise(plan.total, 'step')} of {train.batch_size} x {train.accumulate}"
                f" {task.words.row}s, learning rate {train.learning_rate:g} {train.schedule}"
            ),
        ),
        *[("warning", f"{f.code} {f.message}; {f.fix}") for f in resolved.warnings],
    ]
    return [(label, text) for label, text in rows if text]


def _processes_row(world: World, prepared: Prepared, kind: str) -> list[tuple[str, str]]:
    if world.size == 1:
        if kind in ("shard", "hybrid"):
            return [("processes", f"1: parallel.kind: {kind} has no effect")]
        return []
    batching = prepared.batching
    where = "on one machine" if world.nodes == 1 else f"on {world.nodes} machines"
    each = f"{len(batching.own)} x {batching.rows} rows of each step"
    return [
        (
            "processes",
            (
                f"{world.size} {where}, started by {world.launcher}, {world.backend}:"
                f" {prepared.parallel}, each computes {each}"
            ),
        )
    ]


def attention_line(model: nn.Module, asked: str, precision: Precision, *, device_type: str) -> str:
    """The implementation and why it is that one; of diffusers' models the back ends of their
    layers; "" where neither is known.

    asked  `model.attention`
    """
    return attention_of_transformers(model, asked) or joint_attention.said(
        model, precision.compute, device_type=device_type
    )
