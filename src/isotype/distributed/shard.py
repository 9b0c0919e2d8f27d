"""Distributes a model over the processes. Each process holds some rows of every weight. A unit is a
part of the model whose weights are gathered together while it runs.

The distribution uses torch's FSDP2. Each decoder layer, or each block of a denoiser, is a unit. An
embedding is a unit too if it does not share its weight with the head. The rest of the model (norm
and head) is the last unit. The weights of the last unit stay gathered from its forward to its
backward, because the loss may multiply by the head's weight after the model's forward has ended.

FSDP does not cast the weights for the computation (`param_dtype=None`), because Isotype's ops
choose the dtype of their matrix products themselves. Gradients are summed, not averaged, in the
dtype `precision.reduce`. FSDP would cast the sum to the weights' dtype, so `UnitGradients` reads
the sum before this cast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ..dtypes import format_dtype, to_torch
from ..errors import UsageError
from ..precision.apply import denoiser_blocks, inner_model, is_block, is_quantised
from ..precision.parts import Part, local_part
from .world import World


class Sharding:
    """Describes how a model is distributed over the processes, and returns its summed gradients.
    Implements `precision.accumulate.ShardedGradients`.

    mesh      FSDP's device mesh of the processes; a reference is kept, because a process group
              closes its connections when it is freed
    shard_count  the number of processes that share each weight
    replica_count  the number of copies of the whole model; each copy is split over `shard_count`
                   processes
    """

    def __init__(
        self, model: nn.Module, units: list[Any], world: World, *, mesh: Any, replica_count: int
    ) -> None:
        """All processes call this together. `units` is the result of `keep_part`."""
        self.mesh = mesh
        self.shard_count = world.size // replica_count
        self.replica_count = replica_count
        _gather_all_units(model, units)
        self._sent: list[torch.dtype] = []
        self._sums: dict[int, UnitGradients] = {}
        for unit in units:
            sums = UnitGradients(self.shard_count, self._sent)
            unit.set_all_reduce_hook(sums)
            # sums, not means, because losses are divided by the tokens of all processes; and gloo
            # cannot sum with a factor
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
            # the parameters of this unit, without those of units inside it
            for group in unit._get_fsdp_state()._fsdp_param_groups:
                self._sums |= {id(parameter.sharded_param): sums for parameter in group.fsdp_params}

    def take(self, parameter: nn.Parameter) -> Tensor:
        return self._sums[id(parameter)].take(parameter)

    def sent_dtypes(self) -> list[torch.dtype]:
        sent, self._sent[:] = list(self._sent), []
        return sent


class UnitGradients:
    """Contains the gradients of one unit of the model, such as a decoder layer, summed over the
    processes. The gradients keep the dtype in which the processes exchanged them. For each
    parameter, the object holds the rows that belong to this process.
    """

    def __init__(self, shard_count: int, sent: list[torch.dtype]) -> None:
        self._shard_count = shard_count
        self._sent = sent
        self._flat: Tensor | None = None
        self._offset = 0

    def __call__(self, flat: Tensor) -> None:
        """FSDP calls this hook with one tensor that contains the gradients of the whole unit. After
        the call, FSDP casts this tensor and splits it into the gradients of the parameters.
        """
        self._flat = flat
        self._offset = 0
        self._sent.append(flat.dtype)

    def take(self, parameter: nn.Parameter) -> Tensor:
        """Returns the summed gradient of a parameter. FSDP asks for the gradients of a unit in the
        order in which `flat` contains them. In `flat`, each gradient is padded, so that it can be
        split into equal parts.
        """
        assert self._flat is not None, "the hook runs before the gradients are handed out"
        part = local_part(parameter)
        gradient = self._flat[self._offset : self._offset + part.numel()].view(part.shape)
        self._offset += math.ceil(parameter.shape[0] / self._shard_count) * (
            parameter.numel() // parameter.shape[0]
        )
        return gradient


def create_mesh(world: World, device: torch.device, *, nodes: int = 1) -> Any:
    """Creates FSDP's device mesh of the processes. All processes call this function together.

    nodes  number of machines; if it is more than 1, the processes of each machine share one whole
           model, and the gradients are summed over the machines (hybrid)
    """
    from torch.distributed.device_mesh import init_device_mesh

    if nodes == 1:
        shape = {"shard": world.size}
    else:
        shape = {"replicate": nodes, "shard": world.size // nodes}
    return init_device_mesh(device.type, tuple(shape.values()), mesh_dim_names=tuple(shape))


def local_part_of_mesh(mesh: Any, on_loaded: Callable[[nn.Module], None]) -> Part:
    """Returns the part of the model that this process keeps. The model is split over the processes
    of `mesh`.

    on_loaded  a function that is called with the model before it is cast
    """
    shard_dim = mesh.ndim - 1  # in a hybrid mesh the first dimension is the machines
    return Part(mesh.get_local_rank(shard_dim), mesh.size(shard_dim), on_loaded)


def keep_part(model: nn.Module, mesh: Any, part: Part, *, reduce: str) -> list[nn.Module]:
    """Splits `model` in place into units, such as its decoder layers. This process keeps only its
    rows of each unit. The adapter, the ops, the precision and recomputation are already installed
    in the model.

    The weights may be on the CPU or in memory-mapped files. From a memory-mapped file, only the
    rows of this process are read. For each unit, this process's part is moved to the mesh's device,
    and the memory of the whole unit is freed. The processes do not exchange any data.

    reduce  the dtype in which gradients are summed
    ->      the units, which `Sharding` needs
    Raises  UsageError if a unit has trained weights of two dtypes, or if two units share a weight
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    inner = inner_model(model)
    policy = MixedPrecisionPolicy(
        param_dtype=None, reduce_dtype=to_torch(reduce), cast_forward_inputs=False
    )
    states = {
        full_name: state
        for full_name, p in model.named_parameters()
        if (state := getattr(p, "quant_state", None)) is not None
    }
    assigned_ids: set[int] = set()
    units = []
    for full_name, module in [*find_units(inner), ("the model's own weights", inner)]:
        own_parameters = {
            name: p for name, p in module.named_parameters() if id(p) not in assigned_ids
        }
        refuse_two_dtypes(full_name, own_parameters)
        if module is not inner:
            refuse_weights_of_another_unit(full_name, module, assigned_ids)
        for parameter in own_parameters.values():
            if parameter.device.type == "cpu" and not is_quantised(parameter):
                # fully_shard moves whole weights to the device
                parameter.data = part.cast_rows(parameter.data, parameter.dtype)
        # the root holds the head
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=module is not inner)
        assigned_ids |= {id(p) for p in module.parameters()}
        units.append(module)
    _attach_quant_states(model, states)
    return units


def find_units(inner: Any) -> list[tuple[str, nn.Module]]:
    """Returns a pair (name, module) for every decoder layer or denoiser block. The embedding is
    included if it does not share its weight with the head.
    """
    denoiser_block_ids = {id(block) for block in denoiser_blocks(inner)}
    if denoiser_block_ids:
        return [
            (full_name, module)
            for full_name, module in inner.named_modules()
            if id(module) in denoiser_block_ids
        ]
    units: list[tuple[str, nn.Module]] = []
    list_path = ""
    for full_name, module in inner.named_modules():
        if isinstance(module, nn.ModuleList) and not (
            list_path and full_name.startswith(list_path)
        ):
            blocks = [
                (f"{full_name}.{name}", block)
                for name, block in module.named_children()
                if is_block(block)
            ]
            units += blocks
            # experts and other lists inside a layer belong to the layer's unit, because the rows
            # decide which of them run
            list_path = f"{full_name}." if blocks else list_path
    if hasattr(inner, "get_input_embeddings"):
        embedding = inner.get_input_embeddings()
        head = inner.get_output_embeddings()
        if (
            type(embedding) is nn.Embedding
            and head is not None
            and getattr(head, "weight", None) is not embedding.weight
        ):
            units.append(("the embedding", embedding))
    return units


def refuse_two_dtypes(unit: str, parameters: dict[str, nn.Parameter]) -> None:
    """Raises UsageError if a unit has trained weights of two dtypes, because FSDP sums the
    gradients of a unit in one tensor. The message names two weights with different dtypes.
    """
    first: dict[torch.dtype, str] = {}
    for full_name, parameter in parameters.items():
        if parameter.requires_grad:
            first.setdefault(parameter.dtype, full_name)
    if len(first) > 1:
        (first_dtype, a), (second_dtype, b) = list(first.items())[:2]
        raise UsageError(
            f"parallel.kind: shard: {unit} has trained weights of two dtypes, {a} in {format_dtype(first_dtype)}"
            f" and {b} in {format_dtype(second_dtype)}",
            fix="precision.trainable: fp32, or parallel.kind: replicate",
        )


def refuse_weights_of_another_unit(unit: str, module: nn.Module, other_unit_ids: set[int]) -> None:
    """Raises UsageError if a weight of this unit is also a weight of an earlier unit. Examples are
    the weights of the shared layers of Zamba 2. The message names the weight.
    """
    if shared := next(
        (f"{unit}.{name}" for name, p in module.named_parameters() if id(p) in other_unit_ids), None
    ):
        raise UsageError(
            f"parallel.kind: shard: {shared} is a weight of another layer too, and a weight belongs"
            " to one unit",
            fix="parallel.kind: replicate",
        )


def gather_tensors(
    model: nn.Module, world: World, sharding: Sharding, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Gathers every trained tensor of a sharded model. Returns a dictionary that maps each name to
    the whole tensor, on the CPU and in `dtype`. Only the first process gets these tensors; the
    other processes get an empty dictionary.

    All processes call this function. A tensor that has several names is gathered once.
    """
    gathered: dict[int, Tensor | None] = {}
    result = {}
    for full_name, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            continue
        if id(parameter) not in gathered:
            part = local_part(parameter).detach().to(dtype).cpu()
            full_tensor = torch.empty(parameter.shape, dtype=dtype) if world.is_first else None
            if world.rank < sharding.shard_count:
                world.collect(
                    part, full_tensor, rows_by_rank(parameter.shape[0], sharding.shard_count)
                )
            gathered[id(parameter)] = full_tensor
        tensor = gathered[id(parameter)]
        if tensor is not None:
            result[full_name] = tensor
    return result


def rows_by_rank(row_count: int, shard_count: int) -> list[int]:
    """Returns how many rows of a tensor each process holds. The numbers are equal, except that the
    last ranks may hold fewer rows or none.
    """
    rows_per_rank = math.ceil(row_count / shard_count)
    return [
        max(0, min(row_count, (rank + 1) * rows_per_rank) - min(row_count, rank * rows_per_rank))
        for rank in range(shard_count)
    ]


@contextmanager
def replace_in_state_dict(model: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Returns a context manager within which `model.state_dict()` contains these whole tensors and
    not the sharded tensors.
    """

    def replace_tensors(
        module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any
    ) -> None:
        for full_name in state:
            state[full_name] = tensors.get(full_name, state[full_name])

    handle = model.register_state_dict_post_hook(replace_tensors)
    try:
        yield
    finally:
        handle.remove()


def _attach_quant_states(model: nn.Module, states: Mapping[str, Any]) -> None:
    """FSDP replaces each 4-bit weight by another parameter, but does not copy its quantisation
    state. This function attaches the state to the new parameter. Without the state, the parameter
    would not be recognised as a 4-bit weight.
    """
    for full_name, parameter in model.named_parameters():
        if full_name in states:
            parameter.quant_state = states[full_name]  # type: ignore[attr-defined]  # bitsandbytes keeps it on the parameter


def _gather_all_units(model: nn.Module, units: list[Any]) -> None:
    """Gathers every unit once. After that, FSDP reuses the same tensors for the gathered weights.

    This function also gives the gathered 4-bit weights their scales. Every process has the scales
    of all these weights in memory.
    """
    states = {
        full_name: state
        for full_name, p in model.named_parameters()
        if (state := getattr(p, "quant_state", None)) is not None
    }
    for unit in units:
        unit.unshard()
        _attach_quant_states(model, states)
        unit.reshard()
        for group in unit._get_fsdp_state()._fsdp_param_groups:
            # the observer must not count these transfers as arithmetic of the step
            for work in ("unshard", "wait_for_unshard", "post_backward"):
                setattr(group, work, partial(_run_unobserved, getattr(group, work)))


def _run_unobserved(work: Callable[..., Any], *args: Any, **options: Any) -> Any:
    with _disable_current_modes():
        return work(*args, **options)
