"""`output_dir/isotype/`: the files that an attached run writes, in the form of an Isotype run's files, so that the same report shows them.

manifest.json   owners, ops, notes, and what ran in the first step      precision.json   declared and observed dtypes
preflight.json  the checks before step 1                                env.json         versions and devices
metrics.jsonl   the trainer's own log                                   result.json      how it ended
report.html     all of it on one page

In the first step of a training fused calls are counted, and others with their reason. Dtypes are observed in that step, in those of the
schedule of `isotype train`, and in the one after a change of the model. Neither changes what is computed: their hooks are marked as
observing, so that fused code runs as in every other step.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainerCallback

from ..config.schema import RunSection
from ..environment.versions import environment
from ..lora.attach import lora_layers, why_not_fused
from ..observe import Observation, Observer, is_observed, observing
from ..observe.record import as_written, noted
from ..optimize.deferred import materialised
from ..optimize.deferred_values import answered
from ..optimize.trl_head import fused_head_of
from ..report.write import write_report
from ..runs.folder import RunFolder
from ..runs.record import Metrics
from .attachment import Attachment, Methods
from .preflight import run_preflight
from .steps import Guards

FOLDER = "isotype"


class Record(TrainerCallback):
    """One trainer's record; also where the preflight and the watched steps are called from."""

    def __init__(self, attached: Attachment, guards: Guards, *, preflight: bool, skip: dict[str, str]) -> None:
        self.attached, self.guards, self.preflight, self.skip = attached, guards, preflight, skip
        self.folder = RunFolder(Path(attached.trainer.args.output_dir) / FOLDER)
        self.metrics: Metrics | None = None
        self.watched: WatchedSteps | None = None
        self.methods = Methods(attached.trainer)
        self._said = 0
        self._started = 0.0

    def install(self) -> None:
        self.attached.trainer.add_callback(self)
        self.methods.wrap("_inner_training_loop", self._training)

    def remove(self) -> None:
        self.methods.restore()
        self.attached.trainer.remove_callback(self)

    def _training(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        finally:
            if self.watched is not None:  # a step that raised ends the watch too
                self.watched.stop()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._started = time.monotonic()
        self.watched = WatchedSteps(self.attached)
        resuming = state.global_step > 0
        self._said = len(state.log_history)
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
            run_preflight(self.attached, self.folder.path, self.skip, resuming=resuming)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.watched is not None:
            self.watched.begin(state.global_step + 1)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.watched is None or (seen := self.watched.end()) is None:
            return
        if state.is_world_process_zero:
            self._write_manifest()
            self.folder.write_json("precision.json", self.watched.precision_json())
        self.guards.extra["promotions"] = sum(seen.promotions.values())
        if seen.violations:
            warnings.warn(f"isotype: {seen.violations[0].render()}", stacklevel=2)

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

    def finish(self, status: str, steps: int) -> None:
        """result.json and the report."""
        result = {"status": status, "steps": steps, "trained_seconds": round(time.monotonic() - self._started, 2)}
        self.folder.write_json("result.json", result)
        try:
            write_report(self.folder.path)
        except Exception as problem:  # a report is worth a line, not a trained model
            warnings.warn(f"isotype: no report: {problem}", stacklevel=2)

    def _write_manifest(self) -> None:
        said = self.attached.to_dict()
        if self.watched is not None and self.watched.calls:
            said["first_step"] = self.watched.calls_json()
        self.folder.write_json("manifest.json", said)


_NO_STEP = "no step of this training ended"
# roles that a run of Isotype's own observes and an attached trainer does not, or not always
_OF_THE_TRAINER = {
    "loss": "the trainer computes it: its operators are judged with the step's, the dtype of the result is not counted",
    "generate": "nothing was generated in the observed steps",
    "save": "the trainer writes its own files, which are not read",
    "what callbacks write": "code between the forward, the backward and the update of a step, and between steps, is not followed",
}
_COUNTED = ("norm", "gated mlp", "rotary", "attention", "4-bit")


class WatchedSteps:
    """Counts calls in the first step of a training. Observes dtypes in the first, in those of the schedule of `isotype train` and in the
    one after a change of the model; every other step costs a comparison of hooks and dtypes."""

    def __init__(self, attached: Attachment) -> None:
        self.attached, self.model = attached, attached.trainer.model
        read_only = [getattr(attached.trainer, name) for name in attached.manifests if name != "model"]
        self.observer = Observer(self.model, attached.precision, read_only=read_only)
        self.calls: Counter[tuple[str, str]] = Counter()
        self.record: dict[str, Any] = {}
        self.steps = 0
        self._seen: Observation | None = None
        self._stack = ExitStack()
        self._hooks: list[Any] = []

    def begin(self, step: int) -> None:
        """At the beginning of a step, whose number is `step`."""
        trainer = self.attached.trainer
        self.steps += 1
        first = self.steps == 1
        drawn = first or is_observed(step, every=RunSection().observe_every, seed=trainer.args.seed, total=trainer.state.max_steps)
        if not drawn and not self.observer.changed():
            return
        if first:
            self._begin_counting()
        # accelerate's optimizer wraps the one whose step is observed
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        self._seen = self._stack.enter_context(self.observer.watch(step, optimizer=optimizer, gradient=self.attached.gradient))

    def _begin_counting(self) -> None:
        for entry in self.attached.manifest.entries:
            if entry.part in _COUNTED:
                self._count(self.model.get_submodule(entry.module), entry.part, entry.op or f"left alone: {entry.reason}")
        for _, layer in lora_layers(self.model):
            self._hooks.append(layer.register_forward_pre_hook(observing(partial(self._count_lora))))
        self._materialised, self._before = Counter(materialised), self._heads()

    def end(self) -> Observation | None:
        """After the update of a step: what was observed in it."""
        seen = self._seen
        if seen is None:
            return None
        self.stop()
        if self.steps == 1:
            for op, count in (self._heads() - self._before).items():
                self.calls["head", op] += count
            for where, count in (Counter(materialised) - self._materialised).items():
                self.calls["head", f"logits computed: {where}"] += count
        earlier = self.record.get("violations", [])
        self.record = noted(self.record, seen)
        self.record["violations"] = earlier + [finding for finding in self.record["violations"] if finding not in earlier]
        return seen

    def stop(self) -> None:
        """Removes every hook."""
        self._seen = None
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._stack.close()

    def _count(self, module: nn.Module, part: str, op: str) -> None:
        def hook(*_: Any) -> None:
            self.calls[part, op] += 1

        self._hooks.append(module.register_forward_pre_hook(observing(hook)))

    def _count_lora(self, layer: nn.Module, args: Any) -> None:
        reason = why_not_fused(layer)
        self.calls["lora", f"PEFT's own code: {reason}" if reason else "lora_linear"] += 1

    def _heads(self) -> Counter[str]:
        found = Counter(answered)
        for module in self.model.modules():
            head = fused_head_of(module)
            found += Counter(
                {op if op == "linear_log_probs" else f"TRL's own code: {op}": n for op, n in head.calls.items()} if head else {}
            )
        return found

    def calls_json(self) -> list[dict[str, Any]]:
        return [{"part": part, "op": op, "calls": n} for (part, op), n in sorted(self.calls.items())]

    def precision_json(self) -> dict[str, Any]:
        """precision.json, as a run of Isotype's own writes it."""
        resolved = self.attached.resolved
        record = self.record or {"places": {"every role": _NO_STEP}}
        return {
            "precision": resolved.text,
            "preset": resolved.preset,
            "declared": resolved.as_json(),
            **as_written(record, compute=resolved.precision.compute, more=self._unseen()),
        }

    def _unseen(self) -> dict[str, str]:
        """The reason for each role, and each model beside the trained one, of which nothing is counted."""
        reasons = dict(_OF_THE_TRAINER)
        if not self.record:
            reasons["generate"] = _NO_STEP
        if self.attached.trainer.args.world_size > 1:
            reasons["reduce"] = "DDP and FSDP sum gradients in C++, below what is observed"
        if all(p.requires_grad for p in self.model.parameters()):
            reasons["base"] = "every weight is trained"
        for name in self.attached.manifests:
            if name != "model":
                reasons[f"the weights of {name}"] = "they are not counted; what is computed with them is judged with the step's"
        return reasons
