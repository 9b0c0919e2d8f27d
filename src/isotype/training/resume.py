"""Goes on with a run: compares settings, objective and rows with those of its last start, and restores the newest whole checkpoint.

`plan.json` has what the run was last started with. `resumes.json` has the steps after which it was resumed, and what has been different
since; it is written before the other files of the run folder, which describe the part that was started last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import ValidationError

from ..config.compare import compare
from ..config.load import LoadedConfig, load
from ..config.schema import RunConfig
from ..environment.hardware import detect
from ..errors import UsageError
from ..model.build import resolve_precision
from ..runs.checkpoint.snapshot import rows_here
from ..runs.folder import RESOLVED, RunFolder
from ..wording import counted
from .console import RunConsole
from .loop import Loop
from .task import Task

RESUMES = "resumes.json"
ROWS, EVALUATION_ROWS = "rows", "evaluation rows"  # of a change
OTHER_ROWS = "earlier steps were trained on other rows: resumes.json says until which step"
OBJECTIVE, SETTINGS, DATA = "objective", "settings", "data"  # in plan.json
_KINDS = (
    ("training", ROWS, "it goes on at the same place in them"),
    ("evaluation", EVALUATION_ROWS, "their losses are not compared with the earlier ones, and the best is chosen anew"),
)


@dataclass(frozen=True)
class Changed:
    """`of`: settings, rows, evaluation rows or objective."""

    of: str
    what: str


def compare_with_before(loaded: LoadedConfig, task: Task, folder: RunFolder, console: RunConsole) -> list[Changed]:
    """The differences from the configuration that the run was started with, printed too. Refuses those that would make it another run."""
    resolved = resolve_precision(loaded.config, loaded.sources, detect(loaded.config.model.device), task.roles)
    changes = compare(settings_before(folder), loaded.config, auto=resolved.preset, base=resolved.from_checkpoint)
    edited = [c.key for c in changes if c.key not in loaded.given]
    if edited and loaded.path == folder.path / RESOLVED:
        console.say(f"note      {folder.path / RESOLVED} was edited by hand: {', '.join(edited)}")
    forbidden = [c for c in changes if not c.allowed and not loaded.consent]
    if forbidden:
        raise UsageError(
            "resuming would be another run:\n" + "\n".join(f"  {c}" for c in forbidden),
            fix="resume without these, start a new run, or accept them: --yes (from Python: accept_changes=True)",
        )
    for change in changes:
        console.say(f"changed   {change}")
    return [Changed("settings", str(change)) for change in changes]


def compare_objectives(loaded: LoadedConfig, now: str | None, folder: RunFolder, console: RunConsole) -> list[Changed]:
    """The change of a user's objective, printed too; refuses another kind of loss. Only the objective's name is compared.

    now  the objective's name; None for the task's own loss
    """
    recorded = folder.read_json("plan.json")
    before = recorded.get(OBJECTIVE)
    if OBJECTIVE not in recorded or before == now:  # a run from before this was recorded is not compared
        return []
    if (before is None or now is None) and not loaded.consent:
        was, become = (f"an objective of your own ({name})" if name else "the loss of the task" for name in (before, now))
        raise UsageError(
            f"resuming would be another run: it was trained with {was}, and would go on with {become}",
            fix="isotype.train(resume=..., objective=...) with the same function"
            if before
            else "leave the objective out, or start a new run",
        )
    line = f"objective: {before} -> {now}"
    console.say(f"changed   {line}")
    return [Changed("objective", line)]


def compare_data(task: Task, folder: RunFolder, console: RunConsole, settings: Sequence[Changed] = ()) -> list[Changed]:
    """What has changed since the run was last started, printed too. A run from before this was recorded is not compared.

    settings  those that this start changes
    """
    before, recorded = folder.read_json("plan.json").get(DATA), folder.read_json("data.json")
    if before is None:
        return []
    facts, now = task.records().get("data.json", {}), task.fingerprints()
    by_settings = [change.what.partition(":")[0] for change in settings if change.what.startswith(f"{DATA}.")]
    found: list[Changed] = []
    for kind, of, follows in _KINDS:
        files = _changed_files(recorded, facts, evaluation=kind == "evaluation")
        same = now[kind] == before.get(kind) if isinstance(before, dict) else not files  # a string: of an earlier version, of both kinds
        streamed = bool(facts.get("stream")) and kind == "training"  # the rows that were compared are the first ones only
        if same and not (streamed and files):
            continue
        if kind == "evaluation" and not files and found:  # held out of the training files
            files = _changed_files(recorded, facts, evaluation=False)
        what = ", ".join([*files[:5], *by_settings]) or "the files are the same: the tokenizer, its chat template or a library"
        was, are = _rows(recorded), _rows(facts)
        if kind == "training" and was != are and not streamed:
            what += f"; training rows: {was} before, {are} now"
        line = f"the {of} are not those of the run's last start ({what}): {follows}"
        console.say(f"changed   {line}")
        found.append(Changed(of, line))
    return found


def _changed_files(old: dict[str, Any], new: dict[str, Any], *, evaluation: bool) -> list[str]:
    """The files of the evaluation, or the others, that data.json names with another checksum than before."""
    before, after = (
        dict(_checksums((facts.get("eval") if evaluation else {k: v for k, v in facts.items() if k != "eval"}) or {}))
        for facts in (old, new)
    )
    return sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))


def _rows(facts: dict[str, Any]) -> Any:
    train = facts.get("train")
    return train.get("rows") if isinstance(train, dict) else None


def _checksums(facts: Any) -> Iterator[tuple[str, str]]:
    """(path, checksum) of each file that data.json names, wherever it does."""
    if isinstance(facts, dict):
        if isinstance(facts.get("path"), str) and isinstance(facts.get("sha256"), str):
            yield facts["path"], facts["sha256"]
        facts = list(facts.values())
    if isinstance(facts, list):
        for part in facts:
            yield from _checksums(part)


def settings_before(folder: RunFolder) -> RunConfig:
    """The settings with which the run was last started, from plan.json; a run from before they were kept there has resolved.yaml alone."""
    try:
        return RunConfig.model_validate(folder.read_json("plan.json")[SETTINGS])
    except (KeyError, ValidationError):
        return load(folder.path / RESOLVED, [], {}).config


def record_resume(folder: RunFolder, step: int | None, changed: Sequence[Changed]) -> None:
    """Records a resume after this step, with what it changes; None where the run begins again, so that nothing before it counts."""
    if step is None:
        (folder.path / RESUMES).unlink(missing_ok=True)
        return
    steps, changes = _read(folder)
    # steps that are done again, since their checkpoint was damaged, have the later settings
    changes = [change | {"after_step": min(change["after_step"], step)} for change in changes]
    made = ({"after_step": step, **asdict(one)} for one in changed)
    changes += [one for one in made if one not in changes]  # those of a resume that was killed at once are there
    folder.write_json(RESUMES, {"steps": [*(s for s in steps if s <= step), step]} | ({"changes": changes} if changes else {}))


def had_other_rows(folder: RunFolder) -> bool:
    """Whether the rows changed in one of the run's resumes."""
    return any(change.get("of") == ROWS for change in _read(folder)[1])


def _read(folder: RunFolder) -> tuple[list[int], list[dict[str, Any]]]:
    """(steps, changes) as far as the file has them in the form that this module writes."""
    found = folder.read_json(RESUMES)
    steps, changes = found.get("steps"), found.get("changes")
    return (
        [step for step in steps if type(step) is int] if isinstance(steps, list) else [],
        [c for c in changes if isinstance(c, dict) and type(c.get("after_step")) is int] if isinstance(changes, list) else [],
    )


def refuse_fewer_steps(loop: Loop, made: int | None) -> None:
    """Raises UsageError where the run has made more steps than it is to have: its settings would be untrue."""
    if made is not None and made > loop.plan.total:
        raise UsageError(
            f"train.steps: {loop.plan.total}, and the run has made {counted(made, 'step')}",
            fix=f"more than {made} to go on; for a shorter run, give another folder",
        )


def restore(loop: Loop, step: int | None, console: RunConsole) -> None:
    """Restores the checkpoint of this step, the newest whole one, or begins at step 1 where there is none. Says which."""
    world = loop.world
    if step is None:
        if world.first:
            loop.store.tidy(None)
            loop.metrics.cut_after(-1)
        console.say("resume    no whole checkpoint: starting from the beginning")
        return
    wrote = loop.restore(loop.store.load(step, rows_here(loop.model)))
    if world.first:
        loop.store.tidy(loop.progress.best_step)
    if wrote != world.size:
        said = f"saved by {_processes(wrote)}, goes on with {_processes(world.size)}"
        console.say(f"resume    {said}: the same rows; dropout, where the model has any, draws differently")
    console.say(f"resume    from step {step}{_ended(loop)}")


def _ended(loop: Loop) -> str:
    """What is said of a run that has ended, and how it goes on; empty for one that has not."""
    step, progress = loop.progress.step, loop.progress
    if step >= loop.plan.total:
        return f", which was the last: train.steps={2 * step} or train.epochs=N goes on"
    if loop.ended_early:
        return f", where early stopping ended the run: train.patience={2 * progress.without_gain} goes on"
    return ""


def _processes(count: int) -> str:
    return counted(count, "process", "processes")
