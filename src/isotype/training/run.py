"""`train`: one run from a loaded configuration to a verified adapter in its folder."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..config.compare import compare
from ..config.load import LoadedConfig, load
from ..config.schema import RunConfig
from ..config.write import resolved_yaml
from ..distributed.agree import (
    lines_of,
    refuse_differences,
    refuse_folder_of_another_machine,
    refuse_other_precision,
    versions,
)
from ..distributed.seat import asked_but_not_started
from ..distributed.world import ALONE, World, join
from ..environment.hardware import detect, measured_matmul_peak
from ..environment.versions import environment
from ..errors import IsotypeError, PreflightError, RunError, UsageError
from ..model import attention
from ..model.adapter import trainable_share
from ..precision.observe import Observer
from ..precision.own_part import own_part
from ..runs.checkpoint.atomic_folder import refused
from ..runs.checkpoint.snapshot import rows_here
from ..runs.checkpoint.store import CheckpointStore
from ..runs.folder import RESOLVED, RunFolder, name_of
from ..runs.untrusted import refuse_code_of
from .callbacks import Callback
from .console import RunConsole, duration, size
from .contention import contention
from .finish import finish
from .interrupt import Interrupt
from .loop import Loop
from .memory.device import returns_freed_blocks
from .milestones import Milestones
from .own_code import OBJECTIVE, Objective, Own, compare_objectives
from .preflight.check import RECORD, preflight
from .preflight.subject import Subject
from .quiet import quiet_libraries
from .same_data import DATA, compare_data
from .setup import Prepared, prepare, resolve_precision
from .task import Task
from .trackers.available import refuse_missing
from .trackers.trackers import start

INTERRUPTED = 130
RESUMES = "resumes.json"


def train(
    loaded: LoadedConfig, task: Task, *, resume: Path | None = None, json_output: bool = False,
    skips: Mapping[str, str] | None = None, callbacks: Sequence[Callback] = (), objective: Objective | None = None,
) -> int:  # fmt: skip
    """Runs to the end, or saves and returns 130 on Ctrl-C. Raises IsotypeError; returns the exit status.

    task       the kind of run, of the same configuration (`isotype.tasks.choose`)
    skips      checks of the preflight to leave out, code to reason
    callbacks  called after steps, evaluations, saves and samples
    objective  computes the summed losses of a micro-batch instead of the task's function; evaluation still uses the task's

    Every process of a run calls it. All return the same status or raise the same error; one of them shows it (`shown_elsewhere`).
    """
    world = join(loaded.config.model.device, timeout=loaded.config.parallel.timeout)
    try:
        return _train(loaded, task, world, resume=resume, json_output=json_output, skips=skips or {}, own=Own(callbacks, objective))
    except BaseException as error:
        world.failed(error)
        if isinstance(error, IsotypeError):
            error.shown_elsewhere = not world.speaks
        raise
    finally:
        world.close()


def _train(
    loaded: LoadedConfig, task: Task, world: World, *, resume: Path | None, json_output: bool, skips: Mapping[str, str], own: Own
) -> int:
    refuse_missing(loaded.config.run.trackers)
    folder = RunFolder(Path(world.first_does(lambda: str(run_folder(loaded, resume).path))))
    if resume is not None and not folder.is_run:
        raise UsageError(f"--resume {resume}: no {RESOLVED} there: not a run folder")
    if resume is not None:
        refuse_code_of(loaded, resume)
    with (
        folder.held() if world.first else contextlib.nullcontext(),
        Interrupt() as interrupt,
        RunConsole(json_output=json_output, silent=not world.first) as console,
    ):
        refuse_folder_of_another_machine(world, folder.path)
        if resume is None and folder.is_run:
            raise UsageError(
                f"run.folder: {folder.path} has a run already", fix=f"isotype train --resume {folder.path}, or give another folder"
            )
        if resume is not None:
            _compare_with_before(loaded, task, folder, console)
            compare_objectives(loaded, own, folder, console)
        try:
            status, result = _run(loaded, task, folder, console, interrupt, world, resuming=resume is not None, skips=skips, own=own)
        except torch.OutOfMemoryError as error:
            raise RunError(
                f"out of memory: {str(error).splitlines()[0]}",
                fix="a smaller train.batch_size with more train.accumulate gives the same result; train.gradient_checkpointing: layers",
            ) from error
        except KeyboardInterrupt:
            console.settle()
            world.failed(KeyboardInterrupt())
            status, result = INTERRUPTED, _stopped_at_once(folder, console, trained=interrupt.training)
        except PreflightError:
            # nothing was started: the folder holds only the record, and the same command may be given again
            if json_output and world.first:
                print(json.dumps({"status": "refused", "folder": str(folder.path), "preflight": folder.read_json(RECORD)}))
            raise
        except Exception as error:
            console.settle()
            told = refused_by_disk(error, folder)
            if folder.is_run and world.first:
                with contextlib.suppress(RunError):  # on a full disk the error itself matters more than its record
                    folder.write_json("result.json", {"status": "failed", "error": str(told), "folder": str(folder.path)})
                _report_of_unfinished(loaded.config, folder, console)
            if told is error:
                raise
            raise told from error
    if json_output and world.first:
        print(json.dumps(result))
    return status


def run_folder(loaded: LoadedConfig, resume: Path | None) -> RunFolder:
    """The folder that a run of this configuration uses."""
    return RunFolder(resume or Path(loaded.config.run.folder.replace("{name}", name_of(loaded.config))))


def _stopped_at_once(folder: RunFolder, console: RunConsole, *, trained: bool) -> dict[str, Any]:
    """The result of a stop without a save: before step 1, or by a second Ctrl-C."""
    step, _ = CheckpointStore(folder.checkpoints).newest_whole()
    if not folder.is_run:
        console.say("interrupted before step 1: nothing was begun, and the same command starts again")
    else:
        where = f"the last checkpoint is step {step}" if step is not None else "there was no checkpoint yet"
        what = "interrupted at once, without a save" if trained else "interrupted before it went on"
        console.say(f"{what}: {where}. Go on with: isotype train --resume {folder.path}")
    return {"status": "interrupted", "folder": str(folder.path), "steps": step}


def refused_by_disk(error: Exception, folder: RunFolder) -> Exception:
    """Turns a disk error in the run's folder into CK001 with the last good checkpoint, and one elsewhere into a usage error. Returns other
    errors unchanged."""
    gone = RunError(f"{folder.path}: the run's folder is gone", code="CK001", fix="start the run again")
    if isinstance(error, IsotypeError):
        # a file of the run could not be written, because its folder was removed
        return gone if error.code == "CK001" and not folder.path.is_dir() else error
    reason = refused(error)
    if reason is None:
        return error
    name = str(error.filename) if isinstance(error, OSError) and error.filename else ""
    if name and not Path(name).absolute().is_relative_to(folder.path.absolute()):
        return UsageError(f"{name[:200]}: {reason}")
    step, _ = CheckpointStore(folder.checkpoints).newest_whole()
    good = f"last good checkpoint: {folder.checkpoints / f'step_{step}'}" if step is not None else "there is no checkpoint yet"
    if not folder.path.is_dir():
        return gone
    message = f"{name}: {reason}" if name else reason
    return RunError(f"{message}\n  saved     {good}", code="CK001", fix="free space or make it writable, then resume")


def _run(
    loaded: LoadedConfig,
    task: Task,
    folder: RunFolder,
    console: RunConsole,
    interrupt: Interrupt,
    world: World,
    *,
    resuming: bool,
    skips: Mapping[str, str],
    own: Own,
) -> tuple[int, dict[str, Any]]:
    config = loaded.config
    quiet_libraries()
    prepared = prepare(task, loaded.sources, folder.base, world)
    refuse_other_precision(prepared.resolved.precision)
    if world.size > 1:
        refuse_differences(
            world,
            versions=versions(),
            configuration=lines_of(config),
            data=task.fingerprint(),
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
        checked = preflight(subject, skips, world=world)
    if resuming and world.first:
        compare_data(task, folder, console)
    world.first_does(lambda: _write_start(loaded, task, prepared, loop.plan, folder, world, own, resuming=resuming))
    shared = contention() if prepared.device.type == "cpu" and world.first else None
    said = [("cores", str(shared))] if shared else []
    if own.objective is not None:
        said.append(("objective", f"{own.objective_name} in place of the cross-entropy, which evaluation keeps"))
    console.header([*header_rows(task, prepared, loop.plan, folder, world), *said, *checked.header_rows()])
    if world.size == 1 and (note := asked_but_not_started()):
        console.say(f"warning   {note}")
    if resuming:
        _restore(loop, console)
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
    _say_result(result, console)
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


def _write_start(
    loaded: LoadedConfig, task: Task, prepared: Prepared, plan: Milestones, folder: RunFolder, world: World, own: Own, *, resuming: bool
) -> None:
    """Writes the files that describe the run before its first step; `resolved.yaml` last, since it marks the folder as a run."""
    (folder.path / "result.json").unlink(missing_ok=True)  # of the part that a resumed run goes on from
    if not resuming:
        folder.metrics.unlink(missing_ok=True)
        folder.write_text("config.yaml", loaded.text)  # as given at first; a resumed run reads resolved.yaml
    folder.write_json("env.json", environment())
    folder.write_json("manifest.json", prepared.manifest.to_dict())
    task.begin(folder.path, resuming=resuming)
    for name, content in task.records().items():
        folder.write_json(name, content)
    trainable, total = trainable_share(prepared.model)
    shared: dict[str, Any] = {"processes": world.size, "machines": world.nodes}
    own_parts = {OBJECTIVE: own.objective_name, DATA: task.fingerprint()}
    folder.write_json("plan.json", {**asdict(plan), "task": task.kind, "parameters": total, "trained": trainable, **own_parts, **shared})
    reasons = {f"precision.{role}": reason for role, reason in prepared.resolved.reasons.items()}
    reasons["precision.preset"] = prepared.resolved.why_preset
    values = {f"precision.{role}": value for role, value in prepared.resolved.precision.items()}
    values["precision.preset"] = prepared.resolved.preset
    if loaded.config.model.attention == attention.AUTO and attention.is_known(prepared.model):
        values["model.attention"] = attention.taken(prepared.model)
        reasons["model.attention"] = attention.said(prepared.model, attention.AUTO)
    if loaded.config.train.gradient_checkpointing == "auto":
        settings = prepared.checkpointing.as_settings()
        values |= settings
        reasons |= dict.fromkeys(settings, prepared.checkpointing.reason)
    folder.write_text(RESOLVED, resolved_yaml(loaded, reasons, values))


def _compare_with_before(loaded: LoadedConfig, task: Task, folder: RunFolder, console: RunConsole) -> None:
    """Prints the differences from the configuration that the run was started with, and refuses those that would make it a different run."""
    preset = resolve_precision(loaded.config, loaded.sources, detect(loaded.config.model.device), task.roles).preset
    changes = compare(load(folder.path / RESOLVED, [], {}).config, loaded.config, auto=preset)
    forbidden = [c for c in changes if not c.allowed and not loaded.consent]
    if forbidden:
        raise UsageError(
            "resuming would be another run:\n" + "\n".join(f"  {c}" for c in forbidden),
            fix="resume without these, start a new run, or accept them: --yes",
        )
    for change in changes:
        console.say(f"changed   {change}")


def _restore(loop: Loop, console: RunConsole) -> None:
    world = loop.world
    step, passed = world.first_does(loop.store.newest_whole)
    for reason in passed:
        console.say(f"resume    {reason}: passed over")
    if step is None:
        if world.first:
            loop.store.tidy(None)
            loop.metrics.cut_after(-1)
        console.say("resume    no whole checkpoint: starting from the beginning")
        return
    wrote = loop.restore(loop.store.load(step, rows_here(loop.model)))
    if world.first:
        loop.folder.write_json(RESUMES, {"steps": [*resumed_at(loop.folder.path), step]})
        loop.store.tidy(loop.progress.best_step)
    if wrote != world.size:
        console.say(f"resume    saved by {_processes(wrote)}, goes on with {_processes(world.size)}: the same rows, other draws of dropout")
    done = f", which was the last: train.steps={2 * step} or train.epochs=N goes on" if step >= loop.plan.total else ""
    console.say(f"resume    from step {step}{done}")


def resumed_at(folder: Path) -> list[int]:
    """The steps from which a run was resumed; empty if it never was."""
    try:
        steps = json.loads((folder / RESUMES).read_text(encoding="utf-8"))["steps"]
    except (OSError, ValueError, LookupError, TypeError):
        return []
    return [step for step in steps if type(step) is int] if isinstance(steps, list) else []


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"


def _processes_row(world: World, prepared: Prepared, kind: str) -> list[tuple[str, str]]:
    if world.size == 1:
        return [("processes", f"1: parallel.kind: {kind} has no effect")] if kind in ("shard", "hybrid") else []
    passes = prepared.passes
    where = "on one machine" if world.nodes == 1 else f"on {world.nodes} machines"
    each = f"{len(passes.own)} x {passes.rows} rows of each step"
    return [("processes", f"{world.size} {where}, started by {world.launcher}, {world.backend}: {prepared.parallel}, each computes {each}")]


def header_rows(task: Task, prepared: Prepared, plan: Milestones, folder: RunFolder, world: World = ALONE) -> list[tuple[str, str]]:
    """Environment, model, precision, data, memory and schedule: what will happen, on one screen."""
    config = task.config
    hardware, resolved, train = prepared.hardware, prepared.resolved, config.train
    trainable, total = trainable_share(prepared.model)
    p = resolved.precision
    how = f"{config.adapter.kind} r={config.adapter.r}" if config.adapter.kind != "none" else "every weight"
    weights = sum(own_part(p).numel() * p.element_size() for p in prepared.model.parameters())
    rows = [
        ("run", str(folder.path)),
        ("device", f"{hardware.name}, torch {torch.__version__}"),
        *_processes_row(world, prepared, config.parallel.kind),
        ("model", f"{task.base_name}  {total:,} parameters, {trainable:,} trained ({trainable / total:.2%}, {how})"),
        ("precision", f"{p}  ({resolved.why_preset})"),
        ("", "  ".join(f"{role} {value}" for role, value, _ in resolved.rows())),
        *task.header(),
        *[("ops" if i == 0 else "", line) for i, line in enumerate(prepared.manifest.lines())],
        *([("attention", line)] if (line := attention.said(prepared.model, config.model.attention)) else []),
        ("recompute", str(prepared.checkpointing)),
        (
            "memory",
            f"weights {size(weights)} of {size(hardware.memory)}; isotype plan estimates the peak, each step shows the measured one"
            + ("; freed memory is given back at once, since it may become scarce" if returns_freed_blocks() else ""),
        ),
        (
            "schedule",
            f"{plan.total} steps of {train.batch_size} x {train.accumulate} rows, learning rate {train.learning_rate:g} {train.schedule}",
        ),
    ]
    return [*rows, *[("warning", f"{f.code} {f.message}; {f.fix}") for f in resolved.warnings]]


def _say_result(result: dict[str, Any], console: RunConsole) -> None:
    where = result.get("adapter") or result.get("model")
    best = result.get("best_eval_loss")
    console.say()
    console.say(
        f"done      {result['steps']} steps in {duration(result['trained_seconds'])}"
        + (f", best evaluation loss {best:.4f} at step {result['best_step']}" if best is not None else "")
    )
    console.say(f"saved     {where}")
    console.say(
        f"checked   loaded into a fresh base: loss {result['check']['reloaded_loss']:.4f}, trained {result['check']['trained_loss']:.4f}"
    )
    if "report" in result:
        console.say(f"report    {result['report']}")
