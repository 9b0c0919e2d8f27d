"""`attach(trainer, recorder=True)` names the first operator that produced NaN or inf.

The recorder keeps the batches of the current step and the states of the random generators. The
error NF001 stops the training before the weights change. Then the recorder runs the step again with
these batches, operator by operator, in the dtypes of the run and in fp32. It compares the results
of each operator. The first operator whose results differ is named in the error, and in
`output_dir/isotype/not_finite.json`.

An update can also produce NaN from finite gradients. The recorder therefore keeps a copy of the
trained weights of the last good step in host memory. If an update is not finite, the copy is
written back, so that the weights can still be saved.

The recorder is useful if a loss becomes NaN after thousands of steps, as in pytorch issue 182156
and torchtitan issue 3863.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback

from ..doctor.run.not_finite.recorder import NotFiniteError, Recorder
from ..doctor.run.not_finite.replay import preserved_gradients
from ..doctor.run.not_finite.report import explain_step, explain_update
from ..doctor.run.not_finite.step import all_finite
from ..errors import RunError
from ..finding import Finding
from ..optimize.generation import generator_states, set_generator_states
from .attachment import Attachment, MethodWrappers

FILE = "not_finite.json"


@dataclass
class MicroBatch:
    """One call of `training_step`, with the states of the random generators before it."""

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random_state: list[Tensor]


class StepRecorder(TrainerCallback):
    """Keeps the current step of one trainer and the weights of the last good step.

    is_replaying  whether the recorder runs the step again; the checks of the step then raise no
                  error
    """

    def __init__(self, attachment: Attachment) -> None:
        self.attachment = attachment
        self.trainer = attachment.trainer
        self.methods = MethodWrappers(attachment.trainer)
        self.batches: list[MicroBatch] = []
        self.good_weights: list[tuple[nn.Parameter, Tensor]] = []
        self.is_replaying = False

    @property
    def kept_bytes(self) -> int:
        """The number of bytes of host memory that the weights of the last good step take."""
        parameters = (p for p in self.trainer.model.parameters() if p.requires_grad)
        return sum(p.numel() * p.element_size() for p in parameters)

    def install(self) -> None:
        self.methods.wrap("training_step", self._record_batch)
        self.trainer.add_callback(self)

    def remove(self) -> None:
        self.methods.restore()
        self.trainer.remove_callback(self)
        self.batches.clear()
        self.good_weights.clear()

    def _record_batch(
        self, original: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        # training_step may remove entries of the batch
        copied = dict(inputs) if isinstance(inputs, dict) else inputs
        # the other processes do not take part in a replay
        local_model = model.module if isinstance(model, DistributedDataParallel) else model
        arguments = (local_model, copied, *args)
        self.batches.append(MicroBatch(original, arguments, kwargs, generator_states()))
        return original(model, inputs, *args, **kwargs)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.good_weights = [
            (parameter, torch.empty_like(parameter, device="cpu"))
            for parameter in self.trainer.model.parameters()
            if parameter.requires_grad
        ]

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.batches.clear()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for parameter, copy in self.good_weights:
            copy.copy_(parameter.detach())

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if all_finite(parameter for parameter, _ in self.good_weights):
            return
        number = state.global_step + 1
        optimizer = getattr(self.trainer.optimizer, "optimizer", self.trainer.optimizer)
        finding = explain_update(optimizer, number, [self.trainer.model])
        with torch.no_grad():
            for parameter, copy in self.good_weights:
                parameter.copy_(copy)
        error = RunError(
            f"step {number}: the update is not finite; the weights are those of the last good step",
            code="NF001",
            fix=finding.fix,
        )
        self._publish(finding, error)
        raise error

    def explain(self, error: RunError) -> RunError:
        """Runs the current step again, and adds the first operator at fault to the error NF001. The
        error then has the fix for this operator.
        """
        finding = self._find_operator()
        if finding is None:
            return error
        explained = RunError(error.message, code=error.code, fix=finding.fix)
        self._publish(finding, explained)
        return explained

    def _find_operator(self) -> Finding | None:
        recorder = Recorder()
        recorder.number = self.trainer.state.global_step + 1
        with self._replay(), preserved_gradients([self.trainer.model]):
            recorder.install()
            try:
                for batch in self.batches:
                    set_generator_states(batch.random_state)
                    batch.call(*batch.args, **batch.kwargs)
                    if recorder.suspect is not None:
                        suspect = recorder.suspect
                        recorder.uninstall()
                        return explain_step(suspect)
            except NotFiniteError as error:
                return error.finding
            except Exception as error:  # the explanation must not hide NF001
                self.attachment.notes.append(f"the step cannot run again: {error}")
            finally:
                recorder.uninstall()
        return None

    @contextmanager
    def _replay(self) -> Iterator[None]:
        states = generator_states()
        self.is_replaying = True
        try:
            yield
        finally:
            self.is_replaying = False
            set_generator_states(states)

    def _publish(self, finding: Finding, error: RunError) -> None:
        """Adds the report about the operator at fault to the error, and writes it to the folder
        `isotype` of the trainer's output folder.
        """
        error.add_note(finding.render())
        if self.trainer.is_world_process_zero():
            folder = Path(self.trainer.args.output_dir) / "isotype"
            folder.mkdir(parents=True, exist_ok=True)
            text = json.dumps(finding.to_dict(), indent=1)
            (folder / FILE).write_text(text + "\n", encoding="utf-8")
