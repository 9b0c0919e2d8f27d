"""Checks of the preflight that run no step: device (PF001), updates lost by rounding (PF003), disk
(PF004), memory (PF011).
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
from ..memory.device import WITHIN, less_memory, memory_there, other_memory
from ..memory.plan import held_memory, plan_part
from ..setup import Prepared, Subject

TYPICAL = 0.2  # of the learning rate: what AdamW moves a weight by
# shares of the weights that cannot move: a warning, an error
MANY = 0.5
NEARLY_ALL = 0.9
SAMPLED = 4096  # elements looked at in each tensor


def unexpected_device(subject: Subject) -> Iterator[Finding]:
    """Checks only `auto`: a device given by name is found or refused earlier, when the run is
    prepared.
    """
    if subject.config.model.device != "auto" or subject.prepared.device.type != "cpu":
        return
    gpu = installed_gpu()
    if gpu is None:
        return
    hidden = next(
        (
            f"{v}={os.environ[v]!r}"
            for v in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
            if v in os.environ
        ),
        None,
    )
    if torch.version.cuda is None and torch.version.hip is None:
        cause = f"torch {torch.__version__} is a build without CUDA and ROCm"
        fix = "install torch's build for this GPU (pytorch.org)"
    elif hidden is not None:
        cause = f"{hidden} in the environment hides it"
        fix = f"unset {hidden.partition('=')[0]}"
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
    """A GPU that the operating system or the driver lists, even if torch does not find it."""
    tool = shutil.which("nvidia-smi")
    if tool is not None:
        try:
            listed = subprocess.run(
                [tool, "-L"], capture_output=True, text=True, timeout=10, check=False
            )
        except (OSError, subprocess.SubprocessError):
            listed = None
        if listed is not None and listed.returncode == 0 and listed.stdout.startswith("GPU "):
            return listed.stdout.splitlines()[0].partition(" (UUID")[0]
    cards = sorted(Path("/proc/driver/nvidia/gpus").glob("*"))
    if cards:
        return f"an NVIDIA GPU at {cards[0].name}"
    if Path("/dev/kfd").exists():
        return "an AMD GPU (/dev/kfd)"
    return None


def vanishing_updates(subject: Subject) -> Iterator[Finding]:
    """Compares the update that the learning rate makes with the spacing of each trained tensor's
    dtype at its own magnitudes.

    AdamW moves a weight by the learning rate times m / sqrt(v), which is 1 at the first step and
    0.2 to 0.4 (root mean square) later (Liu et al. 2025, "Muon is scalable for LLM training"). A
    step below half the distance to the next number of the dtype is lost.
    """
    train = subject.config.train
    precision = subject.prepared.resolved.precision
    rate = train.learning_rate
    if rate == 0:
        yield Finding(
            code="PF003",
            severity=Severity.ERROR,
            place=Place(symbol="train.learning_rate"),
            message="the learning rate is 0: nothing would be learnt",
            fix="train.learning_rate above 0",
        )
        return
    if rate >= 1 and train.optimizer != "prodigy":
        yield Finding(
            code="PF003",
            severity=Severity.WARNING,
            place=Place(symbol="train.learning_rate"),
            message=(
                f"the learning rate is {rate:g}: AdamW moves each weight by about that much in a"
                " step, and weights are below 1"
            ),
            fix="train.learning_rate: 2e-4 for an adapter, 1e-5 to 5e-5 for every weight",
        )
    stochastic = precision.rounding == "stochastic" and train.optimizer == "adamw"
    if stochastic and precision.trainable != "fp32":
        return
    trained = [
        (name, p)
        for name, p in subject.prepared.model.named_parameters()
        if p.requires_grad and local_part(p).numel()
    ]
    stuck = 0.0
    total = 0
    still = []
    for name, parameter in trained:
        part = local_part(parameter)
        share = stuck_share(part, rate * TYPICAL)
        stuck += share * part.numel()
        total += part.numel()
        if share == 1.0:
            still.append(name)
    share = stuck / max(1, total)
    if share < MANY:
        return
    yield Finding(
        code="PF003",
        severity=Severity.ERROR if share >= NEARLY_ALL else Severity.WARNING,
        place=Place(symbol="train.learning_rate, precision.trainable, precision.rounding"),
        message=f"a typical update is lost in {share:.0%} of the trained weights",
        declared=f"learning rate {rate:g}, {precision.trainable} weights, rounded to nearest",
        cause=(
            f"{precision.trainable} keeps"
            f" {-int(math.log2(torch.finfo(to_torch(precision.trainable)).eps)) + 1} bits: a change"
            " below half of the last one rounds away"
        ),
        fix=_fix(precision.trainable, train.optimizer, rate),
        details=(
            (
                (
                    "still",
                    f"{len(still)} of {len(trained)} tensors cannot move at all, {still[0]} first",
                ),
            )
            if still
            else ()
        ),
    )


def _fix(trainable: str, optimizer: str, rate: float) -> str:
    """Nothing that the settings have already."""
    larger = f"a train.learning_rate above {rate:g}"
    if trainable == "fp32":
        return larger
    stochastic = "precision.rounding: stochastic, " if optimizer == "adamw" else ""
    return f"{stochastic}precision.trainable: fp32, or {larger}"


def stuck_share(weight: nn.Parameter | Tensor, update: float) -> float:
    """The share of elements that `update` does not change when the result is rounded to nearest in
    the weight's dtype.

    weight  F[...]
    inside  fp32
    """
    flat = weight.detach().flatten()
    flat = flat[:: max(1, flat.numel() // SAMPLED)]
    # toward zero, where numbers lie closer below a power of two: the more generous direction
    moved = (flat.float() - update * flat.float().sign()).to(flat.dtype)
    return float(((moved == flat) & (flat != 0)).float().mean())


def disk_too_small(subject: Subject) -> Iterator[Finding]:
    """Counts the checkpoints that exist at once: `run.keep`, the best, and the one being written
    before an old one is removed.
    """
    plan = subject.plan
    run = subject.config.run
    checkpoints = subject.folder / "checkpoints"
    free = shutil.disk_usage(subject.folder).free
    one = checkpoint_bytes(subject)
    result = result_bytes(subject)
    kept = min(run.keep, -(-plan.total // plan.save_every)) + bool(plan.eval_every)
    if plan.adapters_every:
        adapters = min((plan.total - 1) // plan.adapters_every, run.adapters_keep or plan.total)
    else:
        adapters = 0
    if subject.resuming:
        there = sum(file.stat().st_size for file in checkpoints.rglob("*") if file.is_file())
    else:
        there = 0
    needed = (kept + 1) * one + (1 + adapters) * result - there
    if needed <= free:
        return
    yield Finding(
        code="PF004",
        severity=Severity.ERROR,
        place=Place(symbol="run.folder", file=str(subject.folder)),
        message=f"the run writes up to {format_bytes(needed)}, and {format_bytes(free)} are free",
        details=(
            ("checkpoints", f"{kept} kept and 1 in writing, {format_bytes(one)} each"),
            (
                "result",
                format_bytes(result)
                + (f", and {adapters} adapters on the way" if adapters else ""),
            ),
        ),
        fix="free space, another run.folder, or a smaller run.keep or run.adapters_keep",
    )


def checkpoint_bytes(subject: Subject) -> int:
    """Bytes of the trained tensors and the optimizer's states; the other parts of a checkpoint are
    kilobytes.
    """
    held = held_memory(
        subject.prepared.model, subject.config.train, subject.prepared.resolved.precision
    )
    return held.trained + held.optimizer


def result_bytes(subject: Subject) -> int:
    """The adapter or the model in the dtype it is saved in."""
    precision = subject.prepared.resolved.precision
    whole = subject.config.adapter.kind == "none"
    elements = sum(
        p.numel() for p in subject.prepared.model.parameters() if whole or p.requires_grad
    )
    return elements * to_torch(precision.save_model if whole else precision.save_adapter).itemsize


def memory_too_small(subject: Subject) -> Iterator[Finding]:
    """Plans the step, which takes seconds, only if a generous upper bound comes near the available
    memory.
    """
    prepared = subject.prepared
    config = subject.config
    task = subject.task
    assert isinstance(prepared, Prepared), (
        "the loop's own run: an attached trainer's memory is not planned"
    )
    precision = prepared.resolved.precision
    device = prepared.device.type
    has = memory_there(prepared.hardware.memory, prepared.device)
    besides = other_memory(prepared.model, prepared.device)
    if not has or task.most_bytes(prepared.model, precision) + besides <= has // 2:
        return
    plan = plan_part(
        task.outline(precision, device_type=device),
        config.train,
        precision,
        task.step_outline(precision),
        checkpointing=prepared.checkpointing,
        device_type=device,
        parts=1 if prepared.sharding is None else prepared.sharding.parts,
    )
    needs = plan.peak + besides
    if needs <= has * (1 - WITHIN):
        return
    fits = needs <= has * (1 + WITHIN)
    yield Finding(
        code="PF011",
        severity=Severity.WARNING if fits else Severity.ERROR,
        place=Place(symbol="train.batch_size, data.max_length"),
        message=(
            f"the step on the longest rows {'may' if fits else 'will'} not fit: {format_binary_bytes(needs)} of"
            f" {format_binary_bytes(has)}"
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
                    f"{format_binary_bytes(plan.peak - plan.held)} on {pluralise(plan.rows, 'row')} of length"
                    f" {plan.length}"
                ),
            ),
        ),
        cause=(
            f"not simulated, weights and states only: {plan.not_simulated}"
            if plan.not_simulated
            else None
        ),
        fix=less_memory(config, prepared.checkpointing.kind),
    )
