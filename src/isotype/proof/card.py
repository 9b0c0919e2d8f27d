"""Describes the card and the versions of the libraries, without any name or path of a person."""

from __future__ import annotations

import platform
from typing import Any

import torch

from ..environment.hardware import Hardware, detect
from ..environment.versions import installed_versions
from ..version import __version__

# packages whose versions are recorded
_PACKAGES = ("torch", "triton", "transformers", "peft", "bitsandbytes", "unsloth", "liger-kernel")


def describe_card(device: str) -> dict[str, Any]:
    """Returns a description of the GPU and the versions of the software, so that a reader can
    compare results. Raises UsageError if there is no such device.
    """
    hardware = detect(device)
    versions = installed_versions()
    return {
        "name": hardware.name,
        "kind": hardware.kind,
        "architecture": hardware.architecture,
        "memory_GiB": round(hardware.memory / (1 << 30), 1),
        "dtypes": supported_dtypes(hardware),
        "driver": _driver_version(hardware),
        "isotype": __version__,
        "python": platform.python_version(),
        "packages": {name: versions[name] for name in _PACKAGES if name in versions},
    }


def supported_dtypes(hardware: Hardware) -> list[str]:
    """Returns the dtypes in which kernels are checked. These are the dtypes in which a run may
    compute on this card.
    """
    dtypes = ["fp32"]
    if hardware.fp16 != "none":
        dtypes.append("fp16")
    if hardware.bf16 != "none":
        dtypes.append("bf16")
    return dtypes


def _driver_version(hardware: Hardware) -> str:
    if hardware.kind == "cuda":
        return f"CUDA {torch.version.cuda}"
    if hardware.kind == "rocm":
        return f"ROCm {torch.version.hip}"
    return ""
