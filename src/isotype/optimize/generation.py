"""Makes `model.generate` during training return the same tokens as outside it, and leave training unchanged.

Generation in a callback and training can disturb each other in two ways. First, sampling uses the same random generators as dropout and
the data order. In a callback it therefore gets a separate random stream. Called from the training step itself (GRPO, OnlineDPO, a
`compute_loss`), it is part of training and uses the training generators. Second, a layer with gradient checkpointing in training mode
discards the key-value cache and would see one token without the earlier ones. Gradient checkpointing is therefore switched off during
generation. `linear_4bit` prevents bitsandbytes from changing 4-bit weights in evaluation mode.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from ..instance_method import InstanceMethod
from ..placement import Placement
from ..precision.apply import inner_model
from .instances import placement

PART = "generate"
# whose functions call callbacks, and in whose functions named `train...` training steps run; TRL's trainers use both
_CALLBACKS, _LOOP = "transformers.trainer_callback", "transformers.trainer"
_STREAM = "_isotype_generation"


class Stream:
    """The generator states for sampling in callbacks: one random stream that continues from callback to callback and never repeats.

    left      the states that a generation gave back to training
    went_on   where that generation's own draws ended
    trained   the CPU generator's state in the last training step; None where there was none since the last generation
    seeded    the state in which a callback's own seed was found
    Where a callback has seeded the generators, the stream begins anew with that seed.
    """

    def __init__(self) -> None:
        self.left: list[Tensor] = []
        self.went_on: list[Tensor] = []
        self.trained: Tensor | None = None
        self.seeded: Tensor | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # a copy or a pickle of the model begins its own
        return Stream, ()

    def is_seeded(self, before: list[Tensor]) -> bool:
        """Whether a callback has seeded the generators since the last generation."""
        if not torch.equal(before[0], torch.Generator().manual_seed(torch.initial_seed()).get_state()):
            return False
        if self.trained is None:
            # two generations in a row: the first gave the seeded state back
            return not _equal(before, self.left)
        # a training that draws nothing leaves the generators as they were seeded: that seed is a callback's only if it was one before
        return not torch.equal(before[0], self.trained) or (self.seeded is not None and torch.equal(before[0], self.seeded))

    @contextmanager
    def apart(self) -> Iterator[None]:
        before = generator_states()
        if self.is_seeded(before):
            self.seeded = before[0]
        elif len(self.went_on) == len(before):
            set_generator_states(self.went_on)
        else:
            # not the numbers that training is about to draw
            torch.manual_seed(int(torch.randint(2**62, ())))
        try:
            yield
        finally:
            self.left, self.went_on, self.trained = before, generator_states(), None
            set_generator_states(before)


def _equal(states: list[Tensor], others: list[Tensor]) -> bool:
    return len(states) == len(others) and all(torch.equal(a, b) for a, b in zip(states, others))


def generator_states() -> list[Tensor]:
    """The CPU's, and every GPU's that has been used."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])]


def set_generator_states(states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state_all(states[1:])


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Leaves PyTorch's generators as they were."""
    states = generator_states()
    try:
        yield
    finally:
        set_generator_states(states)


def called_from_a_callback() -> bool:
    """Whether a trainer's callback is among the callers, and no training step between it and here."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__")
        if module == _CALLBACKS:
            return True
        if module == _LOOP and "train" in frame.f_code.co_name:
            return False
        frame = frame.f_back
    return False


@contextmanager
def checkpointing_off(model: nn.Module) -> Iterator[None]:
    """Within this block no layer recomputes: there are no gradients, and the key-value cache is used."""
    switched: list[Any] = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False) is True]
    for module in switched:
        module.gradient_checkpointing = False
    try:
        yield
    finally:
        for module in switched:
            module.gradient_checkpointing = True


def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    stream: Stream = self.__dict__[_STREAM][0]
    with checkpointing_off(self):
        if not called_from_a_callback():
            return type(self).generate(self, *args, **kwargs)
        with stream.apart():
            return type(self).generate(self, *args, **kwargs)


class SeesTraining:
    """Forward hook of the input embeddings, which every forward calls (TRL's fused loss never calls the head). An object, for deepcopy."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def __call__(self, embeddings: nn.Module, args: Any, output: Any) -> None:
        # reading the generator would break a compiled graph; of a compiled model a callback's own seed may then go unnoticed
        if not torch.compiler.is_compiling() and embeddings.training and torch.is_grad_enabled():
            self.stream.trained = torch.get_rng_state()


def place(path: str, lm: Any) -> Placement:
    """Replaces the `generate` of this causal LM, or of the one that it wraps."""
    reason = why_not(lm)
    if reason is not None:
        return placement(PART, path, lm, None, reason)
    inner = inner_model(lm)
    stream, method = Stream(), InstanceMethod(generate, inner, "generate")
    inner.__dict__[_STREAM] = stream, method
    method.put()
    embeddings = input_embeddings(lm)
    assert embeddings is not None
    embeddings.register_forward_hook(SeesTraining(stream))
    return placement(PART, path, lm, "generate", "leaves no trace in a trainer's loop")


def why_not(lm: Any) -> str | None:
    """Why the `generate` of this causal LM is not replaced, or None."""
    inner = inner_model(lm)
    if not callable(getattr(type(inner), "generate", None)):
        return "the model does not generate"
    if _STREAM in inner.__dict__:
        return "already optimized"
    if "generate" in inner.__dict__:
        return "its generate was already replaced by another library"
    return "the model has no input embeddings" if input_embeddings(lm) is None else None


def input_embeddings(lm: Any) -> nn.Module | None:
    """Its input embeddings; None where its class has none, as of a model of time series, which transformers says by an exception."""
    try:
        found: nn.Module | None = lm.get_input_embeddings()
    except NotImplementedError:
        return None
    return found


def take_back(module: nn.Module) -> bool:
    """Undoes `place` for one module of the model; whether there was a generate to undo."""
    for key in [key for key, hook in module._forward_hooks.items() if isinstance(hook, SeesTraining)]:
        del module._forward_hooks[key]
    if _STREAM not in module.__dict__:
        return False
    _, method = module.__dict__.pop(_STREAM)
    method.take_back()
    return True
