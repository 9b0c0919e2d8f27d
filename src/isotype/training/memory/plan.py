"""Plans how much memory a run will need, by running its first steps on tensors without data.

There is no formula that is correct for every architecture, attention implementation and
recomputation. So the plan runs the same step as the training (forward, loss, backward,
accumulation, update) under FakeTensorMode. In this mode, operators compute only shapes and dtypes.
`LiveBytes` counts the bytes of the tensors that exist at the same time. The result differs by at
most 15% from the peak resident size of real CPU runs that return freed memory to the system. If the
C library keeps freed blocks, as glibc does by default, a process uses more memory.

If `parts` processes share a model, each holds 1 / parts of the weights, the gradients and the
optimizer states. But each process holds all the scales of 4-bit weights. In addition, a process
holds gathered weights and gradients:

* the process holds the last FSDP unit (norm and head) from forward to backward;
* it holds two layers at a time, because one layer runs while the next one is gathered;
* in backward, it holds the whole gradient of a layer twice: once in the dtype in which autograd
  computes the gradient, and once in the dtype in which the gradient is sent.

In forward, a process holds no gradients of other processes. So the peaks of forward and backward
are planned separately.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...config.schema import TrainSection
from ...distributed.shard import find_units
from ...dtypes import to_torch
from ...environment.planned_device import plan_device
from ...errors import UsageError
from ...model.architecture import layer_settings
from ...ops.backend import force_backend
from ...ops.linear_cross_entropy.op import scratch_estimators as head_scratch_estimators
from ...ops.widened_calls import scratch_estimators as widened_scratch_estimators
from ...precision.apply import inner_model, is_quantised
from ...precision.precision import EIGHT_BIT_OPTIMIZERS, Precision
from ...wording import first_line
from ..console import silence_library_warnings
from ..optimizer import MUON, state_bytes
from ..step import assemble_stepper
from ..task import ModelOutline, StepOutline
from .blocks import BLOCKS, apply_offload, offload_buffer_bytes, offloaded_tensors
from .meta_results import MetaResults
from .outline import copy_quantisation, quantisation_tensors, scratch_sizes
from .recomputation import Checkpointing, apply_checkpointing


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The planned memory of a run, in bytes. The memory in the first four fields stays allocated
    during the whole run. `peak` is the largest number of bytes that are in use at the same time.

    frozen        the frozen weights; if the blocks are kept in host memory (`model.offload:
                  blocks`), the frozen weights outside of the blocks and those of the two largest
                  blocks
    trained       the trained weights
    gradients     the gradients of the trained weights
    optimizer     the states of the optimizer
    activations   the tensors that exist at the end of a forward pass; these are the logits and the
                  tensors that autograd saved for backward
    working       the most memory that forward, loss and backward need in addition to the
                  activations
    forward       the most memory that a forward pass needs, including the activations
    backward      the most memory that loss and backward need in addition to the activations
    update        the most memory that the optimizer step needs in addition to the first four fields
    evaluation    the most memory that an evaluation needs in addition
    sampling      the most memory that the generation of an answer, with its cache, needs in
                  addition; None if it could not be simulated
    gathered      if processes share the model, the largest number of bytes of other processes'
                  weights and gradients that this process holds at a time
    rows, length  the number of rows of the largest micro-batch and their length in tokens
    not_simulated the reason why activations, working and update are unknown, or None
    """

    frozen: int
    trained: int
    gradients: int
    optimizer: int
    activations: int = 0
    working: int = 0
    forward: int = 0
    backward: int = 0
    update: int = 0
    evaluation: int = 0
    sampling: int | None = 0
    gathered: int = 0
    peak: int = 0
    rows: int = 0
    length: int = 0
    not_simulated: str | None = None

    @property
    def persistent_bytes(self) -> int:
        """The number of bytes that stay allocated during the whole run. This number does not depend
        on the number or the length of the rows.
        """
        return self.frozen + self.trained + self.gradients + self.optimizer

    def to_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)


def plan_memory(
    model_outline: ModelOutline,
    train: TrainSection,
    precision: Precision,
    step_outline: StepOutline,
    *,
    checkpointing: Checkpointing,
    device_type: str = "cpu",
    earlier_plan: MemoryPlan | None = None,
) -> MemoryPlan:
    """Plans the memory of one optimizer step on the largest micro-batch. The function may be called
    again for the same `model_outline` with other settings.

    model_outline  the run's model without data; this function replaces its parameters by fake ones
    train          the section `train` of the configuration
    step_outline   the task's largest step, evaluation and sample
    checkpointing  which layers are recomputed in backward
    device_type    the device for which the step is planned: cpu or cuda
    earlier_plan   a plan of the same step with another choice of recomputation. The evaluation and
                   the sample recompute nothing, so their numbers are copied from this plan
    A step for a GPU is simulated on meta tensors, so this also works on a machine without a GPU. If
    a step cannot be simulated, `persistent_bytes` is still exact, and `not_simulated` contains the
    reason.
    """
    persistent_plan = plan_persistent_memory(model_outline.model, train, precision)
    persistent_plan = replace(
        persistent_plan, frozen=persistent_plan.frozen + step_outline.other_model_bytes
    )
    apply_checkpointing(model_outline.model, checkpointing)
    try:
        return _simulate_step(
            model_outline.model,
            train,
            precision,
            step_outline,
            device_type=device_type,
            persistent_plan=persistent_plan,
            earlier_plan=earlier_plan,
        )
    except UsageError:
        raise
    except Exception as error:
        # the architecture's shapes depend on values (routed experts), or an operator has no fake
        # implementation: weights, gradients and states are still exact
        return replace(
            persistent_plan,
            peak=persistent_plan.persistent_bytes,
            rows=step_outline.rows,
            length=step_outline.length,
            not_simulated=first_line(error)[:160],
        )


def plan_with_offload(model_outline: ModelOutline, plan: MemoryPlan) -> MemoryPlan:
    """Returns the plan of the same step with the frozen weights of the blocks in host memory. The
    step is not simulated again, because every phase of it uses the same number of bytes less. Each
    block of the planned step must be recomputed.

    model_outline  the model of the plan; after this call, its blocks are marked as offloaded
    Raises         UsageError for a model without blocks
    """
    model = apply_offload(model_outline.model, BLOCKS, torch.device("meta"))
    saved_bytes = sum(map(_bytes, offloaded_tensors(model))) - offload_buffer_bytes(model)
    return replace(plan, frozen=plan.frozen - saved_bytes, peak=plan.peak - saved_bytes)


@dataclass(frozen=True)
class UnitBytes:
    """The bytes of one FSDP unit. These numbers include padding: FSDP adds rows to each weight, so
    that every process gets the same number of rows.

    weights   bytes of all weights
    trained   bytes of the trained weights
    elements  number of trained elements
    scales    bytes of the scales of 4-bit weights
    """

    weights: int
    trained: int
    elements: int
    scales: int


def unit_bytes(model: nn.Module, parts: int) -> list[UnitBytes]:
    """Returns the bytes of every FSDP unit of a model that `distributed.shard` splits over `parts`
    processes. The root unit is the last one. The model may be on the meta device.
    """
    inner = inner_model(model)
    visited: set[int] = set()
    units = []
    for _, module in [*find_units(inner), ("", inner)]:
        parameters = [p for p in module.parameters() if id(p) not in visited]
        visited |= {id(p) for p in parameters}
        elements = [padded_elements(p, parts) for p in parameters]
        sizes = [count * p.element_size() for p, count in zip(parameters, elements)]
        units.append(
            UnitBytes(
                sum(sizes),
                sum(size for p, size in zip(parameters, sizes) if p.requires_grad),
                sum(count for p, count in zip(parameters, elements) if p.requires_grad),
                sum(
                    t.numel() * t.element_size()
                    for p in parameters
                    for t in quantisation_tensors(p)
                ),
            )
        )
    return units


def padded_elements(weight: Tensor, parts: int) -> int:
    """Returns the number of elements of a weight after its rows are padded so that they can be
    split into equal parts. FSDP2 stores and sends weights with this padding.
    """
    if weight.dim() == 0 or weight.numel() == 0:
        return weight.numel()
    return weight.numel() // len(weight) * parts * -(-len(weight) // parts)


def plan_process_memory(
    model_outline: ModelOutline,
    train: TrainSection,
    precision: Precision,
    step_outline: StepOutline,
    *,
    checkpointing: Checkpointing,
    device_type: str,
    parts: int,
    earlier_plan: MemoryPlan | None = None,
) -> MemoryPlan:
    """Plans the memory of one of `parts` processes that share a model. If `parts` is 1, the result
    is the same as the result of `plan_memory`.
    """
    units = unit_bytes(model_outline.model, parts) if parts > 1 else []
    if parts > 1:
        # plans a backward after an earlier micro-batch, which allocates no gradient buffers: a
        # process has buffers only for its own part
        train = train.model_copy(update={"accumulate": max(2, train.accumulate)})
    plan = plan_memory(
        model_outline,
        train,
        precision,
        step_outline,
        checkpointing=checkpointing,
        device_type=device_type,
        earlier_plan=earlier_plan,
    )
    if parts == 1:
        return plan
    *layers, root = units
    trained = sum(unit.trained for unit in units) // parts
    # padding enlarges states and gradients in proportion to the trained weights
    scale = trained / plan.trained if plan.trained else 0.0
    # the root from forward to backward, and the two largest layers
    gathered_bytes = root.weights + sum(sorted(unit.weights for unit in layers)[-2:])
    # the gradient of a unit in its weights' dtype, as autograd makes it, and in the dtype of
    # sending
    gradient_bytes = max(
        unit.trained + unit.elements * to_torch(precision.reduce).itemsize for unit in units
    )
    # gloo gathers a unit into a copy before it fills FSDP's buffer; NCCL needs none
    gather_copy = max(unit.weights for unit in units) if device_type == "cpu" else 0
    shared_plan = replace(
        plan,
        frozen=sum(unit.weights for unit in units) // parts
        - trained
        + sum(unit.scales for unit in units),
        trained=trained,
        gradients=round(plan.gradients * scale),
        optimizer=round(plan.optimizer * scale),
        update=round(plan.update * scale),
        gathered=gathered_bytes + max(gradient_bytes, gather_copy),
    )
    forward = max(plan.forward, plan.evaluation, plan.sampling or 0) + gathered_bytes + gather_copy
    backward = plan.activations + plan.backward + gathered_bytes + max(gradient_bytes, gather_copy)
    return replace(
        shared_plan, peak=shared_plan.persistent_bytes + max(forward, backward, shared_plan.update)
    )


def plan_persistent_memory(
    model: nn.Module, train: TrainSection, precision: Precision
) -> MemoryPlan:
    """Plans the memory that stays allocated during the whole run: the memory of the weights, the
    gradients and the optimizer states.
    """
    parameters = list(model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    elements = sum(p.numel() for p in trained)
    offloaded_ids = {id(tensor) for tensor in offloaded_tensors(model)}
    frozen_bytes = sum(
        _bytes(t)
        for p in parameters
        if not p.requires_grad
        for t in (p, *quantisation_tensors(p))
        if id(t) not in offloaded_ids
    )
    return MemoryPlan(
        frozen=frozen_bytes + offload_buffer_bytes(model),
        trained=sum(_bytes(p) for p in trained),
        gradients=elements * to_torch(precision.grads).itemsize,
        optimizer=state_bytes(model, train, precision) + ema_bytes(model, train, precision),
    )


def ema_bytes(model: nn.Module, train: TrainSection, precision: Precision) -> int:
    """Returns the bytes of the moving averages of the weights, or 0 if `train.ema` is not set."""
    elements = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if train.ema is None:
        return 0
    return elements * to_torch(precision.ema).itemsize


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _simulate_step(
    model: nn.Module,
    train: TrainSection,
    precision: Precision,
    step_outline: StepOutline,
    *,
    device_type: str,
    persistent_plan: MemoryPlan,
    earlier_plan: MemoryPlan | None,
) -> MemoryPlan:
    device = torch.device("cpu" if device_type == "cpu" else "meta")
    states_bytes = state_bytes(model, train, precision)
    live = LiveBytes(
        device.type,
        {**scratch_sizes(), **head_scratch_estimators(), **widened_scratch_estimators()},
        ignored=offloaded_tensors(model),
    )
    with simulate_device(device_type), live, silence_library_warnings():
        replace_with_fakes(model, device)
        # whether the update runs: other optimizers read values of tensors. The size of their states
        # is known, and an update needs at most two more copies of a tensor
        is_simulated = train.optimizer in ("adamw", MUON)
        simulated_train = train if is_simulated else train.model_copy(update={"optimizer": "adamw"})
        largest_trained = max((_bytes(p) for p in model.parameters() if p.requires_grad), default=0)
        stepper = assemble_stepper(model, simulated_train, precision, step_outline.compute_loss_sum)
        optimizer, accumulator = stepper.optimizer, stepper.accumulator
        batch = step_outline.make_batch(device)
        bytes_after_forward: list[int] = []
        peaks: list[int] = []  # by turns the peak before a forward, and the peak in it

        def start_phase(*_: Any) -> None:
            peaks.append(live.peak)
            live.restart_peak()

        def end_forward(*_: Any) -> None:
            bytes_after_forward.append(live.current_bytes)
            start_phase()

        hooks = [
            model.register_forward_pre_hook(start_phase),
            model.register_forward_hook(end_forward),
        ]

        live.restart_peak()
        start_bytes = live.current_bytes
        # from the second micro-batch on, the gradients of the first one are held too
        batches = [batch] * min(2, train.accumulate)
        stepper.accumulate(batches)
        for hook in hooks:
            hook.remove()
        forward_end = bytes_after_forward[len(batches) - 1]
        bytes_before_update = live.current_bytes
        forward_peak = peaks[-1]
        backward_peak = live.peak
        step_peak = max(*peaks, live.peak)
        # the first update creates the optimizer's states, and the second one is measured. If the
        # update is not run, a buffer takes the place of the states
        state_buffers = list[Tensor]()
        if is_simulated:
            optimizer.step()
        else:
            state_buffers.append(torch.empty(states_bytes, dtype=torch.uint8, device=device))
        created_bytes = live.current_bytes - bytes_before_update
        live.restart_peak()
        if is_simulated:
            optimizer.step()
        elif train.optimizer not in EIGHT_BIT_OPTIMIZERS:
            torch.empty(2 * largest_trained, dtype=torch.uint8, device=device)
        update_peak = live.peak
        accumulator.zero()
        # the tensors that the model's first forward creates and keeps, such as tables of positions
        kept_bytes = live.current_bytes - created_bytes - start_bytes
        start_bytes += kept_bytes
        gradients = bytes_before_update - start_bytes if len(batches) > 1 else 0
        if earlier_plan is None:
            if step_outline.run_evaluation:
                evaluation = _measure_peak(live, step_outline.run_evaluation, model, device)
            else:
                evaluation = 0
            sampling = _measure_sampling(model, live, step_outline, device)
        else:
            evaluation = earlier_plan.evaluation
            sampling = earlier_plan.sampling
        end_bytes = live.current_bytes
        accumulator.close()
    return replace(
        persistent_plan,
        activations=max(0, forward_end - start_bytes - gradients),
        working=max(0, step_peak - forward_end),
        forward=max(0, forward_peak - start_bytes - gradients),
        backward=max(0, backward_peak - forward_end),
        update=update_peak - bytes_before_update - created_bytes,
        evaluation=evaluation,
        sampling=sampling,
        peak=max(step_peak + created_bytes, update_peak, end_bytes + max(evaluation, sampling or 0))
        + ema_bytes(model, train, precision)
        + offload_buffer_bytes(model),
        rows=step_outline.rows,
        length=step_outline.length,
    )


def _measure_peak(
    live: LiveBytes,
    run: Callable[[nn.Module, torch.device], None],
    model: nn.Module,
    device: torch.device,
) -> int:
    """Calls `run`. Returns the largest number of bytes of the tensors that existed during this
    call, minus the number of bytes before the call.
    """
    live.restart_peak()
    start_bytes = live.current_bytes
    run(model, device)
    return live.peak - start_bytes


def _measure_sampling(
    model: nn.Module, live: LiveBytes, step_outline: StepOutline, device: torch.device
) -> int | None:
    if step_outline.run_sample is None:
        return 0
    try:
        return _measure_peak(live, step_outline.run_sample, model, device)
    # the model has no cache, or its cache depends on values; the plan of the step is still valid
    except Exception:
        return None


def replace_with_fakes(model: nn.Module, device: torch.device) -> None:
    """Replaces parameters, buffers and the scales of packed parameters on the meta device by fake
    tensors. Tied parameters stay tied. Tensors that are kept in host memory are not replaced.
    """
    fakes: dict[int, nn.Parameter] = {}
    offloaded_ids = {id(tensor) for tensor in offloaded_tensors(model)}

    def make_fake(tensor: Tensor) -> Tensor:
        if id(tensor) in offloaded_ids:
            return tensor
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)

    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) in offloaded_ids:
                copy_quantisation(parameter, parameter, make_fake)
                continue
            if id(parameter) not in fakes:
                data = make_fake(parameter)
                fakes[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
                copy_quantisation(fakes[id(parameter)], parameter, make_fake)
            module._parameters[name] = fakes[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = make_fake(buffer)


@contextmanager
def simulate_device(device_type: str) -> Iterator[None]:
    """Within this block, operators compute only shapes and dtypes. If the simulated device is a
    CPU, the tensors are fake tensors. For other devices, the tensors are meta tensors.
    """
    if device_type == "cpu":
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
        return
    # with this backend each op is one operator that allocates only its results, as its kernels do
    with plan_device(device_type), force_backend("cpp"):
        yield


def max_step_bytes(
    model: nn.Module, train: TrainSection, precision: Precision, *, length: int
) -> int:
    """Returns an upper bound on the bytes of a step on `train.batch_size` rows of `length` tokens,
    padding included. The bound is valid even if no layer is recomputed. It is the sum of the
    weights, the gradients, the optimizer states, six fp32 copies of the input and output of every
    matrix, and the full attention scores.
    """
    widths = [width for module in model.modules() for width in _matrix_widths(module)]
    tokens = train.batch_size * length
    layers = layer_settings(getattr(model, "config", None))
    scores = sum(getattr(layer, "num_attention_heads", 0) for layer in layers) * tokens * length
    largest = max((a * b for a, b in zip(widths[::2], widths[1::2])), default=0)
    return (
        plan_persistent_memory(model, train, precision).persistent_bytes
        + 24 * tokens * sum(widths)
        + 16 * scores
        + 32 * largest
    )


def _matrix_widths(module: nn.Module) -> tuple[int, ...]:
    """Returns the number of inputs and the number of outputs of a module that has a weight matrix.
    If the module has the attributes `in_features` and `out_features`, the two numbers are read from
    them, because the shape of a 4-bit weight does not show these numbers.
    """
    weight = module._parameters.get("weight")
    if weight is None or (weight.ndim < 2 and not is_quantised(weight)):
        return ()
    features = tuple(
        int(n)
        for name in ("in_features", "out_features")
        if (n := getattr(module, name, None)) is not None
    )
    if features:
        return features
    return int(weight.shape[-1]), int(weight.shape[-2])


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that are created while this mode is active and still exist.
    `current_bytes` is their sum, and `peak` is the largest sum so far.

    device_type  only tensors on this device are counted
    scratch      maps an operator to a function; from the operator's arguments, this function
                 computes the bytes that the operator needs in addition to its results; operators
                 that are not listed need no such bytes
    ignored      tensors that are not counted; views of these tensors are not counted either
    Each storage is counted once, even if it has several views.
    """

    def __init__(
        self,
        device_type: str = "cpu",
        scratch: Mapping[Any, Callable[..., int]] | None = None,
        ignored: Sequence[Tensor] = (),
    ) -> None:
        super().__init__()
        self.current_bytes = self.peak = 0
        self.device_type = device_type
        self.scratch = scratch or {}
        self._storages: dict[int, int] = {tensor.untyped_storage()._cdata: 0 for tensor in ignored}
        self._results = MetaResults()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.device_type == "meta":
            result = self._results.compute(function, args, kwargs)
        else:
            result = function(*args, **kwargs)
        for leaf in (result,) if isinstance(result, Tensor) else tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type == self.device_type:
                self._count(leaf)
        if function in self.scratch:
            self.peak = max(self.peak, self.current_bytes + self.scratch[function](*args, **kwargs))
        return result

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return
        self._storages[key] = size = storage.nbytes()
        self.current_bytes += size
        self.peak = max(self.peak, self.current_bytes)
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.current_bytes -= self._storages.pop(key, 0)

    def restart_peak(self) -> None:
        self.peak = self.current_bytes
