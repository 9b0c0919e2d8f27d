"""Starts or resumes a run. This module writes the files that describe the run, and finds the
changes since its last start.

`plan.json` contains the settings, data and objective of the last start. `resumes.json` contains the
steps after which the run was resumed, with the changes at each resume. The other files of the run
folder describe only the last start, so `resumes.json` is written before them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..config.compare import Change, compare
from ..config.load import LoadedConfig, load, parse_config
from ..config.schema import RunConfig
from ..config.write import resolved_yaml
from ..distributed.world import World
from ..environment.versions import environment
from ..errors import UsageError
from ..model.adapter import trainable_share
from ..model.architecture import AUTO, attention_setting, has_attention
from ..model.architecture import describe_attention as attention_of_transformers
from ..runs.checkpoint.snapshot import local_row_selector
from ..runs.folder import RESOLVED, RunFolder
from ..runs.mapped_files import MAPPED_RECORD, find_truncated_files
from ..wording import pluralise
from .base import BASE, compare_bases, describe_base
from .console import RunConsole
from .device_setup import resolve_run_precision
from .loop import Loop
from .schedule import RunSchedule
from .setup import Prepared
from .task import Task

RESUMES = "resumes.json"  # file of a run that lists its resumes
# kinds of changes
ROWS = "rows"
EVALUATION_ROWS = "evaluation rows"
OTHER_ROWS = "earlier steps were trained on other rows: resumes.json says until which step"
# keys of plan.json
OBJECTIVE = "objective"
SETTINGS = "settings"
DATA = "data"
# key of the configuration with a path whose content a resume compares -> the key of plan.json
# that records the content
_COMPARED_PATHS = {
    "data.train": DATA,
    "data.eval": DATA,
    "images.train": DATA,
    "images.eval": DATA,
    "model.name": BASE,
}
_ORDER_NOTE = (
    ". The order of an epoch depends on the number of rows, so in the current epoch some pictures"
    " may be used twice and others not at all"
)
_FIX = "resume without these, start a new run, or accept them: --yes (from Python: accept_changes=True)"
_KINDS = (
    ("training", ROWS, "the run continues at the same position in them"),
    (
        "evaluation",
        EVALUATION_ROWS,
        "their losses are not compared with the earlier ones, and the best is chosen anew",
    ),
)


@dataclass(frozen=True)
class RunChange:
    """A difference from the run's last start. `kind` says what is different: `settings`, `rows`,
    `evaluation rows`, `objective` or `base`.
    """

    kind: str
    description: str


def compare_settings(
    loaded: LoadedConfig, task: Task, folder: RunFolder, console: RunConsole, world: World
) -> list[RunChange]:
    """Prints and returns the settings whose values differ from those at the last start. Raises
    UsageError for a setting that must not be changed when a run is resumed.
    """
    resolved = resolve_run_precision(task, loaded.sources, world=world)
    changes = compare(
        read_previous_settings(folder),
        loaded.config,
        auto_preset=resolved.preset,
        auto_base=resolved.from_checkpoint,
    )
    edited_keys = [change.key for change in changes if change.key not in loaded.command_line_keys]
    if edited_keys and loaded.path == folder.path / RESOLVED:
        console.print_line(
            f"note      {folder.path / RESOLVED} was edited by hand: {', '.join(edited_keys)}"
        )
    moved_paths = [
        change for change in changes if not loaded.consent and _is_compared_path(change, folder)
    ]
    forbidden_changes = [
        change
        for change in changes
        if not change.allowed and not loaded.consent and change not in moved_paths
    ]
    if forbidden_changes:
        raise UsageError(
            "resuming would be another run:\n"
            + "\n".join(f"  {change}" for change in forbidden_changes),
            fix=_FIX,
        )
    reported = []
    for change in changes:
        if change in moved_paths:
            change = replace(change, reason="its content is compared with that of the last start")
        reported.append(_report_change(console, SETTINGS, str(change)))
    return reported


def _is_compared_path(change: Change, folder: RunFolder) -> bool:
    """Returns True if only paths changed, and the run has stored a record of the content of the old
    paths.
    """
    record = _COMPARED_PATHS.get(change.key)
    if record is None or not isinstance(folder.read_json("plan.json").get(record), dict):
        return False
    return bool(_mask_paths(change.old) == _mask_paths(change.new))


def _mask_paths(value: Any) -> Any:
    """Replaces each path in the data sources by `PATH`, so that a comparison finds only differences
    in the other settings.
    """
    if isinstance(value, str):
        return "PATH"
    if isinstance(value, list):
        return [_mask_paths(part) for part in value]
    if not isinstance(value, dict):
        return value
    if "name" in value:
        return value | {"name": "PATH"}
    return {group: _mask_paths(part) for group, part in value.items()}


def _changed_keys(settings: Sequence[RunChange]) -> list[str]:
    return [change.description.partition(":")[0] for change in settings if change.kind == SETTINGS]


def _refuse_other_content(
    settings: Sequence[RunChange], record: str, difference: str, loaded: LoadedConfig
) -> None:
    """Raises UsageError if a path changed and the file at the new path has other content."""
    keys = [key for key in _changed_keys(settings) if _COMPARED_PATHS.get(key) == record]
    if keys and difference and not loaded.consent:
        raise UsageError(
            f"resuming would be another run: {', '.join(keys)}: {difference}", fix=_FIX
        )


def compare_objectives(
    loaded: LoadedConfig, objective: str | None, folder: RunFolder, console: RunConsole
) -> list[RunChange]:
    """If the user's objective has changed, prints and returns this change. Objectives are compared
    by their names. Raises UsageError if the kind of loss has changed.

    objective  the objective's name; None for the task's own loss
    """
    recorded = folder.read_json("plan.json")
    recorded_objective = recorded.get(OBJECTIVE)
    # a run without this record is not compared
    if OBJECTIVE not in recorded or recorded_objective == objective:
        return []
    if (recorded_objective is None or objective is None) and not loaded.consent:
        previous_loss, next_loss = (
            f"an objective of your own ({name})" if name else "the loss of the task"
            for name in (recorded_objective, objective)
        )
        give_objective = "isotype.train(resume=..., objective=...) with the same function"
        drop_objective = "leave the objective out, or start a new run"
        raise UsageError(
            f"resuming would be another run: it was trained with {previous_loss}, and would"
            f" continue with {next_loss}",
            fix=give_objective if recorded_objective else drop_objective,
        )
    return [_report_change(console, OBJECTIVE, f"objective: {recorded_objective} -> {objective}")]


def compare_data(
    loaded: LoadedConfig,
    task: Task,
    folder: RunFolder,
    console: RunConsole,
    settings: Sequence[RunChange] = (),
) -> list[RunChange]:
    """Prints and returns the changes of the data since the last start. If the run stored no record
    of its data, nothing is compared.

    settings  the settings that this start changes
    Raises    UsageError if the file at a changed path contains other rows, unless the user accepts
              changes
    """
    previous_fingerprints = folder.read_json("plan.json").get(DATA)
    recorded = folder.read_json("data.json")
    if not isinstance(previous_fingerprints, dict):
        return []
    facts = task.records().get("data.json", {})
    fingerprints = task.fingerprints()
    setting_keys = [key for key in _changed_keys(settings) if key.startswith("data.")]
    changes: list[RunChange] = []
    for kind, rows_kind, consequence in _KINDS:
        files = _changed_files(recorded, facts, evaluation=rows_kind == EVALUATION_ROWS)
        # the rows that were compared are the first ones only
        is_streamed = bool(facts.get("stream")) and rows_kind == ROWS
        if fingerprints[kind] == previous_fingerprints.get(kind) and not (is_streamed and files):
            continue
        # evaluation rows that are held out of the training files
        if rows_kind == EVALUATION_ROWS and not files and changes:
            files = _changed_files(recorded, facts, evaluation=False)
        if loaded.config.images.train is None:
            other_causes = "the files are the same: the tokenizer, its chat template or a library"
        else:
            other_causes = "their pictures, captions, masks or settings, or a library"
        causes = ", ".join([*files[:5], *setting_keys]) or other_causes
        previous_rows = _training_row_count(recorded)
        current_rows = _training_row_count(facts)
        if rows_kind == ROWS and previous_rows != current_rows and not is_streamed:
            causes += f"; training rows: {previous_rows} before, {current_rows} now"
        difference = f"the {rows_kind} are not those of the run's last start ({causes})"
        _refuse_other_content(settings, DATA, difference, loaded)
        if rows_kind == ROWS and previous_rows != current_rows and loaded.config.images.train:
            consequence += _ORDER_NOTE
        changes.append(_report_change(console, rows_kind, f"{difference}: {consequence}"))
    return changes


def compare_base(
    loaded: LoadedConfig,
    prepared: Prepared,
    folder: RunFolder,
    console: RunConsole,
    settings: Sequence[RunChange] = (),
) -> list[RunChange]:
    """If the base model has changed, prints and returns this change. Raises UsageError if the
    change is not allowed.

    settings  the settings that this start changes
    """
    precision = prepared.resolved.precision
    current = describe_base(prepared.base_fingerprint, prepared.model, precision)
    recorded = folder.read_json("plan.json").get(BASE)
    message = compare_bases(recorded, current, loaded)
    if not message and isinstance(recorded, dict) and recorded.get("precision") != precision.base:
        difference = "its weights have another precision, and are not compared"
    else:
        difference = message
    _refuse_other_content(settings, BASE, difference, loaded)
    return [_report_change(console, BASE, message)] if message else []


def _report_change(console: RunConsole, kind: str, description: str) -> RunChange:
    console.print_line(f"changed   {description}")
    return RunChange(kind, description)


def _changed_files(old: dict[str, Any], new: dict[str, Any], *, evaluation: bool) -> list[str]:
    """Returns the files in data.json whose checksum has changed. Depending on `evaluation`, these
    are only the evaluation files, or all other files.
    """
    previous, current = (
        dict(
            _checksums(
                facts.get("eval") if evaluation else {k: v for k, v in facts.items() if k != "eval"}
            )
        )
        for facts in (old, new)
    )
    return sorted(
        path
        for path in previous.keys() | current.keys()
        if previous.get(path) != current.get(path) and not _is_moved(path, previous, current)
    )


def _is_moved(path: str, previous: dict[str, str], current: dict[str, str]) -> bool:
    """Returns True if the file was only moved since the last start, so that its path has changed
    but its content is the same.
    """
    if path in previous and path in current:
        return False
    old, new = (set(checksums.values()) for checksums in (previous, current))
    return previous.get(path) in new or current.get(path) in old


def _training_row_count(facts: dict[str, Any]) -> Any:
    train = facts.get("train")
    if isinstance(train, dict):
        return train.get("rows")
    return facts.get("train_pictures")


def _checksums(facts: Any) -> Iterator[tuple[str, str]]:
    """Yields the pair (path, checksum) for each file in data.json, at any depth."""
    if isinstance(facts, dict):
        if isinstance(facts.get("path"), str) and isinstance(facts.get("sha256"), str):
            yield facts["path"], facts["sha256"]
        facts = list(facts.values())
    for part in facts if isinstance(facts, list) else ():
        yield from _checksums(part)


def read_previous_settings(folder: RunFolder) -> RunConfig:
    """Returns the settings of the last start. The settings are read from plan.json. If plan.json
    does not contain them, they are read from resolved.yaml.
    """
    try:
        return RunConfig.model_validate(folder.read_json("plan.json")[SETTINGS])
    except (KeyError, ValidationError):
        return load(folder.path / RESOLVED, [], {}).config


def record_resume(folder: RunFolder, step: int | None, run_changes: Sequence[RunChange]) -> None:
    """Records that the run is resumed after step `step`, and what has changed since the last start.
    If `step` is None, the run begins again from step 1, and the earlier records are removed.
    """
    if step is None:
        (folder.path / RESUMES).unlink(missing_ok=True)
        return
    steps, changes = _read_resumes(folder)
    # steps that run again because their checkpoint was damaged have the newer settings
    changes = [change | {"after_step": min(change["after_step"], step)} for change in changes]
    new_changes = (
        {"after_step": step, "of": change.kind, "what": change.description}
        for change in run_changes
    )
    # a resume that was killed at once has left its changes in the file
    changes += [change for change in new_changes if change not in changes]
    folder.write_json(
        RESUMES,
        {"steps": [*(s for s in steps if s <= step), step]}
        | ({"changes": changes} if changes else {}),
    )


def _read_resumes(folder: RunFolder) -> tuple[list[int], list[dict[str, Any]]]:
    """Returns the steps and the changes that resumes.json contains. Entries that do not have the
    expected form are ignored.
    """
    record = folder.read_json(RESUMES)
    steps = record.get("steps")
    changes = record.get("changes")
    return (
        [step for step in steps if type(step) is int] if isinstance(steps, list) else [],
        (
            [
                change
                for change in changes
                if isinstance(change, dict) and type(change.get("after_step")) is int
            ]
            if isinstance(changes, list)
            else []
        ),
    )


def report_truncated_files(folder: RunFolder, console: RunConsole) -> None:
    """Prints which memory-mapped files were truncated. Prints them only if the run ended without
    writing a result, because a truncated file may have ended the run.
    """
    if folder.read_json("result.json"):
        return
    for description in find_truncated_files(folder.read_json(MAPPED_RECORD)):
        console.print_line(
            f"resume    {description}: it was truncated while the run read it, which ends a"
            " process without a message (SIGBUS)"
        )


def refuse_fewer_steps(loop: Loop, finished_steps: int | None) -> None:
    """Raises UsageError if the run has already made more steps than `train.steps` allows."""
    if finished_steps is not None and finished_steps > loop.schedule.total:
        raise UsageError(
            f"train.steps: {loop.schedule.total}, and the run has made {pluralise(finished_steps, 'step')}",
            fix=f"more than {finished_steps} to go on; for a shorter run, give another folder",
        )


def restore_checkpoint(loop: Loop, step: int | None, console: RunConsole) -> None:
    """Restores the checkpoint of `step`, which is the newest intact checkpoint, and prints its
    step. If there is no checkpoint (`step` is None), the run begins at step 1.
    """
    world = loop.world
    if step is None:
        if world.is_first:
            loop.store.clean_up(None)
            loop.metrics.cut_after(-1)
        console.print_line("resume    no whole checkpoint: starting from the beginning")
        return
    writing_processes = loop.restore(
        loop.store.load(step, local_row_selector(loop.model), is_verified=True)
    )
    if world.is_first:
        loop.store.clean_up(loop.progress.best_step)
    if writing_processes != world.size:
        previous_processes, current_processes = (
            pluralise(count, "process", "processes") for count in (writing_processes, world.size)
        )
        message = (
            f"saved by {previous_processes}, continues with {current_processes}: the same rows; dropout, where the model has"
            " any, draws differently"
        )
        console.print_line(f"resume    {message}")
    end_text = ""
    if step >= loop.schedule.total:
        end_text = f", which was the last: train.steps={2 * step} or train.epochs=N continues"
    elif loop.is_stopped_early:
        end_text = (
            f", where early stopping ended the run: train.patience={2 * loop.progress.without_gain}"
            " continues"
        )
    console.print_line(f"resume    from step {step}{end_text}")


def write_start(
    loaded: LoadedConfig,
    task: Task,
    prepared: Prepared,
    schedule: RunSchedule,
    folder: RunFolder,
    world: World,
    objective: str | None,
    *,
    is_resuming: bool,
) -> None:
    """Writes the files that describe the run. For a new run, `resolved.yaml` is written last,
    because a folder with this file counts as a run folder. `objective` is the name of the user's
    objective.
    """
    # remove the result of the last start
    (folder.path / "result.json").unlink(missing_ok=True)
    if not is_resuming:
        folder.metrics.unlink(missing_ok=True)
        # the user's own text; a resumed run reads resolved.yaml
        folder.write_text("config.yaml", loaded.text)
    folder.write_json("env.json", environment())
    folder.write_json("manifest.json", prepared.manifest.to_dict())
    task.begin(folder.path, is_resuming=is_resuming)
    had_other_rows = is_resuming and any(
        change.get("of") == ROWS for change in _read_resumes(folder)[1]
    )
    for name, content in task.records().items():
        if name == "data.json" and had_other_rows:
            content = content | {"notes": [*content.get("notes", []), OTHER_ROWS]}
        folder.write_json(name, content)
    resolved = _resolved_text(loaded, prepared, folder, is_resuming=is_resuming)
    trainable, total = trainable_share(prepared.model)
    plan_record = {
        **asdict(schedule),
        "task": task.kind,
        "parameters": total,
        "trained": trainable,
        OBJECTIVE: objective,
        DATA: task.fingerprints(),
        BASE: describe_base(prepared.base_fingerprint, prepared.model, prepared.resolved.precision),
        "processes": world.size,
        "machines": world.nodes,
        SETTINGS: parse_config(resolved, RESOLVED).model_dump(mode="json"),
    }
    # if the process is killed between the two files, the next resume finds the new settings in
    # resolved.yaml, and compares them with those of plan.json again
    if is_resuming:
        folder.write_text(RESOLVED, resolved)
    folder.write_json("plan.json", plan_record)
    if not is_resuming:
        folder.write_text(RESOLVED, resolved)


def _resolved_text(
    loaded: LoadedConfig, prepared: Prepared, folder: RunFolder, *, is_resuming: bool
) -> str:
    """Returns the text of `resolved.yaml`. The text contains each setting and the place where it
    was set. For settings that are `auto`, it contains the value that the run chose.
    """
    resolved = prepared.resolved
    model = prepared.model
    reasons = {f"precision.{role}": reason for role, reason in resolved.reasons.items()} | {
        "precision.preset": resolved.preset_reason
    }
    values = {f"precision.{role}": value for role, value in resolved.precision.items()} | {
        "precision.preset": resolved.preset
    }
    if base := resolved.from_checkpoint:
        loaded = _replace_setting(loaded, "precision", "base", base, resolved.reasons["base"])
    if loaded.config.model.attention == AUTO and has_attention(model):
        values["model.attention"] = attention_setting(model)
        reasons["model.attention"] = attention_of_transformers(model, AUTO)
    if loaded.config.train.gradient_checkpointing == AUTO:
        settings = prepared.checkpointing.to_settings()
        values |= settings
        reasons |= dict.fromkeys(settings, prepared.checkpointing.reason)
    folder_setting = loaded.config.run.folder
    # the folder was copied or renamed
    if (
        is_resuming
        and "{name}" not in folder_setting
        and Path(folder_setting).resolve() != folder.path.resolve()
    ):
        loaded = _replace_setting(
            loaded, "run", "folder", str(folder.path), "where the run was resumed"
        )
    return resolved_yaml(loaded, reasons, values)


def _replace_setting(
    loaded: LoadedConfig, section: str, key: str, value: str, source: str
) -> LoadedConfig:
    """Returns a copy of the configuration in which one setting has another value."""
    part = getattr(loaded.config, section).model_copy(update={key: value})
    config = loaded.config.model_copy(update={section: part})
    return replace(loaded, config=config, sources={**loaded.sources, f"{section}.{key}": source})
