"""`output_dir/isotype/`: the files that an attached run writes, in the form of an Isotype run's files, so that the same report shows them.

manifest.json   owners, ops, notes, and what ran in the first step      precision.json   declared and observed dtypes
preflight.json  the checks before step 1                                env.json         versions and devices
metrics.jsonl   the trainer's own log                                   settings.json    what a resumed run is compared with
result.json     how it ended                                            report.html      all of it on one page
"""

from __future__ import annotations

import json
import time
import warnings
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from ..environment.versions import environment
from ..report.write import write_report
from ..runs.folder import RunFolder
from ..runs.record import Metrics
from .attachment import Attachment
from .first_steps import FirstSteps
from .guards import Guards
from .own_callbacks import OwnCallbacks
from .preflight import run_preflight

FOLDER = "isotype"
# the arguments that decide how a resumed run goes on
COMPARED = (
    "learning_rate", "lr_scheduler_type", "warmup_steps", "warmup_ratio", "weight_decay", "max_grad_norm", "optim",
    "per_device_train_batch_size", "gradient_accumulation_steps", "max_steps", "num_train_epochs", "seed",
)  # fmt: skip


class Record(TrainerCallback):
    """One trainer's record; also where the preflight and the watched first step are called from."""

    def __init__(self, attached: Attachment, guards: Guards, *, preflight: bool, skip: dict[str, str]) -> None:
        self.attached, self.guards, self.preflight, self.skip = attached, guards, preflight, skip
        self.folder = RunFolder(Path(attached.trainer.args.output_dir) / FOLDER)
        self.metrics: Metrics | None = None
        self.first: FirstSteps | None = None
        self.callbacks: OwnCallbacks | None = None
        self._said = 0
        self._warned = 0
        self._started = 0.0

    def install(self) -> None:
        self.attached.trainer.add_callback(self)

    def remove(self) -> None:
        if self.first is not None:
            self.first.stop()
        if self.callbacks is not None:
            self.callbacks.remove()
        self.attached.trainer.remove_callback(self)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._started = time.monotonic()
        self.first = FirstSteps(self.attached)
        if self.callbacks is not None:
            self.callbacks.remove()
        self.callbacks = OwnCallbacks(self.attached, self.first, self._found_in_callbacks)
        self.callbacks.install()
        resuming = state.global_step > 0
        self._said = len(state.log_history)
        if state.is_world_process_zero:
            self.folder.path.mkdir(parents=True, exist_ok=True)
            self._compare(resuming)
            self.metrics = Metrics(self.folder.metrics)
            if resuming:
                self.metrics.cut_after(state.global_step)
            else:
                self.folder.metrics.unlink(missing_ok=True)
            self.folder.write_json("env.json", environment())
            self.folder.write_json("plan.json", {"total": state.max_steps})
            self._write_manifest()
        if self.preflight:
            run_preflight(self.attached, self.folder.path, self.skip, resuming=resuming)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.first is not None:
            self.first.begin(state.global_step + 1)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.first is None or not self.first.watching:
            return
        self.first.end()
        seen = self.first.seen
        if state.is_world_process_zero:
            self._write_manifest()
            self._write_precision()
        if seen is None:
            return
        self.guards.extra["promotions"] = self.first.promotions
        if seen.violations:
            warnings.warn(f"isotype: {seen.violations[0].render()}", stacklevel=2)

    def _write_precision(self) -> None:
        if self.first is not None and self.callbacks is not None:
            self.folder.write_json("precision.json", self.first.precision_json(self.callbacks.seen))

    def _found_in_callbacks(self) -> None:
        if self.attached.trainer.is_world_process_zero():
            self._write_precision()
        violations = self.callbacks.seen.violations if self.callbacks is not None else []
        if violations and not self._warned:
            warnings.warn(f"isotype: {violations[0].render()}", stacklevel=2)
        self._warned = len(violations)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.metrics is None:
            return
        for row in state.log_history[self._said :]:
            plain = {key: value for key, value in row.items() if isinstance(value, int | float | str)}
            self.metrics.write(**plain, **({"event": "evaluation"} if "eval_loss" in plain else {}))
        self._said = len(state.log_history)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        self.finish("done" if state.global_step >= state.max_steps else "stopped", state.global_step)

    def finish(self, status: str, steps: int, error: str | None = None) -> None:
        """result.json and the report. Also called for a step that failed."""
        result = {"status": status, "steps": steps, "trained_seconds": round(time.monotonic() - self._started, 2)}
        self.folder.write_json("result.json", result | ({"error": error} if error else {}))
        try:
            write_report(self.folder.path)
        except Exception as problem:  # a report is worth a line, not a trained model
            warnings.warn(f"isotype: no report: {problem}", stacklevel=2)

    def _write_manifest(self) -> None:
        said = self.attached.to_dict()
        if self.first is not None and self.first.calls:
            said["first_step"] = self.first.calls_json()
        self.folder.write_json("manifest.json", said)

    def _compare(self, resuming: bool) -> None:
        args = self.attached.trainer.args
        now = {name: str(getattr(args, name)) for name in COMPARED if hasattr(args, name)} | {"precision": str(self.attached.precision)}
        if resuming:
            try:
                before = json.loads((self.folder.path / "settings.json").read_text(encoding="utf-8"))
            except (OSError, ValueError):
                before = {}
            for name, value in now.items():
                if isinstance(before, dict) and name in before and before[name] != value:
                    note = f"resumed with {name} {value}; the run began with {before[name]}"
                    self.attached.notes.append(note)
                    warnings.warn(f"isotype: {note}", stacklevel=2)
        self.folder.write_json("settings.json", now)
