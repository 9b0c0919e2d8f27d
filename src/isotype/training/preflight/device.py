"""PF001: `auto` took the CPU although this machine has a GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ...finding import Finding, Place, Severity
from .subject import Subject


def unexpected_device(subject: Subject[Any]) -> Iterator[Finding]:
    """Checks only `auto`: a device given by name is found or refused earlier, when the run is prepared."""
    if subject.config.model.device != "auto" or subject.prepared.device.type != "cpu":
        return
    gpu = installed_gpu()
    if gpu is None:
        return
    hidden = next((f"{v}={os.environ[v]!r}" for v in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES") if v in os.environ), None)
    if torch.version.cuda is None and torch.version.hip is None:
        cause, fix = f"torch {torch.__version__} is a build without CUDA and ROCm", "install torch's build for this GPU (pytorch.org)"
    elif hidden is not None:
        cause, fix = f"{hidden} in the environment hides it", f"unset {hidden.partition('=')[0]}"
    else:
        cause, fix = f"torch {torch.__version__} cannot use its driver", "isotype doctor env says which versions do not go together"
    yield Finding(
        code="PF001", severity=Severity.WARNING, place=Place(symbol="model.device"), message="this run is on the CPU, and there is a GPU",
        observed=gpu, cause=cause, fix=f"{fix}; or model.device: cpu, if the CPU is meant",
    )  # fmt: skip


def installed_gpu() -> str | None:
    """A GPU that the operating system or the driver lists, even if torch does not find it."""
    tool = shutil.which("nvidia-smi")
    if tool is not None:
        try:
            listed = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=10, check=False)
        except (OSError, subprocess.SubprocessError):
            listed = None
        if listed is not None and listed.returncode == 0 and listed.stdout.startswith("GPU "):
            return listed.stdout.splitlines()[0].partition(" (UUID")[0]
    cards = sorted(Path("/proc/driver/nvidia/gpus").glob("*"))
    if cards:
        return f"an NVIDIA GPU at {cards[0].name}"
    return "an AMD GPU (/dev/kfd)" if Path("/dev/kfd").exists() else None
