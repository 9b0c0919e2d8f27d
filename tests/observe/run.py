"""Programs (a model, and what is done to it), run as the training loop does: which steps are
watched, and what is looked at in them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from isotype.config.schema import TrainSection
from isotype.observe import Observation, Observer, is_observed
from isotype.precision import PRESETS
from isotype.precision.apply import apply_precision
from isotype.precision.precision import Precision
from isotype.tasks.language.batches import collate
from isotype.tasks.language.objective import batch_loss_sum
from tests.api import assemble_stepper
from tests.models import rows

BATCH = collate(rows(2), pad_id=0)
RATE = 1e-3
PROGRAMS: dict[str, Program] = {}


@dataclass
class Program:
    """`build` makes the model; `prepare` gets the run (model, stepper) before its first step,
    `before_step` before each step.

    preset   the declaration
    steps    how many steps the run has
    """

    name: str
    build: Callable[[], nn.Module]
    preset: str = "bf16-mixed"
    steps: int = 1
    prepare: Callable[[Any], None] = lambda run: None
    before_step: Callable[[Any, int], None] = lambda run, step: None


def program(name: str, build: Callable[[], nn.Module], **settings: Any) -> None:
    assert name not in PROGRAMS, name
    PROGRAMS[name] = Program(name, build, **settings)


@dataclass
class Run:
    """A model under its precision, and the stepper that trains it; `loss` replaces the loop's own."""

    model: nn.Module
    stepper: Any
    observer: Observer
    loss: Any = None


def set_up(
    model: nn.Module, precision: Precision, *, optimizer: str = "adamw", apply: bool = True
) -> Run:
    if apply:
        apply_precision(model, precision, device_type="cpu")
    train = TrainSection(learning_rate=RATE, optimizer=optimizer)
    stepper = assemble_stepper(
        model, train, precision, partial(batch_loss_sum, dtype=precision.loss)
    )
    return Run(model, stepper, Observer(model, precision))


def watched_step(run: Run, step: int, batches: Any = (BATCH,)) -> Observation:
    stepper = run.stepper
    with run.observer.watch(
        step, optimizer=stepper.optimizer, gradient=stepper.accumulator.gradient
    ) as seen:
        stepper(list(batches), step=step, learning_rate=RATE, watch_changes=True)
    run.observer.observe_loss(seen, stepper.loss_dtype)
    return seen


def observed(program: Program) -> list[Observation]:
    """What every look of the program's run saw."""
    run = set_up(program.build(), PRESETS[program.preset])
    program.prepare(run)
    if run.loss is not None:
        run.stepper.loss_sum = lambda m, b, divisor: (
            run.loss(m(**b.inputs).logits[:, :-1], b.labels[:, 1:]) / divisor
        )
    looks = []
    for step in range(1, program.steps + 1):
        program.before_step(run, step)
        if is_observed(step, every=100, seed=0, total=program.steps) or run.observer.has_changed():
            looks.append(watched_step(run, step))
        else:
            run.stepper([BATCH], step=step, learning_rate=RATE, watch_changes=False)
    return looks
