"""`train`: one run from a loaded configuration to a verified adapter in its folder."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..config.load import LoadedConfig
from ..config.schema import RunConfig
from ..distributed.agree import (
    lines_of,
    refuse_differences,
    refuse_folder_of_another_machine,
    refuse_other_precision,
    versions,
)
from ..distributed.seat import asked_but_not_started
from ..distributed.world import World, join
from ..environment.hardware import measured_matmul_peak
from ..environment.out_of_memory import out_of_memory
from ..errors import IsotypeError, PreflightError, RunError, UsageError
from ..interrupted import leaving, said
from ..precision.observe import Observer
from ..runs.checkpoint.store import CheckpointStore
from ..runs.folder import RESOLVED, RunFolder, name_of, refuse_code_of
from .callbacks import Callback
from .compiling import compile_ahead
from .console import RunConsole
from .contention import contention
from .disk_errors import refused_by_disk
from .finish import finish
from .interrupt import Interrupt
from .loop import Loop
from .memory.advice import less_memory
from .milestones import Milestones
from .own_code import Objective, Own, compare_objectives
from .own_state import modules_of_own_code, own_state_restored
from .preflight.check import RECORD, preflight
from .preflight.subject import Subject
from .quiet import quiet_libraries
from .resume import compare_with_before, refuse_fewer_steps, restore
from .resume_record import Changed, keep_changes
from .same_data import compare_data
from .setup import Prepared, prepare
from .start_files import write_start
from .summary import header_rows, say_result
from .task import Task
from .trackers.available import refuse_missing
from .trackers.trackers import start

INTERRUPTED = 130


_TRAINS = threading.RLock()  # a callback may start a run of its own in the same thread


def train(
    loaded: LoadedConfig, task: Task, *, resume: Path | None = None, console: RunConsole | None = None,
    skips: Mapping[str, str] | None = None, callbacks: Sequence[Callback] = (), objective: Objective | None = None,
) -> int:  # fmt: skip
    """Runs to the end, or saves and returns 130 on Ctrl-C. Raises IsotypeError; returns the exit status.

    task       the kind of run, of the same configuration (`isotype.tasks.choose`)
    console    shows the progress, and gets the result (`RunConsole.ended`)
    skips      checks of the preflight to leave out, code to reason
    callbacks  called after steps, evaluations, saves and samples
    objective  computes the summed losses of a micro-batch instead of the task's function; evaluation still uses the task's

    Every process of a run calls it. All return the same status or raise the same error; one of them shows it (`shown_elsewhere`).
    One thread of a process trains at a time; another gets a UsageError.
    """
    if not _TRAINS.acquire(blocking=False):
        raise UsageError(
            "another thread of this process trains: random state and PyTorch's settings are the process's, and both runs would differ from "
            "the same runs alone",
            fix="start each run in a process of its own (multiprocessing with spawn, or isotype train), or one after the other",
        )
    try:
        return _joined(loaded, task, resume=resume, console=console, skips=skips, callbacks=callbacks, objective=objective)
    finally:
        _TRAINS.release()


def _joined(
    loaded: LoadedConfig, task: Task, *, resume: Path | None, console: RunConsole | None, skips: Mapping[str, str] | None,
    callbacks: Sequence[Callback], objective: Objective | None,
) -> int:  # fmt: skip
    world = join(loaded.config.model.device, timeout=loaded.config.parallel.timeout)
    try:
        shown = console or RunConsole()
        return _train(loaded, task, world, shown, resume=resume, skips=skips or {}, own=Own(callbacks, objective))
    except BaseException as error:
        world.failed(error)
        if isinstance(error, IsotypeError):
            error.shown_elsewhere = not world.speaks
        raise
    finally:
        world.close()


def _train(
    loaded: LoadedConfig, task: Task, world: World, console: RunConsole, *, resume: Path | None, skips: Mapping[str, str], own: Own
) -> int:
    if not world.first:
        console.silence()
    refuse_missing(loaded.config.run.trackers)
    folder = RunFolder(Path(world.first_does(lambda: str(run_folder(loaded, resume).path))))
    if resume is not None and not folder.is_run:
        raise UsageError(f"--resume {resume}: no {RESOLVED} there: not a run folder")
    if resume is not None:
        refuse_code_of(loaded, resume)
    with (
        folder.held() if world.first else contextlib.nullcontext(),
        # what is handled below says it itself
        leaving(f"isotype train --resume {folder.path} goes on from the last checkpoint, if the run was begun"),
        Interrupt() as interrupt,
        console,
    ):
        refuse_folder_of_another_machine(world, folder.path)
        if resume is None and folder.is_run:
            raise UsageError(
                f"run.folder: {folder.path} has a run already", fix=f"isotype train --resume {folder.path}, or give another folder"
            )
        changes = None
        if resume is not None:
            changes = [*compare_with_before(loaded, task, folder, console), *compare_objectives(loaded, own, folder, console)]
        try:
            status, result = _run(loaded, task, folder, console, interrupt, world, changes=changes, skips=skips, own=own)
        except KeyboardInterrupt:
            console.settle()
            world.failed(KeyboardInterrupt())
            status, result = INTERRUPTED, _stopped_at_once(folder, console, world, trained=interrupt.training)
        except PreflightError:
            # nothing was started: the folder holds only the record, and the same command may be given again
            if world.first:
                console.ended({"status": "refused", "folder": str(folder.path), "preflight": folder.read_json(RECORD)})
            raise
        except Exception as error:
            console.settle()
            told = refused_by_disk(error, folder)
            if (missing := out_of_memory(error)) is not None:
                on = "cuda" if isinstance(error, torch.OutOfMemoryError) else "cpu"
                how = less_memory(loaded.config, loaded.config.train.gradient_checkpointing, device_type=on)
                told = RunError(f"out of memory: {missing}", fix=how)
            if folder.is_run and world.first:
                with contextlib.suppress(RunError):  # on a full disk the error itself matters more than its record
                    folder.write_json("result.json", {"status": "failed", "error": str(told), "folder": str(folder.path)})
                _report_of_unfinished(loaded.config, folder, console)
            if told is error:
                raise
            raise told from error
    console.ended(result)
    return status


def run_folder(loaded: LoadedConfig, resume: Path | None) -> RunFolder:
    """The folder that a run of this configuration uses."""
    return RunFolder(resume or Path(loaded.config.run.folder.replace("{name}", name_of(loaded.config))))


def _stopped_at_once(folder: RunFolder, console: RunConsole, world: World, *, trained: bool) -> dict[str, Any]:
    """The result of a stop without a save: before step 1, by a second Ctrl-C, or by a KeyboardInterrupt that a callback raised."""
    step, _ = CheckpointStore(folder.checkpoints).newest_whole()
    if not folder.is_run:
        console.say("interrupted before step 1: nothing was begun, and the same command starts again")
    else:
        where = f"the last checkpoint is step {step}" if step is not None else "there was no checkpoint yet"
        what = "interrupted at once, without a save" if trained else "interrupted before it went on"
        console.say(f"{what}: {where}. Go on with: isotype train --resume {folder.path}")
    said()
    result = {"status": "interrupted", "folder": str(folder.path), "steps": step}
    # a result that is there is of the part that is resumed, or of this one, which has ended
    if folder.is_run and world.first and not (folder.path / "result.json").exists():
        with contextlib.suppress(RunError):  # as for a failed run: a full disk is not why this one ended
            folder.write_json("result.json", result)
    return result


def _run(
    loaded: LoadedConfig,
    task: Task,
    folder: RunFolder,
    console: RunConsole,
    interrupt: Interrupt,
    world: World,
    *,
    changes: list[Changed] | None,
    skips: Mapping[str, str],
    own: Own,
) -> tuple[int, dict[str, Any]]:
    """changes  what a resumed run changes; None for a new one"""
    config, resuming = loaded.config, changes is not None
    quiet_libraries()
    prepared = prepare(task, loaded.sources, folder.base, world)
    refuse_other_precision(prepared.resolved.precision)
    if world.size > 1:
        refuse_differences(
            world,
            versions=versions(),
            configuration=lines_of(config),
            data=str(task.fingerprints()),
            weights=prepared.fingerprint,
        )
    if own.objective is not None:
        prepared.stepper.loss_sum = own.objective
    if own.callbacks and prepared.sharding is not None:
        raise UsageError(
            "callbacks are called by the first process, which has only a part of a shared model", fix="parallel.kind: replicate"
        )
    loop = _loop(task, prepared, folder, console, world)
    loop.callbacks = own.callbacks
    world.at(0, "the preflight")
    subject = Subject(
        config=config, task=task, prepared=prepared, plan=loop.plan, folder=folder.path, resuming=resuming,
        micro_batch=prepared.passes.rows,
    )  # fmt: skip
    with world.exchanging():
        compile_ahead(subject)
        # of a sharded model the rows move between tensors while it runs
        modules = [] if prepared.sharding is not None else modules_of_own_code(prepared.model)
        with own_state_restored([*modules, own.objective], without=prepared.model.buffers()):
            checked = preflight(subject, skips, world=world)
    if resuming:
        world.first_does(lambda: refuse_fewer_steps(loop))
    if changes is not None:
        known = [*changes, *(compare_data(task, folder, console, changes) if world.first else [])]
        world.first_does(lambda: keep_changes(folder, known))
    world.first_does(lambda: write_start(loaded, task, prepared, loop.plan, folder, world, own, resuming=resuming))
    shared = contention() if prepared.device.type == "cpu" and world.first else None
    rows = [("cores", str(shared))] if shared else []
    if own.objective is not None:
        rows.append(("objective", f"{own.objective_name} instead of the loss of the task, which evaluation keeps"))
    console.header([*header_rows(task, prepared, loop.plan, folder, world), *rows, *checked.header_rows()])
    if world.size == 1 and (note := asked_but_not_started()):
        console.say(f"warning   {note}")
    if resuming:
        restore(loop, console)
    loop.trackers = trackers = start(config.run.trackers if world.first else [], folder.path, config.model_dump(), console.say)
    status = 1
    try:
        status, result = _to_the_end(loop, prepared, config, folder, console, interrupt)
    finally:
        trackers.close(status)
    return status, result


def _to_the_end(
    loop: Loop, prepared: Prepared, config: RunConfig, folder: RunFolder, console: RunConsole, interrupt: Interrupt
) -> tuple[int, dict[str, Any]]:
    """Trains to the end and writes the result, or says how to resume after an interrupt."""
    finished = loop.run(interrupt)
    if not finished:
        step = loop.progress.step
        result = {"status": "interrupted", "folder": str(folder.path), "steps": step}
        if not loop.world.first:
            return INTERRUPTED, result
        folder.write_json("result.json", result)
        console.say(f"interrupted: saved at step {step}. Go on with: isotype train --resume {folder.path}")
        said()
        with contextlib.suppress(KeyboardInterrupt):  # a second one: the run is saved, and the report can be made again
            _report_of_unfinished(config, folder, console)
        return INTERRUPTED, result
    try:
        result = finish(loop, prepared)
    except RunError as error:
        raise loop.with_last_good(error) from error
    if not loop.world.first:
        return 0, result
    folder.write_json("result.json", result)
    if config.run.report:
        from ..report import write_report

        try:
            result["report"] = str(write_report(folder.path).page)
        except Exception as error:  # any error here is only printed: the run is done and verified, and a report can be made again
            console.say(f"warning   no report: {error}; isotype report {folder.path} makes it")
    say_result(result, console)
    return 0, result


def _report_of_unfinished(config: RunConfig, folder: RunFolder, console: RunConsole) -> None:
    """Writes the report of an unfinished run. A full or read-only disk must not hide why the run ended, so errors are only printed."""
    if not config.run.report:
        return
    from ..report import write_report

    try:
        console.say(f"report    {write_report(folder.path).page}")
    except Exception as error:
        console.say(f"report    not written: {error}")


def _loop(task: Task, prepared: Prepared, folder: RunFolder, console: RunConsole, world: World) -> Loop:
    config, precision = task.config, prepared.resolved.precision
    return Loop(
        config=config,
        task=task,
        resolved=prepared.resolved,
        model=prepared.model,
        stepper=prepared.stepper,
        observer=Observer(prepared.model, precision, lora_branch=config.model.lora_branch),
        stream=task.feed(),
        plan=Milestones.of(config, rows=task.rows, eval_rows=task.eval_rows),
        folder=folder,
        store=CheckpointStore(folder.checkpoints, keep=config.run.keep),
        console=console,
        device=prepared.device,
        flops=task.flops(prepared.model),
        peak_flops=measured_matmul_peak(prepared.device.type, precision.compute),
        world=world,
    )
