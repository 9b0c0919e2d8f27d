"""Makes `model.generate` return the same tokens during training as at other times. Calls of
`model.generate` do not change the training.

Generation and training can disturb each other in two ways. First, sampling uses the same random
generators as dropout and the data order. Therefore, after the first training step, generation uses
a separate stream of random numbers, which the caller can restart with a seed. There is one
exception: if an attached trainer generates samples to train on them (GRPO, OnlineDPO), generation
uses the same generators as training (`sample_from_training_state`). Second, layers that use
gradient checkpointing ignore the key-value cache in training mode. Each new token would then attend
only to itself. Gradient checkpointing is therefore switched off during generation. `linear_4bit`
prevents bitsandbytes from changing 4-bit weights in evaluation mode.

Each new token is a forward of one row. On a CPU, this forward spends most of its time on reading
the weights. PyTorch reads a bf16 weight at half the speed of the memory if the input has one row.
Linear layers therefore use a C++ kernel (`lora.products.few_rows_product`). LoRA layers with the
same input are one call of a kernel, without an autograd function (`lora.few_rows`). The adapters
are not merged: a merge into bf16 rounds away 1% to 13% of the effect of an adapter. They are cast
once per call of `generate`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..instance_method import InstanceMethod, Placement
from ..lora.attach import has_replaced_forward, is_lora, linear_for_few_rows
from ..lora.dora import forget_row_squares
from ..lora.products import keep_cast_adapters
from ..precision.apply import inner_model
from ..precision.parts import has_sharded_units
from .forwards import TrainingStateHook
from .instances import make_placement

PART_NAME = "generate"  # the value of `Placement.part`
# key in a model's `__dict__` for the random numbers of a generation
_STREAM = "_isotype_generation"


class SamplingStream:
    """The stream of random numbers that `generate` uses for sampling during training. The stream
    continues from one generation to the next and never repeats.

    training_state   the CPU generator's state in the last training step; None before the first step
    restored_states  the generator states that were restored after the last generation from the
                     stream
    end_states       the generator states at the end of that generation
    seeded_states    the generator states at the end of the last generation that used a seed of the
                     caller; the next generation may continue from them
    copy_blocks      memory for copies of weights (`KeptRowLayers`), which is kept from one
                     generation to the next until the first training step
    """

    def __init__(self) -> None:
        self.training_state: Tensor | None = None
        self.restored_states: list[Tensor] = []
        self.end_states: list[Tensor] = []
        self.seeded_states: list[Tensor] = []
        self.copy_blocks: list[Tensor] = []

    def __reduce__(self) -> tuple[Any, ...]:
        # a copy or a pickle of the model begins a new stream
        return SamplingStream, ()

    @contextmanager
    def isolate(self, *, training: bool) -> Iterator[None]:
        """Returns a context manager for one call of `generate`. Within this context, sampling takes
        its random numbers from the stream. Afterwards the generators are restored. If the caller
        has set a seed after the last training step, sampling uses this seed.

        training  whether the model is in training mode, as in a trainer's loop before the first
                  step
        """
        states = generator_states()
        if _sampling_mode.uses_training_generators or (
            self.training_state is None and not training
        ):
            yield
            return
        is_freshly_seeded = torch.equal(
            states[0], torch.Generator().manual_seed(torch.initial_seed()).get_state()
        )
        if self.training_state is not None and (
            _are_equal(states, self.seeded_states)
            or (is_freshly_seeded and not torch.equal(states[0], self.training_state))
        ):
            yield
            self.seeded_states = generator_states()
            return
        if (
            self.training_state is None
            and is_freshly_seeded
            and not _are_equal(states, self.restored_states)
        ):
            # the stream begins with the current seed, which the trainer or the caller has set
            pass
        elif len(self.end_states) == len(states):
            set_generator_states(self.end_states)
        else:
            # a random seed, so that the numbers differ from those that training draws next
            torch.manual_seed(int(torch.randint(2**62, ())))
        try:
            yield
        finally:
            self.restored_states = states
            self.end_states = generator_states()
            set_generator_states(states)


class _SamplingMode(threading.local):
    uses_training_generators = False


_sampling_mode = _SamplingMode()


@contextmanager
def sample_from_training_state() -> Iterator[None]:
    """Within this block, generation uses the same random generators as training. Trainers that
    generate samples and train on them (such as GRPO) use it.
    """
    previous = _sampling_mode.uses_training_generators
    _sampling_mode.uses_training_generators = True
    try:
        yield
    finally:
        _sampling_mode.uses_training_generators = previous


def _are_equal(states: list[Tensor], other_states: list[Tensor]) -> bool:
    return len(states) == len(other_states) and all(
        torch.equal(a, b) for a, b in zip(states, other_states)
    )


def generator_states() -> list[Tensor]:
    """Returns the states of the random generators of the CPU and, if CUDA has been used, of every
    GPU.
    """
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states += torch.cuda.get_rng_state_all()
    return states


def set_generator_states(states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state_all(states[1:])


@contextmanager
def preserve_random_state() -> Iterator[None]:
    """Restores PyTorch's random generators on exit."""
    states = generator_states()
    try:
        yield
    finally:
        set_generator_states(states)


def _modules_outside_adapters(module: nn.Module) -> Iterator[nn.Module]:
    """Yields all modules, but not those inside a LoRA layer, which are most modules of a model."""
    yield module
    if is_lora(module):
        return
    for child in module.children():
        yield from _modules_outside_adapters(child)


@contextmanager
def disable_checkpointing(model: nn.Module) -> Iterator[None]:
    """Switches gradient checkpointing off within this block, so that the key-value cache is used."""
    switched: list[Any] = [
        module
        for module in _modules_outside_adapters(model)
        if getattr(module, "gradient_checkpointing", False) is True
    ]
    for module in switched:
        module.gradient_checkpointing = False
    try:
        yield
    finally:
        for module in switched:
            module.gradient_checkpointing = True


@contextmanager
def use_fast_linears(model: nn.Module) -> Iterator[None]:
    """Within this block, linear layers in bf16 or fp32 on a CPU use the C++ kernel for a few rows. The
    linear layers inside a LoRA layer are not changed, since the LoRA layer computes their matrix
    products.
    """
    methods = [
        InstanceMethod(linear_for_few_rows, layer)
        for layer in dict.fromkeys(_modules_outside_adapters(model))
        if type(layer) is nn.Linear
        and layer.weight.dtype in (torch.bfloat16, torch.float32)
        and layer.weight.is_cpu
        and not has_replaced_forward(layer)
    ]
    for method in methods:
        method.install()
    try:
        yield
    finally:
        for method in methods:
            method.uninstall()


def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    stream: SamplingStream = self.__dict__[_STREAM][0]
    forget_row_squares()
    copy_blocks = stream.copy_blocks
    if stream.training_state is not None:
        # training needs the memory after this call
        stream.copy_blocks = []
        copy_blocks = []
    with (
        disable_checkpointing(self),
        use_fast_linears(self),
        # FSDP gathers most weights at other addresses for each token, so that nearly all layers
        # would be read again (measured: no faster), and copies of weights would not be sharded
        nullcontext() if has_sharded_units(self) else keep_cast_adapters(copy_blocks),
        stream.isolate(training=self.training),
    ):
        return type(self).generate(self, *args, **kwargs)


def place_generate(path: str, lm: Any) -> Placement:
    """Replaces the `generate` of a causal LM, or of the model inside PEFT's wrapper."""
    reason = generate_blocker(lm)
    if reason is not None:
        return make_placement(PART_NAME, path, lm, None, reason)
    inner = inner_model(lm)
    stream = SamplingStream()
    method = InstanceMethod(generate, inner, "generate")
    inner.__dict__[_STREAM] = stream, method
    method.install()
    embeddings = find_input_embeddings(lm)
    assert embeddings is not None
    embeddings.register_forward_hook(TrainingStateHook(stream))
    return make_placement(PART_NAME, path, lm, "generate", "leaves no trace in a trainer's loop")


def generate_blocker(lm: Any) -> str | None:
    """Returns the reason why the `generate` of this causal LM cannot be replaced, or None if it
    can.
    """
    inner = inner_model(lm)
    if not callable(getattr(type(inner), "generate", None)):
        return "the model does not generate"
    if _STREAM in inner.__dict__:
        return "already optimized"
    if "generate" in inner.__dict__:
        return "its generate was already replaced by another library"
    if find_input_embeddings(lm) is None:
        return "the model has no input embeddings"
    return None


def find_input_embeddings(lm: Any) -> nn.Module | None:
    """Returns the input embeddings of a model. Returns None if the model's class has no input
    embeddings, as in a time-series model. transformers raises an exception for such a class.
    """
    try:
        embeddings: nn.Module | None = lm.get_input_embeddings()
    except NotImplementedError:
        return None
    return embeddings


def restore_generate(module: nn.Module) -> bool:
    """Undoes `place_generate` for one module of the model. Returns whether its `generate` was
    replaced.
    """
    for key in [
        key for key, hook in module._forward_hooks.items() if isinstance(hook, TrainingStateHook)
    ]:
        del module._forward_hooks[key]
    if _STREAM not in module.__dict__:
        return False
    _, method = module.__dict__.pop(_STREAM)
    method.uninstall()
    return True
