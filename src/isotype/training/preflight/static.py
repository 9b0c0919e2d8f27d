"""Contains the checks of the preflight that do not run a step. These checks examine the device
(PF001), updates that rounding would remove (PF003), the disk (PF004) and the memory (PF011).
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from ...dtypes import to_torch
from ...finding import Finding, Place, Severity
from ...precision.parts import local_part
from ...wording import format_binary_bytes, format_bytes, pluralise
from ..memory.device import (
    PLAN_TOLERANCE,
    available_memory,
    memory_limit,
    memory_saving_advice,
    overhead_memory,
)
from ..memory.plan import plan_persistent_memory, plan_process_memory
from ..setting_names import SettingNames
from ..setup import PreflightSubject, Prepared

TYPICAL_UPDATE = 0.2  # AdamW typically moves a weight by this share of the learning rate
# if at least this share of the weights cannot change, there is a warning, or an error
WARNING_SHARE = 0.5
ERROR_SHARE = 0.9
SAMPLED_ELEMENTS = 4096  # number of elements that are tested in each tensor


def check_device(subject: PreflightSubject) -> Iterator[Finding]:
    """Runs the check PF001, which reports an error if `model.device: auto` chose the CPU although
    there is a GPU. If the user names a device, it is checked earlier, when the run is prepared.
    """
    if subject.config.model.device != "auto" or subject.prepared.device.type != "cpu":
        return
    gpu = installed_gpu()
    if gpu is None:
        return
    hiding_variable = next(
        (
            f"{variable}={os.environ[variable]!r}"
            for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
            if variable in os.environ
        ),
        None,
    )
    if torch.version.cuda is None and torch.version.hip is None:
        cause = f"torch {torch.__version__} is a build without CUDA and ROCm"
        fix = "install torch's build for this GPU (pytorch.org)"
    elif hiding_variable is not None:
        cause = f"{hiding_variable} in the environment hides it"
        fix = f"unset {hiding_variable.partition('=')[0]}"
    else:
        cause = f"torch {torch.__version__} cannot use its driver"
        fix = "isotype doctor env says which versions do not go together"
    yield Finding(
        code="PF001",
        severity=Severity.WARNING,
        place=Place(symbol="model.device"),
        message="this run is on the CPU, and there is a GPU",
        observed=gpu,
        cause=cause,
        fix=f"{fix}; or model.device: cpu, if the CPU is meant",
    )


def installed_gpu() -> str | None:
    """Returns a GPU that the operating system or the driver lists, even if torch does not find this
    GPU.
    """
    tool = shutil.which("nvidia-smi")
    if tool is not None:
        try:
            listing = subprocess.run(
                [tool, "-L"], capture_output=True, text=True, timeout=10, check=False
            )
        except (OSError, subprocess.SubprocessError):
            listing = None
        if listing is not None and listing.returncode == 0 and listing.stdout.startswith("GPU "):
            return listing.stdout.splitlines()[0].partition(" (UUID")[0]
    cards = sorted(Path("/proc/driver/nvidia/gpus").glob("*"))
    if cards:
        return f"an NVIDIA GPU at {cards[0].name}"
    if Path("/dev/kfd").exists():
        return "an AMD GPU (/dev/kfd)"
    return None


def check_update_sizes(subject: PreflightSubject) -> Iterator[Finding]:
    """Runs the check PF003. For each trained tensor, it compares the size of an update with the
    distance between two neighbouring numbers of the tensor's dtype. The distance is larger for
    larger numbers.

    AdamW changes a weight by the learning rate times m / sqrt(v). The factor m / sqrt(v) is 1 at
    the first step, and 0.2 to 0.4 (root mean square) at later steps (Liu et al. 2025, "Muon is
    scalable for LLM training"). If the change is smaller than half the distance to the next number
    of the dtype, rounding removes it and the weight stays the same.
    """
    train = subject.config.train
    precision = subject.prepared.resolved.precision
    learning_rate = train.learning_rate
    names = subject.names
    if learning_rate == 0:
        yield Finding(
            code="PF003",
            severity=Severity.ERROR,
            place=Place(symbol=names.learning_rate),
            message="the learning rate is 0: nothing would be learnt",
            fix=f"{names.learning_rate} above 0",
        )
        return
    if learning_rate >= 1 and train.optimizer != "prodigy":
        yield Finding(
            code="PF003",
            severity=Severity.WARNING,
            place=Place(symbol=names.learning_rate),
            message=(
                f"the learning rate is {learning_rate:g}: AdamW moves each weight by about that much in a"
                " step, and weights are below 1"
            ),
            fix=f"{names.learning_rate}: 2e-4 for an adapter, 1e-5 to 5e-5 for every weight",
        )
    rounds_stochastically = precision.rounding == "stochastic" and train.optimizer == "adamw"
    if rounds_stochastically and precision.trainable != "fp32":
        return
    trained = [
        (name, p)
        for name, p in subject.prepared.model.named_parameters()
        if p.requires_grad and local_part(p).numel()
    ]
    stuck_elements = 0.0
    total = 0
    stuck_names = []
    for name, parameter in trained:
        part = local_part(parameter)
        share = stuck_share(part, learning_rate * TYPICAL_UPDATE)
        stuck_elements += share * part.numel()
        total += part.numel()
        if share == 1.0:
            stuck_names.append(name)
    share = stuck_elements / max(1, total)
    if share < WARNING_SHARE:
        return
    yield Finding(
        code="PF003",
        severity=Severity.ERROR if share >= ERROR_SHARE else Severity.WARNING,
        place=Place(symbol=f"{names.learning_rate}, {names.weight_dtype}"),
        message=f"a typical update is lost in {share:.0%} of the trained weights",
        declared=f"learning rate {learning_rate:g}, {precision.trainable} weights, rounded to nearest",
        cause=(
            f"{precision.trainable} keeps"
            f" {-int(math.log2(torch.finfo(to_torch(precision.trainable)).eps)) + 1} bits: a change"
            " below half of the last one rounds away"
        ),
        fix=_update_advice(precision.trainable, train.optimizer, learning_rate, names),
        details=(
            (
                (
                    "still",
                    f"{len(stuck_names)} of {len(trained)} tensors cannot move at all, {stuck_names[0]} first",
                ),
            )
            if stuck_names
            else ()
        ),
    )


def _update_advice(trainable: str, optimizer: str, rate: float, names: SettingNames) -> str:
    """Returns advice on how to make updates larger, or how to round them so that they are not lost.
    The advice names only settings that the run does not use yet.
    """
    larger_rate = f"a {names.learning_rate} above {rate:g}"
    if trainable == "fp32":
        return larger_rate
    advice = f"{names.fp32_weights}, or {larger_rate}"
    if optimizer == "adamw":
        return f"{names.rounded_weights}, {advice}"
    return advice


def stuck_share(weight: nn.Parameter | Tensor, update: float) -> float:
    """Returns the share of elements that stay the same if `update` is added and the result is
    rounded to the nearest number of the weight's dtype.

    weight  F[...]
    inside  fp32
    """
    flat = weight.detach().flatten()
    flat = flat[:: max(1, flat.numel() // SAMPLED_ELEMENTS)]
    # toward zero, where numbers just below a power of two lie closer: fewer elements count as stuck
    moved = (flat.float() - update * flat.float().sign()).to(flat.dtype)
    return float(((moved == flat) & (flat != 0)).float().mean())


def check_disk(subject: PreflightSubject) -> Iterator[Finding]:
    """Runs the check PF004. It compares the free space on the disk with the space that the result,
    the adapters and the checkpoints need. Up to `run.keep` checkpoints exist at the same time. Two
    more checkpoints may need space: the best checkpoint, and a new checkpoint, which is written
    before the oldest one is removed.
    """
    schedule = subject.schedule
    run = subject.config.run
    checkpoints = subject.folder / "checkpoints"
    free_bytes = shutil.disk_usage(subject.folder).free
    checkpoint_size = checkpoint_bytes(subject)
    result_size = result_bytes(subject)
    kept_checkpoints = min(run.keep, -(-schedule.total // schedule.save_every)) + bool(
        schedule.eval_every
    )
    if schedule.adapters_every:
        adapters = min(
            (schedule.total - 1) // schedule.adapters_every, run.adapters_keep or schedule.total
        )
    else:
        adapters = 0
    if subject.is_resuming:
        existing_bytes = sum(
            file.stat().st_size for file in checkpoints.rglob("*") if file.is_file()
        )
    else:
        existing_bytes = 0
    required_bytes = (
        (kept_checkpoints + 1) * checkpoint_size + (1 + adapters) * result_size - existing_bytes
    )
    if required_bytes <= free_bytes:
        return
    yield Finding(
        code="PF004",
        severity=Severity.ERROR,
        place=Place(symbol="run.folder", file=str(subject.folder)),
        message=f"the run writes up to {format_bytes(required_bytes)}, and {format_bytes(free_bytes)} are free",
        details=(
            (
                "checkpoints",
                f"{kept_checkpoints} kept and 1 in writing, {format_bytes(checkpoint_size)} each",
            ),
            (
                "result",
                format_bytes(result_size)
                + (f", and {adapters} adapters during training" if adapters else ""),
            ),
        ),
        fix="free space, another run.folder, or a smaller run.keep or run.adapters_keep",
    )


def checkpoint_bytes(subject: PreflightSubject) -> int:
    """Returns the bytes of the trained tensors and the optimizer's states. The other parts of a
    checkpoint need only kilobytes.
    """
    persistent_plan = plan_persistent_memory(
        subject.prepared.model, subject.config.train, subject.prepared.resolved.precision
    )
    return persistent_plan.trained + persistent_plan.optimizer


def result_bytes(subject: PreflightSubject) -> int:
    """Returns the bytes of the saved adapter or model, in the dtype in which it is saved."""
    precision = subject.prepared.resolved.precision
    is_full_model = subject.config.adapter.kind == "none"
    elements = sum(
        p.numel() for p in subject.prepared.model.parameters() if is_full_model or p.requires_grad
    )
    return (
        elements
        * to_torch(precision.save_model if is_full_model else precision.save_adapter).itemsize
    )


def check_memory(subject: PreflightSubject) -> Iterator[Finding]:
    """Runs the check PF011, which compares the planned memory of a step with the available memory.
    Planning takes some seconds. The memory is not planned if a rough upper bound shows that the
    available memory is far more than enough.
    """
    prepared = subject.prepared
    config = subject.config
    task = subject.task
    assert isinstance(prepared, Prepared), (
        "the loop's own run: an attached trainer's memory is not planned"
    )
    precision = prepared.resolved.precision
    device = prepared.device.type
    available = available_memory(prepared.hardware.memory, prepared.device)
    overhead = overhead_memory(prepared.process_bytes)
    if not available or task.max_step_bytes(prepared.model, precision) + overhead <= available // 2:
        return
    plan = plan_process_memory(
        task.outline_model(precision, device_type=device),
        config.train,
        precision,
        task.outline_largest_step(precision),
        checkpointing=prepared.checkpointing,
        device_type=device,
        parts=1 if prepared.sharding is None else prepared.sharding.shard_count,
    )
    required = plan.peak + overhead
    if required <= memory_limit(available):
        return
    may_fit = required <= available * (1 + PLAN_TOLERANCE)
    yield Finding(
        code="PF011",
        severity=Severity.WARNING if may_fit else Severity.ERROR,
        place=Place(symbol="train.batch_size, data.max_length"),
        message=(
            f"the step on the longest rows {'may' if may_fit else 'will'} not fit: {format_binary_bytes(required)} of"
            f" {format_binary_bytes(available)}"
        ),
        details=(
            ("weights", format_binary_bytes(plan.frozen + plan.trained)),
            (
                "training",
                (
                    f"{format_binary_bytes(plan.gradients)} of gradients, {format_binary_bytes(plan.optimizer)} of optimizer"
                    " states"
                ),
            ),
            (
                "step",
                (
                    f"{format_binary_bytes(plan.peak - plan.persistent_bytes)} on {pluralise(plan.rows, 'row')} of length"
                    f" {plan.length}"
                ),
            ),
        ),
        cause=(
            f"not simulated, weights and states only: {plan.not_simulated}"
            if plan.not_simulated
            else None
        ),
        fix=memory_saving_advice(config, prepared.checkpointing.kind),
    )
