"""`model.generate` in the middle of training: the same tokens as outside it, and nothing left behind.

Three things make a callback's generation and the training around it disturb each other. Sampling draws from the generators that dropout
and the data's order draw from: inside a trainer's loop it gets a stream of its own. A layer under gradient checkpointing and in training
mode throws the cache away, and then sees one token without its past: checkpointing rests while tokens are made. What bitsandbytes does to
4-bit weights in evaluation mode is `linear_4bit`'s to prevent.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ..precision.apply import inner_model

_LOOPS = {"transformers.trainer"}  # modules whose functions call callbacks between steps; TRL's trainers run in this one too
_STREAM = "_isotype_generation"


class Stream:
    """The generators' states for sampling inside training.

    left      the state that training was left with after the last generation
    went_on   where that generation's own draws ended
    Two generations with no training between continue one stream, as they would anywhere; a new seed, or a training step, starts a new one
    from the generators as they are.
    """

    def __init__(self) -> None:
        self.left: list[Tensor] = []
        self.went_on: list[Tensor] = []

    def __deepcopy__(self, memo: Any) -> Stream:
        return Stream()

    def trained(self) -> None:
        self.left = []

    @contextmanager
    def apart(self) -> Iterator[None]:
        before = generator_states()
        if len(self.left) == len(before) and all(torch.equal(a, b) for a, b in zip(self.left, before)):
            set_generator_states(self.went_on)
        try:
            yield
        finally:
            self.left, self.went_on = before, generator_states()
            set_generator_states(before)


def generator_states() -> list[Tensor]:
    """The CPU's, and every GPU's that has been used."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])]


def set_generator_states(states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state_all(states[1:])


def inside_a_trainer() -> bool:
    """Whether one of the callers is a trainer's loop: there the generators are training's."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") in _LOOPS and "train" in frame.f_code.co_name:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


@contextmanager
def checkpointing_rests(model: nn.Module) -> Iterator[None]:
    """No layer recomputes within: there are no gradients, and the cache stays."""
    switched = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False) is True]
    for module in switched:
        module.gradient_checkpointing = False  # type: ignore[assignment]
    try:
        yield
    finally:
        for module in switched:
            module.gradient_checkpointing = True  # type: ignore[assignment]


def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    stream: Stream = self.__dict__[_STREAM]
    with checkpointing_rests(self):
        if not inside_a_trainer():
            return type(self).generate(self, *args, **kwargs)
        with stream.apart():
            return type(self).generate(self, *args, **kwargs)


class AfterTraining:
    """Forward hook of the head, which every forward calls: a wrapper may go past the model's own hooks. An object, for deepcopy's sake."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def __call__(self, head: nn.Module, args: Any, output: Any) -> None:
        if head.training and torch.is_grad_enabled():
            self.stream.trained()


def place(lm: nn.Module) -> str | None:
    """Why the generate of this causal LM (or of the one it wraps) is left alone, or None."""
    inner = inner_model(lm)
    if not callable(getattr(type(inner), "generate", None)):
        return "the model does not generate"
    if "generate" in inner.__dict__:
        return "already optimized" if _STREAM in inner.__dict__ else "its generate was already replaced by another library"
    head = lm.get_output_embeddings()
    if head is None:
        return "the model has no output embeddings"
    stream = Stream()
    inner.__dict__[_STREAM] = stream
    inner.__dict__["generate"] = MethodType(generate, inner)
    head.register_forward_hook(AfterTraining(stream))
    return None


def take_back(module: nn.Module) -> bool:
    """Undoes `place` for one module of the model; whether there was a generate to undo."""
    for key in [key for key, hook in module._forward_hooks.items() if isinstance(hook, AfterTraining)]:
        del module._forward_hooks[key]
    if _STREAM not in module.__dict__:
        return False
    del module.__dict__[_STREAM], module.__dict__["generate"]
    return True
