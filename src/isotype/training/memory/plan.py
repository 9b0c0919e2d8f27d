"""How much memory a run will take, from running its first steps on tensors without data.

No formula knows every architecture, attention and checkpointing. So the run's own step (forward, loss, backward, accumulation, update)
is run under FakeTensorMode, where operators only compute shapes and dtypes, while `LiveBytes` counts what is alive. Against the peak
resident size of real CPU runs with freed memory given back it is within 15% (docs/decisions/0051); a process whose C library keeps freed
blocks, as glibc does, sits above it.
"""

from __future__ import annotations

import warnings
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ...config.schema import RunConfig, TrainSection
from ...dtypes import to_torch
from ...errors import UsageError
from ...model.adapter import attach_adapter
from ...model.load import require_bitsandbytes
from ...ops.backend import using
from ...ops.linear_cross_entropy.scratch import scratch as head_scratch
from ...optimize import optimize
from ...precision.accumulate import GradientAccumulator
from ...precision.apply import apply_precision, generating
from ...precision.precision import Precision
from ...precision.quantised_base import of_config
from ..batches import MULTIPLE, Batch
from ..evaluate import evaluation_mode
from ..loss import batch_loss_sum
from ..optimizer import build_optimizer
from ..step import Stepper
from .live_bytes import LiveBytes
from .pauses import Pauses
from .quantised_outline import quantise_outline, scales_of, scratch, take_scales
from .recomputation import Checkpointing, apply_checkpointing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PretrainedConfig

BLOCK_8BIT, SMALLEST_8BIT = 256, 4096  # bitsandbytes: 8-bit states have a scale every 256 elements, and small tensors keep fp32 states


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes. The first four are held throughout; `peak` is the most at one time.

    activations   alive at the end of a forward pass: saved for backward, and the logits
    working       what the loss and backward add to that at their worst
    update        what the optimizer step adds to what is held
    evaluation    what an evaluation adds; `sampling` a generated answer with its cache, None where that could not be simulated
    not_simulated why activations, working and update are unknown, or None
    """

    frozen: int
    trained: int
    gradients: int
    optimizer: int
    activations: int = 0
    working: int = 0
    update: int = 0
    evaluation: int = 0
    sampling: int | None = 0
    peak: int = 0
    rows: int = 0
    length: int = 0
    not_simulated: str | None = None

    @property
    def held(self) -> int:
        """What a whole run holds, whatever its rows."""
        return self.frozen + self.trained + self.gradients + self.optimizer

    def as_json(self) -> dict[str, Any]:
        return dict(self.__dict__)


@dataclass(frozen=True)
class Outline:
    """A run's model on the meta device: every shape and dtype, no data.

    model      with adapter and precision
    trainable  elements that are trained
    total      all elements, those of 4-bit weights included
    """

    model: nn.Module
    trainable: int
    total: int


def outline(architecture: PretrainedConfig, config: RunConfig, precision: Precision, *, device_type: str) -> Outline:
    """The model as `training.setup.build_model` makes it, without its weights. Raises UsageError for adapter targets it lacks."""
    from transformers import AutoModelForCausalLM

    every_weight = config.adapter.kind == "none"
    dtype = precision.trainable if every_weight else precision.unquantised
    # flash and flex have sdpa's memory, and need packages or devices that a plan does not
    attention = "eager" if config.model.attention == "eager" else "sdpa"
    with torch.device("meta"), _quiet():
        base = AutoModelForCausalLM.from_config(
            architecture, dtype=to_torch(dtype), attn_implementation=attention, trust_remote_code=config.model.trust_remote_code
        )
        base.config.use_cache = False
        total = sum(p.numel() for p in base.parameters())
        if precision.base == "nf4" and not every_weight:
            require_bitsandbytes()
            before = of_config(architecture)
            quantise_outline(base, to_torch(precision.compute), double=before is None or bool(before.double))
        model: nn.Module = base if every_weight else _with_adapter(base, config)
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if config.model.optimize:
        _give_angles(base)
        optimize(model, precision, device_type=device_type, lora_branch=config.model.lora_branch)
    apply_precision(model, precision, device_type=device_type)
    model.train()
    return Outline(model, trainable, total + (0 if every_weight else trainable))


def plan_memory(
    made: Outline,
    train: TrainSection,
    precision: Precision,
    *,
    length: int,
    checkpointing: Checkpointing,
    device_type: str = "cpu",
    packing: bool = False,
    pauses: Pauses | None = None,
) -> MemoryPlan:
    """What one optimizer step on `train.batch_size` rows of `length` tokens takes; the same outline may be planned again otherwise.

    made     from `outline`; its parameters become fake ones here
    length   tokens of the longest row
    packing  rows are packed: attention gets a mask of every document instead of the causal one it makes itself
    pauses   the evaluations and samples between steps
    A GPU's step is simulated where PyTorch reaches one; elsewhere what is held is exact, and `not_simulated` says why there is no more.
    """
    length += -length % MULTIPLE
    held = _held(made.model, train, precision)
    apply_checkpointing(made.model, checkpointing)
    if device_type == "cuda" and not torch.cuda.is_available():
        # autograd asks a device for its guard, also of a tensor without data: without CUDA that ends the interpreter, past every except
        return replace(
            held, peak=held.held, rows=train.batch_size, length=length, not_simulated="this PyTorch reaches no GPU to plan a step for"
        )
    try:
        return _simulated(
            made.model, train, precision, length=length, device_type=device_type, held=held, packing=packing, pauses=pauses or Pauses()
        )
    except UsageError:
        raise
    except Exception as error:
        # an architecture whose shapes depend on values (routed experts), or an operator without a fake: what is held is still exact
        reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        return replace(held, peak=held.held, rows=train.batch_size, length=length, not_simulated=reason[:160])


def _held(model: nn.Module, train: TrainSection, precision: Precision) -> MemoryPlan:
    parameters = list(model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    elements = sum(p.numel() for p in trained)
    return MemoryPlan(
        frozen=sum(_bytes(t) for p in parameters if not p.requires_grad for t in (p, *scales_of(p))),
        trained=sum(_bytes(p) for p in trained),
        gradients=elements * to_torch(precision.grads).itemsize,
        optimizer=sum(optimizer_bytes(p.numel(), train, precision) for p in trained),
    )


def optimizer_bytes(elements: int, train: TrainSection, precision: Precision) -> int:
    """AdamW's two moments of one tensor."""
    if train.optimizer == "adamw8bit":
        return 8 * elements if elements < SMALLEST_8BIT else 2 * (elements + 4 * -(-elements // BLOCK_8BIT))
    return 2 * elements * to_torch(precision.optimizer).itemsize


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _simulated(
    model: nn.Module,
    train: TrainSection,
    precision: Precision,
    *,
    length: int,
    device_type: str,
    held: MemoryPlan,
    packing: bool,
    pauses: Pauses,
) -> MemoryPlan:
    live = LiveBytes(device_type, {**scratch(), **head_scratch()})
    # on a CPU without a compiler the ops are plain PyTorch, and take more; elsewhere there are kernels
    kernels = nullcontext() if device_type == "cpu" else using("cpp")
    with FakeTensorMode(allow_non_fake_inputs=True), live, _quiet(), kernels:
        _make_fake(model, torch.device(device_type))
        accumulator = GradientAccumulator(model.parameters(), dtype=precision.grads, reduce=precision.reduce)
        plain = train.model_copy(update={"optimizer": "adamw"}) if train.optimizer == "adamw8bit" else train
        optimizer = build_optimizer(model, plain, precision, accumulator.gradient)
        stepper = Stepper(model, optimizer, accumulator, precision, train)
        batch = _batch(train.batch_size, length, torch.device(device_type), packing=packing)
        after_forward: list[int] = []
        counting = model.register_forward_hook(lambda *_: after_forward.append(live.now))

        # the first step makes the optimizer's states, so the second is the one that counts
        stepper.accumulate([batch])
        if train.optimizer == "adamw8bit":
            states = [torch.empty(held.optimizer, dtype=torch.uint8, device=device_type)]
        else:
            states = []
            optimizer.step()
        accumulator.zero()
        live.restart_peak()
        before = live.now
        first = len(after_forward)
        # from the second micro-batch on, the gradients of the first are held too
        batches = [batch] * min(2, train.accumulate)
        stepper.accumulate(batches)
        forward_end = after_forward[first + len(batches) - 1]
        gradients = live.now - before if len(batches) > 1 else 0
        peak_step, before_update = live.peak, live.now
        live.restart_peak()
        if not states:
            optimizer.step()
        peak, update = max(peak_step, live.peak), live.peak - before_update
        counting.remove()
        accumulator.zero()
        evaluation = _evaluation(model, live, pauses, precision, torch.device(device_type), packing=packing)
        sampling = _sampling(model, live, pauses.sample_length, torch.device(device_type))
        between = live.now + max(evaluation, sampling or 0)
        accumulator.close()
    return replace(
        held,
        activations=max(0, forward_end - before - gradients),
        working=max(0, peak_step - forward_end),
        update=update,
        evaluation=evaluation,
        sampling=sampling,
        peak=max(peak, between),
        rows=train.batch_size,
        length=length,
    )


def _evaluation(model: nn.Module, live: LiveBytes, pauses: Pauses, precision: Precision, device: torch.device, *, packing: bool) -> int:
    if not pauses.eval_rows:
        return 0
    live.restart_peak()
    before, length = live.now, pauses.eval_length + -pauses.eval_length % MULTIPLE
    with evaluation_mode(model):
        batch_loss_sum(model, _batch(pauses.eval_rows, length, device, packing=packing), dtype=precision.loss)
    return live.peak - before


def _sampling(model: Any, live: LiveBytes, length: int, device: torch.device) -> int | None:
    """The pass over a prompt as long as it will be with its answer: at its end the cache is as large as it gets."""
    if not length:
        return 0
    live.restart_peak()
    before, ids = live.now, torch.empty(1, length, dtype=torch.long, device=device)
    try:
        with evaluation_mode(model), generating(model):
            kept = model(input_ids=ids, use_cache=True, logits_to_keep=1)
            del kept
    except Exception:  # a model without a cache, or one whose cache looks at values; the step's plan stands
        return None
    return live.peak - before


def _make_fake(model: nn.Module, device: torch.device) -> None:
    """Replaces parameters and buffers on the meta device by fake ones; tied parameters stay tied."""
    memo: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in memo:
                    data = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                    memo[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
                    take_scales(memo[id(parameter)], parameter, lambda t: torch.empty(t.shape, dtype=t.dtype, device=device))
                module._parameters[name] = memo[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)


def _batch(rows: int, length: int, device: torch.device, *, packing: bool) -> Batch:
    ids_BT, mask_BT, labels_BT = (torch.empty(rows, length, dtype=torch.long, device=device) for _ in range(3))
    mask, positions = (None, mask_BT) if packing else (mask_BT, None)
    return Batch(ids_BT, mask, labels_BT, rows * length, rows * (length - 1), positions)


def _with_adapter(base: Any, config: RunConfig) -> nn.Module:
    if config.adapter.start_from is None:
        return attach_adapter(base, config.adapter, seed=config.train.seed)
    from peft import PeftConfig, get_peft_model

    try:
        settings = PeftConfig.from_pretrained(config.adapter.start_from)
        settings.inference_mode = False  # a saved adapter says that it is not trained; a run goes on with it
        return get_peft_model(base, settings)
    except (OSError, ValueError) as error:
        raise UsageError(f"adapter.start_from: {config.adapter.start_from}: {str(error).splitlines()[0]}") from None


def _give_angles(model: nn.Module) -> None:
    """`optimize` runs the rotary module to see how its tables repeat: its frequencies need values, any that differ."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name.endswith("inv_freq"):
                module._buffers[name] = torch.linspace(1.0, 0.1, buffer.numel()).view(buffer.shape)


@contextmanager
def _quiet() -> Iterator[None]:
    """What libraries advise about a model without data is no news to the user."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
