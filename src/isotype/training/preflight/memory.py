"""PF011: the run will not fit into the device's memory.

Running the step on tensors without data takes seconds, so it is done only where a generous bound on it comes near the memory there is.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from ...dtypes import to_torch
from ...finding import Finding, Place, Severity
from ...precision.apply import is_quantised
from ..batches import MULTIPLE
from ..memory import peak_memory
from ..memory_plan import optimizer_bytes, outline, plan_memory
from ..model import load_architecture
from ..plan import shown
from .subject import Subject

WITHIN = 0.15  # what the plan is right to (docs/decisions/0051)


def out_of_memory(subject: Subject) -> Iterator[Finding]:
    prepared, config = subject.prepared, subject.config
    has = memory_there(subject)
    if not has or most_bytes(subject) + other_memory(subject) <= has // 2:
        return
    precision, device = prepared.resolved.precision, prepared.device.type
    made = outline(load_architecture(config.model, prepared.tokenizer), config, precision, device_type=device)
    plan = plan_memory(
        made, config.train, precision, length=len(subject.longest_rows[0].input_ids), device_type=device, packing=config.data.packing
    )
    needs = plan.peak + other_memory(subject)
    if needs <= has * (1 - WITHIN):
        return
    fits = needs <= has * (1 + WITHIN)
    checkpointing = "" if config.train.gradient_checkpointing else "train.gradient_checkpointing: true, "
    yield Finding(
        code="PF011", severity=Severity.WARNING if fits else Severity.ERROR, place=Place(symbol="train.batch_size, data.max_length"),
        message=f"the step on the longest rows {'may' if fits else 'will'} not fit: {shown(needs)} of {shown(has)}",
        details=(
            ("weights", shown(plan.frozen + plan.trained)),
            ("training", f"{shown(plan.gradients)} of gradients, {shown(plan.optimizer)} of optimizer states"),
            ("step", f"{shown(plan.peak - plan.held)} on {plan.rows} rows of {plan.length} tokens"),
        ),
        cause=f"not simulated, weights and states only: {plan.not_simulated}" if plan.not_simulated else None,
        fix=f"{checkpointing}a smaller train.batch_size with more train.accumulate, a smaller data.max_length, or --preset qlora",
    )  # fmt: skip


def memory_there(subject: Subject) -> int:
    """What this process may take: on a GPU without what others hold."""
    has = subject.prepared.hardware.memory
    if subject.prepared.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(subject.prepared.device)
        return min(has, free + torch.cuda.memory_reserved(subject.prepared.device))
    return has


def other_memory(subject: Subject) -> int:
    """What this process holds besides the model: libraries and data, which count on a CPU."""
    if subject.prepared.device.type != "cpu":
        return 0
    weights = sum(p.numel() * p.element_size() for p in subject.prepared.model.parameters())
    return max(0, peak_memory(subject.prepared.device) - weights)


def most_bytes(subject: Subject) -> int:
    """More than a step can take: what is held, six fp32 copies of the input and output of every matrix, and attention scores in full."""
    train, precision = subject.config.train, subject.prepared.resolved.precision
    parameters = list(subject.prepared.model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    held = sum(p.numel() * p.element_size() for p in parameters)
    held += sum(p.numel() * to_torch(precision.grads).itemsize + optimizer_bytes(p.numel(), train, precision) for p in trained)
    length = len(subject.longest_rows[0].input_ids)
    length += -length % MULTIPLE
    widths = [width for module in subject.prepared.model.modules() for width in _widths(module)]
    tokens = train.batch_size * length
    settings = subject.prepared.model.config
    scores = getattr(settings, "num_hidden_layers", 0) * getattr(settings, "num_attention_heads", 0) * tokens * length
    largest = max((a * b for a, b in zip(widths[::2], widths[1::2])), default=0)
    return held + 24 * tokens * sum(widths) + 16 * scores + 32 * largest


def _widths(module: nn.Module) -> tuple[int, ...]:
    """(in, out) of a module with a matrix; a 4-bit one has no other shape."""
    weight = module._parameters.get("weight")
    if weight is None or (weight.ndim < 2 and not is_quantised(weight)):
        return ()
    if hasattr(module, "in_features"):
        return int(module.in_features), int(module.out_features)
    return int(weight.shape[-1]), int(weight.shape[-2])
