"""One program: a model and what is done to it, run as the training loop runs a step that is observed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

PROGRAMS: dict[str, Program] = {}


@dataclass
class Program:
    """`build` makes the model; `prepare` gets the run (model, stepper) before its first step, `before_step` before each step.

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
