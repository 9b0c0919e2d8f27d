"""Implements the setting `model.offload: blocks`. The frozen weights of a model's blocks are kept
in host memory. The weights of a block are copied to the device only while this block computes.

A block runs in forward, and again during backward to recompute its activations. When it begins, its
weights are copied to the device, unless this copy has already begun. The weights of all other
blocks are then removed from the device. After that, the copy of the next block's weights begins. In
backward, the blocks run in the reverse order. So the device holds at most two blocks at a time.
Trained weights, buffers and weights below 16 KiB always stay on the device.

Every block recomputes its activations. Otherwise the tensors that autograd saves would keep the
block's weights on the device until backward. The attribute `.data` of a parameter is set to a host
tensor or to a device tensor, but the parameter remains the same object. Because the object stays
the same, autograd and packed weights still refer to the right parameters, and code that reads
weights between steps finds them.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...config.schema import RunConfig, TrainSection
from ...environment.hardware import Hardware
from ...errors import UsageError, raise_first_refusal
from ...precision.apply import inner_model
from ...wording import format_binary_bytes
from .offload import MIN_OFFLOADED_BYTES, StreamCopier
from .outline import quantisation_tensors
from .recomputation import AUTO, LAYERS, NONE, PREPARE_ATTRIBUTE, checkpointable_layers

BLOCKS = "blocks"
OFFLOAD_SETTING = "model.offload: blocks"
_BLOCKS_ATTRIBUTE = "_isotype_blocks"  # attribute of a model whose blocks are kept in host memory
_ALIGNMENT = (
    256  # bytes: where a tensor begins in a block's memory, as PyTorch's own allocations do
)
# GB/s in one direction between host and device, as PCIe 3.0, 4.0 and 5.0 x16 are specified; pinned
# copies of large blocks reach 85% of it
_PCIE_SPEED = {
    "pascal": 16,
    "volta": 16,
    "turing": 16,
    "vega": 16,
    "hopper": 64,
    "blackwell": 64,
    "cdna3": 64,
    "cdna4": 64,
}
_PCIE_4_SPEED = 32  # GB/s, for a card whose generation is unknown
_COPY_EFFICIENCY = 0.85  # measured share of the bus's speed
_MATMUL_EFFICIENCY = 0.80  # measured share of the card's peak FLOPS


class Block:
    """The frozen weights of one block. The weights are stored in one contiguous piece of host
    memory.

    tensors  parameters of the model, and the scales of packed parameters; their `.data` is set to a
             host tensor or a device tensor
    device   the device of the run; in a memory plan it is meta, because a plan only counts bytes
             and copies nothing
    """

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        self.tensors = tensors
        self.device = device
        self.offsets = list[int]()
        self.bytes = 0
        for tensor in tensors:
            self.offsets.append(self.bytes)
            self.bytes += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        self.device_memory: Tensor | None = None
        self.pending_copy: Any = None
        if device.type != "meta" and self.bytes:
            self.host_memory = allocate_pinned(self.bytes, device)
            self.host_tensors = self._split(self.host_memory)
            for tensor, host in zip(tensors, self.host_tensors):
                tensor.data = host.copy_(tensor.data)

    def _split(self, memory: Tensor) -> list[Tensor]:
        return [
            memory[start : start + t.numel() * t.element_size()].view(t.dtype).view(t.shape)
            for start, t in zip(self.offsets, self.tensors)
        ]

    def fetch(self, start_copy: Callable[[Tensor, Tensor], Any]) -> None:
        """Begins to copy the weights to the device."""
        if self.device_memory is None and self.bytes:
            # allocated on the compute stream, which frees it too; the copy waits for the memory's
            # last user
            self.device_memory = torch.empty(self.bytes, dtype=torch.uint8, device=self.device)
            self.pending_copy = start_copy(self.device_memory, self.host_memory)
            for tensor, part in zip(self.tensors, self._split(self.device_memory)):
                tensor.data = part

    def wait_for_copy(self) -> None:
        """Makes all work that is sent to the device later wait until the copy is complete."""
        if self.pending_copy is not None:
            self.pending_copy.wait()
            self.pending_copy = None

    def evict(self) -> None:
        """Frees the memory that the weights use on the device."""
        if self.device_memory is not None:
            # an unfinished copy would write to memory that the next tensor gets
            self.wait_for_copy()
            for tensor, host in zip(self.tensors, self.host_tensors):
                tensor.data = host
            self.device_memory = None

    def __del__(self) -> None:
        if self.device.type == "cuda" and hasattr(self, "host_memory"):
            with suppress(Exception):  # when the interpreter exits, CUDA may be shut down already
                # an unfinished copy may still read these pages
                torch.cuda.synchronize(self.device)
                torch.cuda.cudart().cudaHostUnregister(self.host_memory.data_ptr())


def allocate_pinned(size: int, device: torch.device) -> Tensor:
    """Allocates a tensor uint8[size] in whole pages of host memory. The memory is pinned if the
    device is a GPU. PyTorch itself would round the size of pinned memory up to a power of two. For
    a block of Flux, this would take 50% more memory. Raises UsageError.
    """
    memory = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
    if device.type == "cuda" and int(
        torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size, 0)
    ):
        raise UsageError(
            f"{OFFLOAD_SETTING}: the system pins no {format_binary_bytes(size)} more of host memory",
            fix="a base of fewer bits, or model.offload: none",
        )
    return memory


class FrozenBlocks:
    """All blocks of a model whose weights are kept in host memory. The weights of some of these
    blocks may also be on the device.

    start_copy  a function that begins a copy, as in `HostMemory`; by default a StreamCopier for a
                GPU, and a synchronous copy for another device
    """

    def __init__(
        self, blocks: Sequence[Block], start_copy: Callable[[Tensor, Tensor], Any] | None = None
    ) -> None:
        self.blocks = blocks
        self.run_order = list[Block]()
        self.start_copy: Callable[[Tensor, Tensor], Any] = start_copy or (
            StreamCopier() if blocks[0].device.type == "cuda" else _copy_synchronously
        )

    def prepare(self, block: Block, *_: Any) -> None:
        """Copies the weights of a block to the device. This method is also registered as the
        block's forward pre-hook.
        """
        if block not in self.run_order:
            self.run_order.append(block)
        position = self.run_order.index(block) + (
            -1 if torch._C._current_graph_task_id() != -1 else 1
        )
        next_block = self.run_order[position] if 0 <= position < len(self.run_order) else None
        for other_block in self.blocks:
            if other_block is not block and other_block is not next_block:
                other_block.evict()
        block.fetch(self.start_copy)
        block.wait_for_copy()
        if next_block is not None:
            next_block.fetch(self.start_copy)


def _copy_synchronously(target: Tensor, source: Tensor) -> None:
    target.copy_(source)


def offload_blocks(
    model: nn.Module,
    device: torch.device,
    start_copy: Callable[[Tensor, Tensor], Any] | None = None,
) -> nn.Module:
    """Moves the frozen weights of each block to host memory, and everything else to the device.
    Returns the model. Call it before `apply_checkpointing`.

    model       the model on the CPU, with `requires_grad` and dtypes as in training. For a memory
                plan, the model is on the meta device instead of the CPU. The plan computes the
                memory of a step without the blocks and adds the bytes of two blocks
    start_copy  as in FrozenBlocks
    Raises      UsageError for a model without blocks
    """
    layers = checkpointable_layers(model)
    if not layers:
        raise UsageError(
            f"{OFFLOAD_SETTING}: this architecture marks no blocks", fix="model.offload: none"
        )
    use_counts = Counter(id(p) for layer in layers for p in dict.fromkeys(layer.parameters()))
    blocks = []
    for layer in layers:
        # a parameter that several layers share stays on the device
        frozen = [p for p in layer.parameters() if not p.requires_grad and use_counts[id(p)] == 1]
        large_tensors = [
            t
            for p in frozen
            for t in (p, *quantisation_tensors(p))
            if t.is_contiguous() and t.numel() * t.element_size() >= MIN_OFFLOADED_BYTES
        ]
        blocks.append(Block(large_tensors, device))
    offloaded_ids = {id(tensor) for block in blocks for tensor in block.tensors}
    tensors = [t for p in model.parameters() for t in (p, *quantisation_tensors(p))]
    for tensor in (*tensors, *model.buffers()):
        if id(tensor) not in offloaded_ids and device.type != "meta":
            tensor.data = tensor.data.to(device)
    inner_model(model).__dict__[_BLOCKS_ATTRIBUTE] = frozen_blocks = FrozenBlocks(
        blocks, start_copy
    )
    for layer, block in zip(layers, blocks) if device.type != "meta" else ():
        layer.__dict__[PREPARE_ATTRIBUTE] = prepare = partial(frozen_blocks.prepare, block)
        layer.register_forward_pre_hook(prepare)
    return model


def apply_offload(model: nn.Module, offload: str, device: torch.device) -> nn.Module:
    """If the setting `model.offload` is `blocks`, moves the model's blocks to host memory, unless
    `device` is a CPU. Returns the model.
    """
    if offload == BLOCKS and device.type != "cpu":
        return offload_blocks(model, device)
    return model


def get_frozen_blocks(model: nn.Module) -> FrozenBlocks | None:
    """Returns the blocks of a model that are kept in host memory. Returns None if the model has no
    such blocks.
    """
    frozen_blocks: FrozenBlocks | None = inner_model(model).__dict__.get(_BLOCKS_ATTRIBUTE)
    return frozen_blocks


def offloaded_tensors(model: nn.Module) -> list[Tensor]:
    """Returns the tensors of a model that are kept in host memory."""
    frozen_blocks = get_frozen_blocks(model)
    if frozen_blocks is None:
        return []
    return [tensor for block in frozen_blocks.blocks for tensor in block.tensors]


def check_offload(config: RunConfig, *, device_type: str) -> None:
    """Checks `model.offload` before anything is loaded. Raises UsageError if the blocks cannot be
    kept in host memory because of another setting.
    """
    if config.model.offload != BLOCKS:
        return
    train, has_all_layers = (
        config.train,
        config.train.gradient_checkpointing != NONE and config.train.checkpointed_layers == "all",
    )
    settings = (
        f"train.gradient_checkpointing: {train.gradient_checkpointing}, train.checkpointed_layers:"
        f" {train.checkpointed_layers}"
    )
    raise_first_refusal(
        (
            config.adapter.kind == "none",
            f"{OFFLOAD_SETTING} moves frozen weights, and adapter.kind: none trains every one",
            "adapter.kind: lora",
        ),
        (
            device_type == "cpu",
            f"{OFFLOAD_SETTING} moves weights to host memory, and on a CPU they are there already",
            "model.offload: none",
        ),
        (
            not has_all_layers,
            f"{OFFLOAD_SETTING} with {settings}: a block that does not recompute keeps its weights for backward",
            "train.gradient_checkpointing: layers, train.checkpointed_layers: all",
        ),
    )


def effective_train_settings(config: RunConfig) -> TrainSection:
    """Returns the settings of training. If the blocks are kept in host memory and
    `train.gradient_checkpointing` is `auto`, the returned settings recompute all layers.
    """
    if config.model.offload == BLOCKS and config.train.gradient_checkpointing == AUTO:
        return config.train.model_copy(update={"gradient_checkpointing": LAYERS})
    return config.train


def refuse_without_host_memory(block_bytes: int, available_bytes: int, processes: int = 1) -> None:
    """Raises UsageError if the blocks of all processes do not fit into host memory.

    block_bytes      bytes of the blocks of one process
    available_bytes  bytes of the machine's memory; 0 if unknown
    """
    if available_bytes and block_bytes * processes > available_bytes:
        if processes > 1:
            requirement = (
                f"{processes} processes with {format_binary_bytes(block_bytes)} of blocks each"
            )
        else:
            requirement = f"{format_binary_bytes(block_bytes)} of blocks"
        raise UsageError(
            f"{OFFLOAD_SETTING}: {requirement} do not fit into {format_binary_bytes(available_bytes)} of host memory",
            fix="a base of fewer bits: precision.base: fp8 or nf4",
        )


@dataclass(frozen=True, kw_only=True)
class OffloadPlan:
    """The cost of a step if the blocks are kept in host memory.

    host    bytes of the blocks in host memory
    held    the largest number of bytes of blocks that are on the device at the same time
    share   the largest share of the frozen weights that is on the device at the same time
    moved   bytes that a step copies from the host to the device
    time    the estimated time of a step, divided by the time of a step with all weights on the
            device; None if the device's speed is not published
    """

    host: int
    held: int
    share: float
    moved: int
    time: float | None

    def __str__(self) -> str:
        if self.time is None:
            time = ""
        else:
            time = f", {self.time:.2f} times the time without offloading (estimated)"
        return (
            f"blocks: {format_binary_bytes(self.host)} in host memory, {format_binary_bytes(self.held)} on the device at a time"
            f" ({self.share:.0%} of the frozen weights are there), {format_binary_bytes(self.moved)}"
            f" moved per step{time}"
        )


def plan_offload(
    model: nn.Module,
    hardware: Hardware,
    *,
    micro_batches: int,
    compute: str,
    flops: Callable[[nn.Module], Sequence[float]],
) -> OffloadPlan | None:
    """Estimates, for one process, what it costs to keep a model's blocks in host memory. Returns
    None if no blocks of the model are kept in host memory.

    flops  a function that returns the FLOPs of each block's forward on a micro-batch. The backward
           of a block, including the recomputation of its forward, needs twice as many FLOPs as the
           forward.
    The copy of a block happens at the same time as the computation of the previous block, so the
    longer of the two times is counted. The estimate does not count the time of norms and of layers
    outside of the blocks, because this time does not depend on where the blocks are kept.
    """
    frozen_blocks = get_frozen_blocks(model)
    if frozen_blocks is None:
        return None
    sizes = [block.bytes for block in frozen_blocks.blocks]
    frozen_bytes = sum(
        t.numel() * t.element_size()
        for p in model.parameters()
        if not p.requires_grad
        for t in (p, *quantisation_tensors(p))
    )
    held_bytes = offload_buffer_bytes(model)
    moved_bytes = (2 * sum(sizes) - sizes[0] - sizes[-1]) * micro_batches
    peak_tflops = hardware.peak_tflops.get(compute)
    time = None
    if peak_tflops:
        block_seconds = [
            block_flops / (peak_tflops * 1e12 * _MATMUL_EFFICIENCY) for block_flops in flops(model)
        ]
        copy_seconds = [
            size / (_PCIE_SPEED.get(hardware.generation, _PCIE_4_SPEED) * 1e9 * _COPY_EFFICIENCY)
            for size in sizes
        ]
        forward = sum(map(max, block_seconds, [*copy_seconds[1:], 0.0]))
        backward = sum(
            max(2 * seconds, copy_time)
            for seconds, copy_time in zip(block_seconds, [0.0, *copy_seconds[:-1]], strict=True)
        )
        time = (forward + backward) / (3 * sum(block_seconds))
    return OffloadPlan(
        host=sum(sizes),
        held=held_bytes,
        share=(frozen_bytes - sum(sizes) + held_bytes) / frozen_bytes,
        moved=moved_bytes,
        time=time,
    )


def offload_buffer_bytes(model: nn.Module) -> int:
    """Returns the bytes of the two largest blocks that are kept in host memory. Returns 0 if no
    blocks are kept in host memory.
    """
    frozen_blocks = get_frozen_blocks(model)
    if frozen_blocks is None:
        return 0
    return sum(sorted(block.bytes for block in frozen_blocks.blocks)[-2:])
