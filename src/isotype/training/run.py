"""Implements `train`, which runs a training. A training begins with a loaded configuration and ends
with a verified adapter or model in the run folder.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..config.load import LoadedConfig
from ..distributed.agree import (
    MODEL_SETTINGS,
    configuration_lines,
    refuse_differences,
    refuse_folder_of_another_machine,
    versions,
)
from ..distributed.world import World, join
from ..environment.hardware import out_of_memory_message
from ..errors import IsotypeError, PreflightError, RunError, UsageError
from ..observe.record import GENERATION
from ..optimize.place import note_wrong_kernels
from ..runs.checkpoint.atomic_folder import describe_io_error, suggest_fix
from ..runs.checkpoint.store import CheckpointStore
from ..runs.folder import LOG, RESOLVED, RunFolder, default_run_name, refuse_remote_code
from ..runs.mapped_files import MAPPED_RECORD
from .base import model_settings, setting_lines
from .callbacks import Callback, Objective, objective_name
from .console import Interrupt, RunConsole, quiet_libraries
from .finish import finish, print_result
from .fp16_range import choose_fp32_layers
from .header import detail_rows, details_hint, header_rows
from .loop import Loop
from .memory.device import memory_saving_advice, trim_freed_blocks
from .preflight.check import PREFLIGHT_FILE, Outcome, preflight
from .preflight.rehearsal import time_longest_batch
from .run_state import last_good_checkpoint
from .setup import PreflightSubject, Prepared, Trial, prepare
from .start import (
    RunChange,
    compare_base,
    compare_data,
    compare_objectives,
    compare_settings,
    record_resume,
    refuse_fewer_steps,
    report_truncated_files,
    restore_checkpoint,
    write_start,
)
from .task import Task
from .trackers import Trackers

INTERRUPTED_STATUS = 130  # exit status of a run that was stopped by Ctrl-C and saved


def train(
    loaded: LoadedConfig,
    task: Task,
    *,
    resume: Path | None = None,
    console: RunConsole | None = None,
    skips: Mapping[str, str] | None = None,
    callbacks: Sequence[Callback] = (),
    objective: Objective | None = None,
) -> int:
    """Trains to the end and returns the exit status. On Ctrl-C, saves a checkpoint and returns 130.
    Raises IsotypeError.

    task       the task of this configuration (`isotype.tasks.choose`)
    console    shows the progress and receives the result (`RunConsole.report_result`)
    skips      the checks of the preflight to leave out, as a mapping from code to reason
    callbacks  called after steps, evaluations, saves and samples
    objective  a function that computes the sum of the losses of a micro-batch; training uses it in
               place of the task's function, but evaluation still uses the task's function

    Every process of a run calls this function. All processes return the same status or raise the
    same error. Only one of them prints the error; in the other processes, the attribute
    `is_shown_elsewhere` of the error is true.
    """
    world = join(loaded.config.model.device, timeout=loaded.config.parallel.timeout)
    try:
        return _TrainingRun(
            loaded, task, world, console or RunConsole(), resume, skips or {}, callbacks, objective
        ).run()
    except BaseException as error:
        world.report_failure(error)
        if isinstance(error, IsotypeError):
            error.is_shown_elsewhere = not world.prints_errors
        raise
    finally:
        world.close()


class _TrainingRun:
    """One call of `train`. The method `run` locks the folder and adds explanations to errors. It
    calls the method `_train`, which trains the model.
    """

    def __init__(
        self,
        loaded: LoadedConfig,
        task: Task,
        world: World,
        console: RunConsole,
        resume: Path | None,
        skips: Mapping[str, str],
        callbacks: Sequence[Callback],
        objective: Objective | None,
    ) -> None:
        self.loaded = loaded
        self.config = loaded.config
        self.task = task
        self.world = world
        self.console = console
        self.skips = skips
        self.callbacks = callbacks
        self.objective = objective
        self.resume = resume
        self.is_resuming = resume is not None
        self.interrupt = Interrupt()

    def run(self) -> int:
        world = self.world
        console = self.console
        if not world.is_first:
            console.silence()
        # the name may contain the time: all processes use the name that the first process makes
        self.folder = folder = RunFolder(Path(world.run_on_first(self._folder_path)))
        if self.resume is not None:
            if not folder.is_run:
                raise UsageError(f"--resume {self.resume}: no {RESOLVED} there: not a run folder")
            refuse_remote_code(self.loaded, self.resume)
        with folder.lock() if world.is_first else contextlib.nullcontext(), self.interrupt, console:
            refuse_folder_of_another_machine(world, folder.path)
            if not self.is_resuming and folder.is_run:
                fix = f"isotype train --resume {folder.path}, or give another folder"
                raise UsageError(f"run.folder: {folder.path} has a run already", fix=fix)
            changes: list[RunChange] = []
            if self.is_resuming:
                if world.is_first:
                    report_truncated_files(folder, console)
                changes += compare_settings(self.loaded, self.task, folder, console, world)
                changes += compare_objectives(
                    self.loaded, objective_name(self.objective), folder, console
                )
            try:
                status, result = self._train(changes)
            except KeyboardInterrupt:
                console.end_live_line()
                world.report_failure(KeyboardInterrupt())
                status = INTERRUPTED_STATUS
                result = self._record_immediate_stop()
            except PreflightError:
                # training has not begun: the folder holds only the preflight's record, and the same
                # command may run again
                if world.is_first:
                    record = folder.read_json(PREFLIGHT_FILE)
                    console.report_result(
                        {"status": "refused", "folder": str(folder.path), "preflight": record}
                    )
                raise
            except Exception as error:
                console.end_live_line()
                explained = self._explain_error(error)
                # a refused resume leaves the result of the run as it was
                is_refused = self.is_resuming and isinstance(explained, UsageError)
                if folder.is_run and world.is_first and not is_refused:
                    result = {
                        "status": "failed",
                        "error": str(explained),
                        "folder": str(folder.path),
                    }
                    # on a full disk the error itself matters more than its record
                    with contextlib.suppress(RunError):
                        folder.write_json("result.json", result)
                    self._write_report()
                if explained is error:
                    raise
                raise explained from error
        console.report_result(result)
        return status

    def _folder_path(self) -> str:
        if self.resume is not None:
            return str(self.resume)
        return self.config.run.folder.replace("{name}", default_run_name(self.config))

    def _train(self, changes: list[RunChange]) -> tuple[int, dict[str, Any]]:
        folder = self.folder
        console = self.console
        world = self.world
        quiet_libraries()
        prepared = prepare(self.task, self.loaded.sources, folder.base, world)
        self._compare_processes(prepared)
        if self.is_resuming and world.is_first:
            base_changes = compare_base(self.loaded, prepared, folder, console, changes)
            changes = [*changes, *base_changes]
        self._check_callbacks(prepared)
        self._set_objective(prepared)
        loop = Loop(self.task, prepared, folder, console, callbacks=self.callbacks, world=world)
        outcome, rehearsals, trial = self._run_preflight(loop, prepared)
        note_wrong_kernels(prepared.manifest)
        step: int | None = None
        unusable_checkpoints: list[str] = []
        if self.is_resuming:
            step, unusable_checkpoints = loop.store.find_newest_intact(world)
            refuse_fewer_steps(loop, step)
            self._record_resume(step, changes)
        self._write_start(loop, prepared)
        if world.is_first:
            folder.write_json(MAPPED_RECORD, loop.mapped_files.sizes())
        console.start_log(folder.path / LOG)
        self._print_headers(loop, prepared, outcome, trial)
        loop.precision_record.set_watched_phases(rehearsals)
        if self.is_resuming:
            for reason in unusable_checkpoints:
                console.print_line(f"resume    {reason}: passed over")
            restore_checkpoint(loop, step, console)
        if world.is_first and self.config.run.trackers:
            loop.trackers = Trackers(
                self.config.run.trackers,
                folder.path,
                self.config.model_dump(),
                console.print_line,
            )
        status = 1
        try:
            status, result = self._train_to_end(loop, prepared)
        finally:
            loop.mapped_files.close()
            if loop.trackers is not None:
                loop.trackers.close(status)
        return status, result

    def _compare_processes(self, prepared: Prepared) -> None:
        """Raises an error if a process has other versions, settings, data or weights than the first
        process.
        """
        if self.world.size == 1:
            return
        refuse_differences(
            self.world,
            versions=versions(),
            configuration=configuration_lines(self.config),
            data=str(self.task.fingerprints()),
            weights=prepared.weights_fingerprint,
            **{MODEL_SETTINGS: setting_lines(model_settings(prepared.model))},
        )

    def _check_callbacks(self, prepared: Prepared) -> None:
        if self.callbacks and prepared.sharding is not None:
            message = (
                "callbacks are called by the first process, which has only a part of a shared model"
            )
            raise UsageError(message, fix="parallel.kind: replicate")

    def _set_objective(self, prepared: Prepared) -> None:
        """Makes each step use the user's objective as its loss."""
        if self.objective is None:
            return
        objective = self.objective

        def loss_sum(model: nn.Module, batch: Any, divisor: int = 1) -> Tensor:
            return objective(model, batch) / divisor

        prepared.stepper.loss_sum = loss_sum

    def _run_preflight(self, loop: Loop, prepared: Prepared) -> tuple[Outcome, list[str], Trial]:
        """Runs the checks before step 1. Returns the outcome of the checks, the names of the trial
        steps, evaluations and samples whose dtypes were recorded, and the measurements of the trial
        step. The `PreflightSubject` refers to the model, so this method does not keep it. Otherwise
        `finish` could not free the model.
        """
        self.world.record_progress(0, "the preflight")
        subject = PreflightSubject(
            config=self.config,
            task=self.task,
            prepared=prepared,
            schedule=loop.schedule,
            folder=self.folder.path,
            is_resuming=self.is_resuming,
            micro_batch=prepared.batching.micro_batch_size,
            observer=loop.observer,
        )
        with self.world.explain_exchange_errors():
            if note := choose_fp32_layers(subject, self.folder):
                prepared.manifest.notes.append(note)
            outcome = preflight(subject, self.skips, world=self.world)
        loop.rehearsed_generation = subject.observations.get(GENERATION)
        if subject.trial.peak_bytes:
            time_longest_batch(subject)
        if prepared.device.type == "cpu":
            trim_freed_blocks()
        return outcome, list(subject.observations), subject.trial

    def _record_resume(self, step: int | None, changes: list[RunChange]) -> None:
        """Records the step from which the run resumes, and the changes since the last start."""
        if self.world.is_first:
            data_changes = compare_data(self.loaded, self.task, self.folder, self.console, changes)
            changes = [*changes, *data_changes]
        self.world.run_on_first(lambda: record_resume(self.folder, step, changes))

    def _write_start(self, loop: Loop, prepared: Prepared) -> None:
        """Writes the files that describe the run. Only the first process writes these files."""
        self.world.run_on_first(
            lambda: write_start(
                self.loaded,
                self.task,
                prepared,
                loop.schedule,
                self.folder,
                self.world,
                objective_name(self.objective),
                is_resuming=self.is_resuming,
            )
        )

    def _print_headers(
        self, loop: Loop, prepared: Prepared, outcome: Outcome, trial: Trial
    ) -> None:
        """Prints the header. Then calls the task's method `prepare_training`, which returns more
        rows for the header.
        """
        rows = header_rows(self.task, prepared, loop.schedule, self.folder, self.world, trial)
        name = objective_name(self.objective)
        if name is not None:
            text = f"{name} instead of the loss of the task, which evaluation keeps"
            rows.append(("objective", text))
        self.console.print_header([*rows, *outcome.header_rows()])
        self.console.print_details(detail_rows(self.task, prepared), details_hint(self.folder))
        with self.world.explain_exchange_errors():
            task_rows = self.task.prepare_training(
                prepared.model,
                prepared.device,
                self.folder.path,
                self.world,
                dtype=prepared.resolved.precision.loss,
            )
            self.console.print_header(task_rows)

    def _train_to_end(self, loop: Loop, prepared: Prepared) -> tuple[int, dict[str, Any]]:
        """Trains to the end and writes the result. If the run is interrupted, prints how to resume
        it.
        """
        folder = self.folder
        console = self.console
        first = self.world.is_first
        if not loop.run(self.interrupt):
            step = loop.progress.step
            result = {"status": "interrupted", "folder": str(folder.path), "steps": step}
            if first:
                folder.write_json("result.json", result)
                console.print_line(
                    f"interrupted: saved at step {step}. Continue with: isotype train --resume"
                    f" {folder.path}"
                )
                # a second Ctrl-C may end this: the run is saved, and the report can be made later
                with contextlib.suppress(KeyboardInterrupt):
                    self._write_report()
            return INTERRUPTED_STATUS, result
        try:
            result = finish(loop, prepared)
        except RunError as error:
            raise loop.add_last_good_checkpoint(error) from error
        if first:
            folder.write_json("result.json", result)
            print_result(result, console, has_eval_rows=bool(self.task.eval_rows))
            if report_path := self._write_report():
                result["report"] = report_path
        return 0, result

    def _record_immediate_stop(self) -> dict[str, Any]:
        """Returns the result of a run that stopped without saving. A run stops in this way before
        step 1, after a second Ctrl-C, or if a callback raised KeyboardInterrupt.
        """
        folder = self.folder
        console = self.console
        step, _ = CheckpointStore(folder.checkpoints).find_newest_intact()
        if not folder.is_run:
            console.print_line(
                "interrupted before step 1: nothing was begun, and the same command starts again"
            )
        else:
            if step is not None:
                checkpoint_text = f"the last checkpoint is step {step}"
            else:
                checkpoint_text = "there was no checkpoint yet"
            if self.interrupt.is_training:
                message = "interrupted at once, without a save"
            else:
                message = "interrupted before it continued"
            console.print_line(
                f"{message}: {checkpoint_text}. Continue with: isotype train --resume {folder.path}"
            )
        result = {"status": "interrupted", "folder": str(folder.path), "steps": step}
        # an existing result.json is the one of the last start, or of this start if it has ended
        if folder.is_run and self.world.is_first and not (folder.path / "result.json").exists():
            # an error of the disk must not replace the interrupt
            with contextlib.suppress(RunError):
                folder.write_json("result.json", result)
        return result

    def _explain_error(self, error: Exception) -> Exception:
        """If memory or the disk caused the error, returns an error that says what to do. An error
        of the disk becomes RunError CK001 if the file is in the run's folder, and UsageError if it
        is elsewhere. Other errors are returned unchanged.
        """
        if (missing_memory := out_of_memory_message(error)) is not None:
            advice = memory_saving_advice(self.config, self.config.train.gradient_checkpointing)
            return RunError(f"out of memory: {missing_memory}", fix=advice)
        folder = self.folder
        reason = describe_io_error(error)
        fix = "start it again; a folder that was renamed: isotype train --resume ITS_NEW_NAME"
        missing_folder = RunError(f"{folder.path}: the run's folder is gone", code="CK001", fix=fix)
        if isinstance(error, IsotypeError):
            if error.code == "CK001" and not folder.path.is_dir():
                return missing_folder
            return error
        if reason is None:
            return error
        name = str(error.filename) if isinstance(error, OSError) and error.filename else ""
        if name and not Path(name).absolute().is_relative_to(folder.path.absolute()):
            return UsageError(f"{name[:200]}: {reason}")
        if not folder.path.is_dir():
            return missing_folder
        checkpoint_text = last_good_checkpoint(CheckpointStore(folder.checkpoints))
        message = f"{name}: {reason}" if name else reason
        return RunError(
            f"{message}\n  saved     {checkpoint_text}",
            code="CK001",
            fix=f"{suggest_fix(reason)}, then resume",
        )

    def _write_report(self) -> str | None:
        """Writes the report and returns its path. If this fails, the error is only printed, because
        it must not hide that the run is complete or why the run failed.
        """
        if not self.config.run.report:
            return None
        from ..report import write_report

        try:
            report_path = str(write_report(self.folder.path))
        except Exception as error:
            self.console.print_line(
                f"warning   no report: {error}; isotype report {self.folder.path} makes it"
            )
            return None
        self.console.print_line(f"report    {report_path}")
        return report_path
