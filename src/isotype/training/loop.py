"""Runs the training loop. The loop does the optimizer steps. Between the steps, it evaluates,
generates samples and writes checkpoints.

`training.setup` prepares everything that the loop needs. A checkpoint stores the loop's `RunState`.
A run that is resumed from this state has bit for bit the same results as a run without an
interruption.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from ..distributed.world import ALONE, World
from ..errors import IsotypeError, RunError, UsageError
from ..lora.attach import observed_formats, set_serving
from ..model.served import served_start
from ..observe import Observation, Observer, is_observed
from ..observe.continuity import (
    Continuity,
    FrozenWeights,
    report_differences,
    report_narrow_values,
)
from ..runs.checkpoint.snapshot import seed_rank
from ..runs.checkpoint.store import Checkpoint, CheckpointStore
from ..runs.folder import RunFolder
from ..runs.mapped_files import MappedFiles
from ..runs.metrics import Metrics
from ..runs.record import PrecisionRecord
from .callbacks import Callback, Moment, run_callbacks
from .console import Interrupt, RunConsole
from .finite import refuse_non_finite_weights
from .memory.device import trim_freed_blocks
from .optimizer import Ema, use_averages
from .result import ResultWriter
from .run_state import RunState, compare_loaded_state, last_good_checkpoint
from .schedule import Pace, RunSchedule, learning_rate
from .setup import Prepared
from .step import StepResult, peak_memory
from .task import AveragedSample, Batch, Evaluation, Feed, Task, load_local_batches
from .trackers import Trackers


class Loop:
    """Trains one run, from its first or its resumed step to its last step."""

    def __init__(
        self,
        task: Task,
        prepared: Prepared,
        folder: RunFolder,
        console: RunConsole,
        *,
        callbacks: Sequence[Callback],
        world: World,
    ) -> None:
        self.task = task
        self.folder = folder
        self.console = console
        self.callbacks = callbacks
        self.world = world
        self.config = config = task.config
        self.resolved = prepared.resolved
        self.model = prepared.model
        self.stepper = prepared.stepper
        self.device = prepared.device
        self.batching = prepared.batching
        precision = self.resolved.precision
        branch = config.model.lora_branch
        self.observer = Observer(self.model, precision, lora_branch=branch)
        if config.run.save == "best" and not task.eval_rows:
            raise UsageError(
                "run.save: best: there are no evaluation rows to choose by",
                fix="data.eval, or a share in data.eval_split; run.save: last",
            )
        self.schedule = RunSchedule.from_config(config, rows=task.rows, eval_rows=task.eval_rows)
        self.store = CheckpointStore(folder.checkpoints, keep=config.run.keep)
        self.metrics = Metrics(folder.metrics)
        self.trackers: Trackers | None = None
        self.precision_record = PrecisionRecord(
            folder, self.resolved, task.roles, lora_branch=branch, is_writer=world.is_first
        )
        # what the preflight observed while it generated a small sample
        self.rehearsed_generation: Observation | None = None
        self.pace = Pace()
        self.saved_step = -1
        self.is_stop_requested = False  # set when a callback asks for it
        if config.train.ema is None:
            self.ema = None
        else:
            self.ema = Ema(self.model, config.train.ema, precision.ema)
        self.stream: Feed[Any] = task.feed()
        self.state = RunState(
            self.model,
            self.stepper,
            self.ema,
            self.stream,
            world,
            self.device,
            self.resolved.text,
            precision.to_dict(),
        )
        self.progress = self.state.progress
        self.result_writer = ResultWriter(
            task, self.model, self.resolved, world, self.stepper.sharding, self.precision_record
        )
        averages = self.ema.averages if self.ema is not None else None
        self.continuity = self.stepper.continuity = Continuity(
            self.model, self.stepper.optimizer, averages
        )
        self.stepper.report_outside_change = self._report_outside_change
        self.frozen_weights = FrozenWeights(self.model)
        self.mapped_files = MappedFiles()

    @property
    def is_stopped_early(self) -> bool:
        """Returns True if early stopping ends the run at this step. Also returns True if the user
        resumes a run that early stopping has already ended.
        """
        patience = self.config.train.patience
        return patience is not None and self.progress.without_gain >= patience

    def run(self, interrupt: Interrupt) -> bool:
        """Trains until the last step. Returns True if the run has reached its end, and False if it
        was interrupted and saved. If a step fails, raises a RunError that names the last good
        checkpoint.
        """
        interrupt.begin()
        self._set_serving(self.progress.step)
        self.continuity.take_sample(
            f"the load of step {self.progress.step}"
            if self.progress.step
            else "the preparation of the run"
        )
        if self.progress.step == 0:
            with self._explain_errors():
                self._evaluate_sample_save(
                    evaluate=True, sample=bool(self.schedule.sample_every), save=False
                )
        while self.progress.step < self.schedule.total and not self.is_stopped_early:
            step = self.progress.step + 1
            with self._explain_errors():
                self._step(step)
                should_stop = self._evaluate_sample_save(
                    evaluate=self.schedule.is_due(self.schedule.eval_every, step),
                    sample=self.schedule.is_due(self.schedule.sample_every, step),
                    save=self.schedule.is_due(self.schedule.save_every, step)
                    or step == self.schedule.total,
                )
            is_interrupted, is_stop_asked = (
                count > 0
                for count in self.world.sum([interrupt.is_requested, self.is_stop_requested])
            )
            if is_interrupted and step < self.schedule.total:
                self.console.end_live_line()
                self.save()
                return False
            if self.schedule.is_adapter_due(step):
                with self._explain_errors():
                    self.save_adapter()
            if should_stop or is_stop_asked:
                # a run that a callback ends is sampled at its last step, but not evaluated: a
                # resumed run then has the metrics of a run that was not stopped
                should_sample = (
                    not should_stop
                    and bool(self.schedule.sample_every)
                    and not self.schedule.is_due(self.schedule.sample_every, step)
                )
                with self._explain_errors():
                    self._evaluate_sample_save(
                        evaluate=False, sample=should_sample, save=self.saved_step != step
                    )
                break
        self.console.end_live_line()
        return True

    @contextmanager
    def _explain_errors(self) -> Iterator[None]:
        """If an error is raised within this block, adds to its message which process failed and
        which checkpoint is the last good one.
        """
        try:
            with self.world.explain_exchange_errors():
                yield
        # UsageError too: a data stream finds an invalid row only when a step reads it
        except (RunError, UsageError) as error:
            raise self.add_last_good_checkpoint(error) from error

    @property
    def model_world(self) -> World:
        """The processes that share the model. All these processes must run each forward pass at the
        same time.
        """
        if self.stepper.sharding is not None:
            return self.world
        return ALONE

    def _is_logged(self, step: int) -> bool:
        return step % self.config.run.log_every == 0 or step in (1, self.schedule.total)

    def _step(self, step: int) -> None:
        train = self.config.train
        run = self.config.run
        self.world.record_progress(step, "a step")
        self.pace.start()
        self._set_serving(step)
        self.model.train()
        is_shared = self.stepper.sharding is not None
        if self.world.size > 1:
            seed_rank(train.seed, step, self.world.rank)
        batches = [
            batch.to(self.device)
            for batch in load_local_batches(
                self.task, self.stream, self.batching, is_shared=is_shared
            )
        ]
        batches = list(
            self.task.prepare_step(
                self.model, batches, self.world, dtype=self.resolved.precision.loss
            )
        )
        # the share of weights that an update changes is read with the next step's loss
        is_logged = self._is_logged(step)
        watches_changes = self._is_logged(step + 1)
        rate = learning_rate(train, step, self.schedule.total)
        self.continuity.compare()
        is_observed_step = is_observed(
            step, every=run.observe_every, seed=train.seed, total=self.schedule.total
        )
        if is_observed_step or self.observer.has_changed():
            result, promotions = self._observed_step(batches, step, rate, watches_changes)
        else:
            result = self.stepper(
                batches, step=step, learning_rate=rate, watch_changes=watches_changes
            )
            promotions = None
        if self.ema is not None and not result.has_overflow:
            self.ema.update(step)
        self.continuity.take_sample(f"the update of step {step}")
        seconds = self.pace.lap()
        self.progress.step = step
        self.progress.position += self.batching.micro_batch_size * self.batching.micro_batches
        self.progress.trained_seconds += seconds
        self.progress.units += result.units
        if not is_logged:
            return
        names = self.task.metric_names
        row = {
            "step": step,
            "loss": result.loss,
            **names.compute_metrics(dict(zip(names.measures, result.measures))),
            "learning_rate": rate,
            "grad_norm": result.gradient_norm if math.isfinite(result.gradient_norm) else None,
            "share_changed": result.share_changed,
            f"{names.units}_per_second": result.units / seconds,
            "seconds": seconds,
            names.units: self.progress.units,
            names.weight: result.weight,
            "epoch": self.stream.epochs,
            "memory_bytes": peak_memory(self.device),
            "promotions": promotions,
            "overflow": result.has_overflow or None,
            "loss_scale": result.loss_scale,
        }
        self._write_metrics(row)
        self.console.print_progress(
            step,
            self.schedule.total,
            row | {"grad_norm": result.gradient_norm},
            self.pace.eta(self.schedule, step),
            names,
        )
        self._run_callbacks("step", row)

    def _set_serving(self, step: int) -> None:
        """Sets whether the layers round their weights to the format of `adapter.serve_as` before
        they multiply by them.
        """
        adapter = self.config.adapter
        if adapter.serve_as is not None:
            is_active = step >= served_start(adapter, self.schedule.total)
            set_serving(self.model, is_active=is_active)

    def _observed_step(
        self, batches: Sequence[Batch], step: int, rate: float, watches_changes: bool
    ) -> tuple[StepResult, int]:
        """Runs a step with hooks on every module. Returns the result of the step and the number of
        outputs whose dtype is wider than the declared dtype. Raises DtypeError if a dtype is not
        the declared one.
        """
        accumulator = self.stepper.accumulator
        optimizer = self.stepper.optimizer
        with self.observer.watch(
            step, optimizer=optimizer, gradient=accumulator.gradient
        ) as observation:
            result = self.stepper(
                batches, step=step, learning_rate=rate, watch_changes=watches_changes
            )
        if self.stepper.loss_dtype is not None:
            self.observer.observe_loss(observation, self.stepper.loss_dtype)
        self.observer.observe_sums(observation, accumulator.sent_dtypes)
        self.observer.observe_task_tensors(
            observation,
            [
                *self.task.observed_dtypes(),
                *(self.ema.observed_dtypes() if self.ema else []),
                *observed_formats(self.model),
            ],
        )
        report_narrow_values(
            observation, self.continuity.find_narrow_updates(), f"after the update of step {step}"
        )
        self.precision_record.add(observation)
        self._refuse_changed_base(step)
        trim_freed_blocks()
        return result, sum(observation.promotions.values())

    def _refuse_changed_base(self, step: int) -> None:
        """Raises RunError CK004 if a file that the run reads has changed since the start of the
        run, or if a frozen weight has changed.
        """
        for path in self.mapped_files.refuse_changes(step):
            self.console.print_line(
                f"warning   {path} was touched; its sampled content is as it was"
            )
        if names := self.frozen_weights.changed():
            rest = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise RunError(
                f"step {step}: {names[0]}{rest} changed, and the run does not train it",
                code="CK004",
                fix="find what writes into it (a callback, a program), then resume",
            )

    def _report_outside_change(self, step: int) -> None:
        """Raises DtypeError DT003 if other code has changed weights, optimizer states or averages
        since the last update, or if it has rounded a buffer.
        """
        observation = Observation(step)
        report_differences(
            observation,
            self.continuity.differences(),
            self.continuity.moment,
            f"step {step}",
            strict=True,
        )
        self.precision_record.add(observation)

    def _run_callbacks(self, name: str, row: Mapping[str, Any]) -> None:
        if self.callbacks and self.world.is_first:
            moment = Moment(
                self.progress.step, self.schedule.total, row, self.model, self.folder.path
            )
            self.is_stop_requested |= run_callbacks(
                self.callbacks, name, moment, self.stepper.optimizer
            )
            self.stepper.accumulator.zero()  # a callback that ran backward has left gradients

    def _write_metrics(self, row: dict[str, Any]) -> None:
        if self.world.is_first:
            self.metrics.write(**row)
            if self.trackers is not None:
                self.trackers.log_row(row)

    def _evaluate_sample_save(self, *, evaluate: bool, sample: bool, save: bool) -> bool:
        """Evaluates, generates samples and saves a checkpoint, each of them only if the schedule
        requires it after this step. Returns True if the run should stop early.
        """
        is_best = should_stop = False
        if evaluate and self.task.eval_rows:
            self.world.record_progress(self.progress.step, "an evaluation")
            with self.pace.pause("evaluation"), use_averages(self.stepper.optimizer):
                is_best, should_stop = self._evaluate()
        if sample and self.task.samples and (self.world.is_first or self.model_world.size > 1):
            self.world.record_progress(self.progress.step, "samples")
            with self.pace.pause("samples"), use_averages(self.stepper.optimizer):
                self._sample()
        if save or is_best or should_stop:
            with self.pace.pause("checkpoint"):
                self.save(is_best=is_best)
        return should_stop

    @cached_property
    def _evaluation_rows(self) -> str:
        stop_metric = self.config.train.stop_on
        rows = self.task.fingerprints()["evaluation"] + (f" {stop_metric}" if stop_metric else "")
        stride = self.schedule.eval_stride
        return rows if stride == 1 else f"{rows} one of {stride}"

    def _evaluate(self) -> tuple[bool, bool]:
        stride = self.schedule.eval_stride
        result = self._evaluate_rows(stride)
        progress = self.progress
        progress.set_evaluation_rows(self._evaluation_rows)
        progress.eval_stride = stride
        stop_metric = self.config.train.stop_on
        compared_loss = result.loss if stop_metric is None else result.losses_by_part[stop_metric]
        is_best = compared_loss < progress.best_loss
        if is_best:
            progress.best_loss = compared_loss
            progress.best_step = progress.step
            progress.without_gain = 0
        else:
            progress.without_gain += 1
        # this loss is not compared with those of other steps, which are on fewer rows
        is_last = progress.step == self.schedule.total or self.is_stopped_early
        whole_result = self._evaluate_rows(1) if stride > 1 and is_last else None
        names = self.task.metric_names
        row = {
            "step": progress.step,
            "event": "evaluation",
            "eval_loss": result.loss,
            f"eval_{names.eval_weight or names.units}": result.weight,
            **{f"eval_loss_{name}": loss for name, loss in result.losses_by_part.items()},
            **{f"eval_{name}": value for name, value in result.measures.items()},
            **({} if whole_result is None else {"whole_eval_loss": whole_result.loss}),
        }
        self._write_metrics(row)
        self.console.end_live_line()
        self.console.print_line(
            f"step {progress.step}/{self.schedule.total}  evaluation loss {result.loss:.4f}"
            + "".join(
                f"  {name} {loss:.4f}"
                for name, loss in result.losses_by_part.items()
                if isinstance(self.config.data.eval, dict)
            )
            + (
                f" (best{'' if stop_metric is None else f' of {stop_metric}'})"
                if is_best and progress.step
                else ""
            )
            + "".join(
                f"  {name} {result.measures[name]:.3g}"
                for name in names.live_line
                if name in result.measures
            )
            + (
                ""
                if whole_result is None
                else f"  all {self.schedule.eval_rows:,} rows {whole_result.loss:.4f}"
            )
        )
        self._run_callbacks("evaluation", row)
        if should_stop := self.is_stopped_early:
            self.console.print_line(
                f"no better evaluation for {progress.without_gain}: stopping early (train.patience)"
            )
        return is_best and progress.step > 0, should_stop

    def _sample(self) -> None:
        # only before step 1, so that a resumed run observes the same as an uninterrupted one
        if self.progress.step == 0:
            self._observe_short_sample()
        samples = list(self.task.sample(self.model, self.device, world=self.model_world))
        if self.ema is not None:
            with self.ema.use_averages():
                samples += map(
                    AveragedSample,
                    self.task.sample(self.model, self.device, world=self.model_world),
                )
        if not self.world.is_first:
            return
        step = self.progress.step
        records = self.folder.write_samples(
            step, [(sample.to_dict(), sample.file) for sample in samples]
        )
        if self.trackers is not None:
            self.trackers.log_samples(step, samples)
        self.console.end_live_line()
        self.console.print_samples(step, samples)
        self._run_callbacks("samples", {"samples": records})

    def _keep_evaluation_rows(self) -> None:
        """Makes a resumed run evaluate the same rows as before, even if its number of steps has
        changed. Some checkpoints do not contain the setting that says which rows an evaluation
        uses. They are from an earlier version of Isotype, which evaluated all rows after each tenth
        of the run.
        """
        evaluated_rows = self.progress.evaluated
        is_default = self.config.train.eval_every is None
        rows = self.task.fingerprints()["evaluation"]
        if not is_default or evaluated_rows is None or not evaluated_rows.startswith(rows):
            return
        if not self.progress.eval_stride:
            self.schedule.eval_every = max(1, math.ceil(self.schedule.total / 10))
        self.schedule.eval_stride = self.progress.eval_stride or 1

    def _evaluate_rows(self, stride: int) -> Evaluation:
        """Evaluates every `stride`-th row. Raises RunError NF001 if the loss is not finite."""
        result = self.task.evaluate(
            self.model,
            self.device,
            dtype=self.resolved.precision.loss,
            stride=stride,
            world=self.world,
        )
        if not math.isfinite(result.loss):
            raise RunError(
                f"step {self.progress.step}: the evaluation loss is not finite",
                code="NF001",
                fix="resume from the last good checkpoint",
            )
        return result

    def _observe_short_sample(self) -> None:
        """Records the dtypes of every operator while one short sample is generated. This is
        sufficient, because the operators are the same for every prompt and every token. To record a
        whole round of samples would be slow: with a model of 24 layers, a round took 14.7 s without
        recording and 104 s with it. If the preflight has generated this sample and the model has not
        changed since then, its observation is recorded.
        """
        observation = self.rehearsed_generation
        if observation is None or self.observer.has_any_change():
            with self.observer.watch(0, role="generate") as observation:
                self.task.sample(self.model, self.device, is_shortened=True, world=self.model_world)
        self.precision_record.add(observation)

    def save(self, *, is_best: bool = False) -> None:
        """Saves a checkpoint. Raises RunError NF001 if a trained weight is not finite, and RunError
        CK001 if the checkpoint cannot be written to the disk.
        """
        if self.saved_step == self.progress.step and not is_best:
            return
        self._refuse_non_finite()
        self._refuse_changed_base(self.progress.step)
        self.world.record_progress(self.progress.step, "a checkpoint")
        checkpoint = self.state.take_checkpoint()
        self.world.run_on_first(self.metrics.sync)
        self.state.write_checkpoint(self.store, checkpoint, is_best=is_best)
        self.saved_step = self.progress.step
        self._run_callbacks("save", {"folder": str(self.store.path(self.progress.step))})

    def _refuse_non_finite(self) -> None:
        train = self.config.train
        refuse_non_finite_weights(
            self.model,
            step=self.progress.step,
            learning_rate=train.learning_rate,
            clip=train.clip,
        )

    def save_adapter(self) -> None:
        """Writes the current adapter to `adapters/step_N`."""
        self._refuse_non_finite()
        self.world.record_progress(self.progress.step, "an adapter")
        with self.pace.pause("checkpoint"), use_averages(self.stepper.optimizer):
            self.result_writer.write_adapter(self.folder, step=self.progress.step)

    def restore(self, checkpoint: Checkpoint) -> int:
        """Restores the state of the run after `checkpoint.step`. Returns how many processes wrote
        the checkpoint.
        """
        self.state.restore_weights(checkpoint)
        try:
            if not self.state.has_optimizer_states(checkpoint):
                self.console.print_line(
                    "resume    the checkpoint has the states of another optimizer"
                    " (train.optimizer): this run's states begin empty"
                )
            processes = self.state.restore_training(checkpoint)
            self.progress = self.state.progress
            if self.task.eval_rows:
                self._keep_evaluation_rows()
                self.progress.set_evaluation_rows(self._evaluation_rows)
        except (
            LookupError,
            TypeError,
            ValueError,
            RuntimeError,
            AttributeError,
            OverflowError,
        ) as error:
            path = self.store.path(checkpoint.step)
            raise RunError(
                f"checkpoint {path}: whole, but not a state of this run: {type(error).__name__}:"
                f" {error}",
                code="CK002",
                fix=f"remove {path} and resume: the one before is taken",
            ) from error
        self.precision_record.restore(self.progress.step)
        self.continuity.take_sample("the load")
        # a resume may change the precision; states of another precision are not compared
        if self.state.has_same_precision(checkpoint):
            self.precision_record.add(compare_loaded_state(self.continuity, checkpoint))
        elif checkpoint.state.get("precision") == self.resolved.text:
            self.console.print_line(
                "note      bf16-pure has bf16 gradients and optimizer states now: the fp32 states of"
                " this checkpoint were rounded"
            )
        self.saved_step = checkpoint.step
        if self.world.is_first:
            self.metrics.cut_after(checkpoint.step)
        return processes

    def add_last_good_checkpoint(self, error: IsotypeError) -> RunError:
        """Adds to the error message the name of the checkpoint from which the run can be resumed."""
        message = f"{error.message}\n  saved     {last_good_checkpoint(self.store)}"
        return RunError(message, code=error.code, fix=error.fix)
