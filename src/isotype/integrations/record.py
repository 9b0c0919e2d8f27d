"""Writes the files of an attached run to `output_dir/isotype/`. These files have the same format as
the files of a run of `isotype train`, so that the same report can show them.

manifest.json   the settings that decide the precision, ops, messages, and the calls of the first
                step
precision.json  declared and observed dtypes
preflight.json  the checks before step 1
env.json        versions and devices
metrics.jsonl   the trainer's own log
result.json     how the training ended
report.html     all of this on one page

In the first step of a training, the record counts how often fused code runs, and how often other
code runs in its place and why. Dtypes are observed in the first step, in the steps in which
`isotype train` would observe them, and in the step after a change of the model. Counting calls and
observing dtypes does not change the results of the training. The hooks are marked as hooks that
change nothing, so that fused code runs in these steps too.
"""

from __future__ import annotations

import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from ..environment.versions import environment
from ..report.page import write_report
from ..runs.folder import RunFolder
from ..runs.metrics import Metrics
from ..training.memory.device import trim_freed_blocks
from .attachment import Attachment, MethodWrappers
from .monitor import StepMonitor
from .preflight import run_preflight
from .steps import Guards

FOLDER = "isotype"


class Record(TrainerCallback):
    """One trainer's record. It also calls the preflight and the `StepMonitor`."""

    def __init__(
        self, attachment: Attachment, guards: Guards, *, preflight: bool, skip: dict[str, str]
    ) -> None:
        self.attachment = attachment
        self.guards = guards
        self.preflight = preflight
        self.skip = skip
        self.folder = RunFolder(Path(attachment.trainer.args.output_dir) / FOLDER)
        self.metrics: Metrics | None = None  # set in the first process only
        self.monitor: StepMonitor | None = None  # set while the trainer trains
        self.methods = MethodWrappers(attachment.trainer)

    def install(self) -> None:
        self.methods.wrap("_inner_training_loop", self._run_training)
        self.methods.wrap("training_step", self._run_micro_batch)
        self.attachment.trainer.add_callback(self)

    def remove(self) -> None:
        self.methods.restore()
        self.attachment.trainer.remove_callback(self)

    def _run_training(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        finally:
            if self.monitor is not None:  # this runs also after a step that raised
                self.monitor.close()

    def _run_micro_batch(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if self.monitor is not None:
            self.monitor.check_buffers()
        return original(*args, **kwargs)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._started = time.monotonic()
        self.monitor = monitor = StepMonitor(
            self.attachment, partial(self.folder.write_json, "precision.json")
        )
        resuming = state.global_step > 0
        self._logged_rows = len(state.log_history)
        if state.is_world_process_zero:
            self.folder.path.mkdir(parents=True, exist_ok=True)
            self.metrics = Metrics(self.folder.metrics)
            if resuming:
                self.metrics.cut_after(state.global_step)
            else:
                self.folder.metrics.unlink(missing_ok=True)
            self.folder.write_json("env.json", environment())
            self.folder.write_json("plan.json", {"total": state.max_steps})
            self._write_manifest()
        if self.preflight:
            monitor.add_rehearsals(
                run_preflight(
                    self.attachment,
                    self.folder.path,
                    self.skip,
                    monitor.observer,
                    resuming=resuming,
                )
            )
            trim_freed_blocks()
        monitor.start()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.active_monitor.begin(state.global_step + 1)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.active_monitor.check_gradients()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.attachment.trainer.accelerator.optimizer_step_was_skipped:
            self.active_monitor.check_update(self.guards.extra.get("share_changed", 0.0))
        if (observation := self.active_monitor.end()) is not None:
            trim_freed_blocks()
            if state.is_world_process_zero:
                self._write_manifest()
            self.guards.extra["promotions"] = sum(observation.promotions.values())

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.active_monitor.observe_checkpoint(
            Path(args.output_dir) / f"checkpoint-{state.global_step}"
        )

    @property
    def active_monitor(self) -> StepMonitor:
        assert self.monitor is not None, "on_train_begin comes first"
        return self.monitor

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.metrics is None:
            return
        for row in state.log_history[self._logged_rows :]:
            plain = {
                key: value for key, value in row.items() if isinstance(value, int | float | str)
            }
            self.metrics.write(**plain, **({"event": "evaluation"} if "eval_loss" in plain else {}))
        self._logged_rows = len(state.log_history)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        status = "done" if state.global_step >= state.max_steps else "stopped"
        seconds = round(time.monotonic() - self._started, 2)
        self.folder.write_json(
            "result.json",
            {"status": status, "steps": state.global_step, "trained_seconds": seconds},
        )
        try:
            write_report(self.folder.path)
        except Exception as problem:  # a missing report must not fail a finished training
            warnings.warn(f"isotype: no report: {problem}", stacklevel=2)

    def _write_manifest(self) -> None:
        content = self.attachment.to_dict()
        if self.monitor is not None and self.monitor.calls:
            content["first_step"] = [
                {"part": part, "op": op, "calls": count}
                for (part, op), count in sorted(self.monitor.calls.items())
            ]
        self.folder.write_json("manifest.json", content)
