"""`model.offload: blocks`: the frozen weights of a model's blocks wait in host memory, and are on
the device while their block works.

A block that begins, in a forward or in its recompute inside backward, has its weights copied unless
that has begun already; those of every other block are given up, and the copy of the block that will
follow begins: the next in a forward, the one before in a backward. So at most two blocks are on the
device. What trains, buffers and weights below 16 KiB stay there.

Every block recomputes: a block's saved tensors would hold its weights until backward. A weight that
is away is the host's tensor, so that what reads weights between steps finds them. Autograd and a
packed weight's state hold the model's own tensors, whose `.data` is exchanged.
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
from ...errors import UsageError, refuse_where
from ...precision.apply import inner_model
from ...wording import format_binary_bytes
from .offload import SMALLEST, Streamed
from .outline import scales_of
from .recomputation import AUTO, ENTER, LAYERS, NONE, checkpointable

BLOCKS = "blocks"
KEY = "model.offload: blocks"
_STATE = "_isotype_blocks"
_ALIGNED = 256  # bytes: where a tensor begins in a block's memory, as PyTorch's own allocations do
# GB/s one way between host and device: PCIe 3.0, 4.0 and 5.0 x16 as specified, of which pinned
# copies of large blocks take 85%
_PCIE = {
    "pascal": 16,
    "volta": 16,
    "turing": 16,
    "vega": 16,
    "hopper": 64,
    "blackwell": 64,
    "cdna3": 64,
    "cdna4": 64,
}
_PCIE_4 = 32
_COPY = 0.85
_PRODUCT = 0.80


class Block:
    """The frozen weights of one block, which begin one behind the other in one piece of memory.

    tensors  the model's parameters and the scales of packed ones, whose `.data` this exchanges
    device   meta in a plan, which counts them and moves nothing
    """

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        self.tensors = tensors
        self.device = device
        self.starts = list[int]()
        self.bytes = 0
        for tensor in tensors:
            self.starts.append(self.bytes)
            self.bytes += -(-tensor.numel() * tensor.element_size() // _ALIGNED) * _ALIGNED
        self.here: Tensor | None = None
        self.copied: Any = None
        if device.type != "meta" and self.bytes:
            self.memory = pinned(self.bytes, device)
            self.host = self._parts(self.memory)
            for tensor, host in zip(tensors, self.host):
                tensor.data = host.copy_(tensor.data)

    def _parts(self, memory: Tensor) -> list[Tensor]:
        return [
            memory[start : start + t.numel() * t.element_size()].view(t.dtype).view(t.shape)
            for start, t in zip(self.starts, self.tensors)
        ]

    def fetch(self, copies: Callable[[Tensor, Tensor], Any]) -> None:
        """Begins the copy to the device."""
        if self.here is None and self.bytes:
            # allocated on the compute stream, which frees it too; the copy waits for the memory's
            # last user
            self.here = torch.empty(self.bytes, dtype=torch.uint8, device=self.device)
            self.copied = copies(self.here, self.memory)
            for tensor, part in zip(self.tensors, self._parts(self.here)):
                tensor.data = part

    def arrive(self) -> None:
        """Makes later work wait for the copy."""
        if self.copied is not None:
            self.copied.wait()
            self.copied = None

    def leave(self) -> None:
        if self.here is not None:
            # also where nobody came: the copy may still be writing what the next tensor would get
            self.arrive()
            for tensor, host in zip(self.tensors, self.host):
                tensor.data = host
            self.here = None

    def __del__(self) -> None:
        if self.device.type == "cuda" and hasattr(self, "memory"):
            with suppress(Exception):  # at the interpreter's end CUDA may be gone
                # a copy that nobody waited for may still read these pages
                torch.cuda.synchronize(self.device)
                torch.cuda.cudart().cudaHostUnregister(self.memory.data_ptr())


def pinned(size: int, device: torch.device) -> Tensor:
    """uint8[size] of pages of its own, pinned where the device is a GPU: PyTorch's pinned memory is
    rounded up to a power of two, half as much again for a block of Flux. Raises UsageError.
    """
    memory = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
    if device.type == "cuda" and int(
        torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size, 0)
    ):
        raise UsageError(
            f"{KEY}: the system pins no {format_binary_bytes(size)} more of host memory",
            fix="a base of fewer bits, or model.offload: none",
        )
    return memory


class FrozenBlocks:
    """All blocks of a model. `copies`: begins a copy, as in `HostMemory`; without it a GPU's run on
    a stream of their own, and others are made on the spot.
    """

    def __init__(
        self, blocks: Sequence[Block], copies: Callable[[Tensor, Tensor], Any] | None = None
    ) -> None:
        self.blocks = blocks
        self.order = list[Block]()
        self.copies: Callable[[Tensor, Tensor], Any] = copies or (
            Streamed() if blocks[0].device.type == "cuda" else _at_once
        )

    def enter(self, block: Block, *_: Any) -> None:
        """Brings the weights of a block; also as its forward pre-hook."""
        if block not in self.order:
            self.order.append(block)
        at = self.order.index(block) + (-1 if torch._C._current_graph_task_id() != -1 else 1)
        following = self.order[at] if 0 <= at < len(self.order) else None
        for other in self.blocks:
            if other is not block and other is not following:
                other.leave()
        block.fetch(self.copies)
        block.arrive()
        if following is not None:
            following.fetch(self.copies)


def _at_once(to: Tensor, source: Tensor) -> None:
    to.copy_(source)


def put_blocks(
    model: nn.Module, device: torch.device, copies: Callable[[Tensor, Tensor], Any] | None = None
) -> nn.Module:
    """Puts the frozen weights of each block into host memory and everything else on the device;
    returns the model.

    model   on the CPU, frozen where it is, in its precision, before `apply_checkpointing`; or on
            the meta device, for a plan, which counts a step without the blocks and adds the bytes
            of two
    copies  as in FrozenBlocks
    Raises  UsageError for a model without blocks
    """
    layers = checkpointable(model)
    if not layers:
        raise UsageError(f"{KEY}: this architecture marks no blocks", fix="model.offload: none")
    uses = Counter(id(p) for layer in layers for p in dict.fromkeys(layer.parameters()))
    blocks = []
    for layer in layers:
        # a shared one stays
        frozen = [p for p in layer.parameters() if not p.requires_grad and uses[id(p)] == 1]
        large = [
            t
            for p in frozen
            for t in (p, *scales_of(p))
            if t.is_contiguous() and t.numel() * t.element_size() >= SMALLEST
        ]
        blocks.append(Block(large, device))
    away = {id(tensor) for block in blocks for tensor in block.tensors}
    beside = [t for p in model.parameters() for t in (p, *scales_of(p))]
    for tensor in (*beside, *model.buffers()):
        if id(tensor) not in away and device.type != "meta":
            tensor.data = tensor.data.to(device)
    inner_model(model).__dict__[_STATE] = found = FrozenBlocks(blocks, copies)
    for layer, block in zip(layers, blocks) if device.type != "meta" else ():
        layer.__dict__[ENTER] = enters = partial(found.enter, block)
        layer.register_forward_pre_hook(enters)
    return model


def as_set(model: nn.Module, offload: str, device: torch.device) -> nn.Module:
    """The model with its blocks in host memory where `model.offload` says so and `device` is a GPU,
    or stands for one.
    """
    if offload == BLOCKS and device.type != "cpu":
        return put_blocks(model, device)
    return model


def blocks_of(model: nn.Module) -> FrozenBlocks | None:
    """What `put_blocks` made of this model."""
    found: FrozenBlocks | None = inner_model(model).__dict__.get(_STATE)
    return found


def away_from(model: nn.Module) -> list[Tensor]:
    """Its tensors that wait in host memory."""
    found = blocks_of(model)
    if found is None:
        return []
    return [tensor for block in found.blocks for tensor in block.tensors]


def check_offload(config: RunConfig, *, device_type: str) -> None:
    """Raises  UsageError for settings with which blocks cannot wait in host memory, before anything
    is loaded.
    """
    if config.model.offload != BLOCKS:
        return
    train, every = (
        config.train,
        config.train.gradient_checkpointing != NONE and config.train.checkpointed_layers == "all",
    )
    given = (
        f"train.gradient_checkpointing: {train.gradient_checkpointing}, train.checkpointed_layers:"
        f" {train.checkpointed_layers}"
    )
    refuse_where(
        (
            config.adapter.kind == "none",
            f"{KEY} moves frozen weights, and adapter.kind: none trains every one",
            "adapter.kind: lora",
        ),
        (
            device_type == "cpu",
            f"{KEY} moves weights to host memory, and on a CPU they are there already",
            "model.offload: none",
        ),
        (
            not every,
            f"{KEY} with {given}: a block that does not recompute keeps its weights for backward",
            "train.gradient_checkpointing: layers, train.checkpointed_layers: all",
        ),
    )


def recomputing(config: RunConfig) -> TrainSection:
    """The settings of training, whose `auto` recomputes all layers where blocks are in host memory."""
    if config.model.offload == BLOCKS and config.train.gradient_checkpointing == AUTO:
        return config.train.model_copy(update={"gradient_checkpointing": LAYERS})
    return config.train


def refuse_without_host_memory(needed: int, has: int, processes: int = 1) -> None:
    """needed  bytes of blocks of one process;  has  bytes of the machine, 0 where unknown. Raises
    UsageError.
    """
    if has and needed * processes > has:
        if processes > 1:
            each = f"{processes} processes with {format_binary_bytes(needed)} of blocks each"
        else:
            each = f"{format_binary_bytes(needed)} of blocks"
        raise UsageError(
            f"{KEY}: {each} do not fit into {format_binary_bytes(has)} of host memory",
            fix="a base of fewer bits: precision.base: fp8 or nf4",
        )


@dataclass(frozen=True, kw_only=True)
class OffloadPlan:
    """What a step with blocks in host memory moves; bytes, counted.

    host    of the blocks, in host memory
    held    the most of them on the device at a time
    share   of all frozen weights, what of them is on the device at most
    moved   from the host to the device in a step
    time    of a step beside the same with every weight on the device, counted; None where the
            device's speed is not published
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
            time = f", {self.time:.2f} times the time without, counted"
        return (
            f"blocks: {format_binary_bytes(self.host)} in host memory, {format_binary_bytes(self.held)} on the device at a time"
            f" ({self.share:.0%} of the frozen weights are there), {format_binary_bytes(self.moved)} moved a"
            f" step{time}"
        )


def plan_offload(
    model: nn.Module,
    hardware: Hardware,
    *,
    micro_batches: int,
    compute: str,
    flops: Callable[[nn.Module], Sequence[float]],
) -> OffloadPlan | None:
    """Of an outline, for one process; None where its weights stay on the device.

    flops  of each block's forward on a micro-batch; its backward takes twice as many, with the
           recompute
    A block's copy runs beside the work of the block before it, and the longer of the two counts.
    Norms and what is outside of blocks are counted as no time: they are the same in both, and would
    hide more of the copies.
    """
    found = blocks_of(model)
    if found is None:
        return None
    sizes = [block.bytes for block in found.blocks]
    frozen = sum(
        t.numel() * t.element_size()
        for p in model.parameters()
        if not p.requires_grad
        for t in (p, *scales_of(p))
    )
    held = held_at_most(model)
    moved = (2 * sum(sizes) - sizes[0] - sizes[-1]) * micro_batches
    peak = hardware.peak_tflops.get(compute)
    time = None
    if peak:
        work = [one / (peak * 1e12 * _PRODUCT) for one in flops(model)]
        copies = [size / (_PCIE.get(hardware.generation, _PCIE_4) * 1e9 * _COPY) for size in sizes]
        forward = sum(map(max, work, [*copies[1:], 0.0]))
        backward = sum(
            max(2 * seconds, copy) for seconds, copy in zip(work, [0.0, *copies[:-1]], strict=True)
        )
        time = (forward + backward) / (3 * sum(work))
    return OffloadPlan(
        host=sum(sizes),
        held=held,
        share=(frozen - sum(sizes) + held) / frozen,
        moved=moved,
        time=time,
    )


def held_at_most(model: nn.Module) -> int:
    """Bytes of the two largest blocks of a model whose blocks are in host memory; 0 of others."""
    found = blocks_of(model)
    if found is None:
        return 0
    return sum(sorted(block.bytes for block in found.blocks)[-2:])
