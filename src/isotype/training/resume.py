"""Goes on with a run: compares its configuration with that of the run before, and restores the newest whole checkpoint."""

from __future__ import annotations

from ..config.compare import compare
from ..config.load import LoadedConfig
from ..counted import counted
from ..environment.hardware import detect
from ..errors import UsageError
from ..model.build import resolve_precision
from ..runs.checkpoint.snapshot import rows_here
from ..runs.folder import RESOLVED, RunFolder
from .console import RunConsole
from .loop import Loop
from .resume_record import Changed, to_come, went_on
from .same_settings import say_edited, settings_before
from .task import Task


def compare_with_before(loaded: LoadedConfig, task: Task, folder: RunFolder, console: RunConsole) -> list[Changed]:
    """The differences from the configuration that the run was started with, printed too. Refuses those that would make it another run."""
    preset = resolve_precision(loaded.config, loaded.sources, detect(loaded.config.model.device), task.roles).preset
    changes = compare(settings_before(folder), loaded.config, auto=preset)
    begun = {change.get("what") for change in to_come(folder)}
    edited = [c.key for c in changes if c.key not in loaded.given and str(c) not in begun]
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
    say_edited(folder, console)
    return [Changed("settings", str(change)) for change in changes]


def refuse_fewer_steps(loop: Loop) -> None:
    """Raises UsageError where the run has made more steps than it is to have: its settings would be untrue."""
    if max(loop.store.steps(), default=0) <= loop.plan.total:
        return
    made = loop.store.newest_whole()[0] or 0  # a damaged checkpoint is none: the run goes on from the one before it
    if made > loop.plan.total:
        raise UsageError(
            f"train.steps: {loop.plan.total}, and the run has made {counted(made, 'step')}",
            fix=f"more than {made} to go on; for a shorter run, give another folder",
        )


def restore(loop: Loop, console: RunConsole) -> None:
    """Restores the newest whole checkpoint, or begins at step 1 where there is none. Says which."""
    world = loop.world
    step, passed = world.first_does(loop.store.newest_whole)
    for reason in passed:
        console.say(f"resume    {reason}: passed over")
    if step is None:
        if world.first:
            loop.store.tidy(None)
            loop.metrics.cut_after(-1)
            went_on(loop.folder, None)
        console.say("resume    no whole checkpoint: starting from the beginning")
        return
    wrote = loop.restore(loop.store.load(step, rows_here(loop.model)))
    if world.first:
        went_on(loop.folder, step)
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
