"""Describes the environment of this process, which consists of versions, devices, and the
environment variables that change the precision.

A run writes the result of `environment()` to `env.json`. torch is imported only to detect devices.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

from ..errors import IsotypeError
from ..finding import Finding, Place, Severity
from ..version import __version__
from .hardware import detect
from .install import install_command

KEY_PACKAGES = (
    "torch", "transformers", "peft", "bitsandbytes", "accelerate", "triton", "trl", "liger-kernel", "datasets", "tokenizers", "safetensors",
    "diffusers", "deepspeed", "flash-attn", "xformers", "torchao", "torchvision", "numpy", "pydantic",
)  # fmt: skip
VARIABLES = (
    "ACCELERATE_MIXED_PRECISION", "ACCELERATE_DOWNCAST_BF16", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TRITON_INTERPRET", "XLA_USE_BF16", "XLA_DOWNCAST_BF16", "PYTORCH_ENABLE_MPS_FALLBACK", "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MKL_NUM_THREADS", "ONEDNN_MAX_CPU_ISA",
    "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF",
)  # fmt: skip


_METADATA_FIELD = re.compile(r"^(Name|Version):[ \t]*(\S.*?)[ \t\r]*$", re.MULTILINE)


def environment() -> dict[str, Any]:
    """Returns everything that the numbers of a run may depend on, for `env.json`."""
    versions = installed_versions()
    return {
        "isotype": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "command": sys.argv,
        "folder": os.getcwd(),
        "packages": {name: versions[name] for name in KEY_PACKAGES if name in versions},
        "torch": _torch_facts(),
        "devices": detect_devices(),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "distributions": dict(sorted(versions.items())),
    }


def installed_versions() -> dict[str, str]:
    """Returns every installed distribution, as a mapping of its normalised name to its version. If
    a distribution is installed twice, the first one on the path counts, as for imports.
    """
    versions: dict[str, str] = {}
    for distribution in metadata.distributions():
        # reads only two fields: importlib reads every header, which takes eight times as long
        text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
        fields = dict(_METADATA_FIELD.findall(text.split("\n\n", 1)[0]))
        if "Name" in fields and "Version" in fields:
            versions.setdefault(normalise_name(fields["Name"]), fields["Version"])
    return versions


def normalise_name(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def detect_devices() -> list[dict[str, Any]]:
    """Returns the CPU, and every GPU that torch sees."""
    rows = [detect("cpu").to_dict()]
    torch = _import_torch()
    if torch is not None and torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            try:
                rows.append(detect(f"cuda:{index}").to_dict())
            except IsotypeError as error:  # its architecture is not in the table
                rows.append(
                    {
                        "kind": "unknown",
                        "name": torch.cuda.get_device_name(index),
                        "reason": str(error),
                    }
                )
    return rows


def _torch_facts() -> dict[str, Any]:
    torch = _import_torch()
    if torch is None:
        return {}
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": getattr(torch.version, "hip", None),
        "cudnn": torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        # PyTorch raises when the old name of this setting is read after the new one was set
        "tf32_matmul": torch.backends.cuda.matmul.fp32_precision == "tf32",
    }


def _import_torch() -> Any:
    try:
        import torch
    except (ImportError, OSError):  # not installed, or its libraries do not load
        return None
    return torch


@dataclass(frozen=True, kw_only=True)
class KnownFault:
    """A dtype fault of released versions of a package. `applies` receives the whole environment,
    because each fault also needs a certain device or setting.
    """

    package: str
    versions: str
    applies: Callable[[Mapping[str, Any]], bool]
    finding: Finding

    def affects(self, version: str) -> bool:
        """Returns True if this version has the fault. The local part of a version (`2.13.0+cpu`) is
        ignored. The result is False for a string that is not a version.
        """
        from packaging.specifiers import SpecifierSet
        from packaging.version import InvalidVersion

        try:
            return SpecifierSet(self.versions).contains(version.partition("+")[0], prereleases=True)
        except InvalidVersion:
            return False


def _has_device(*generations: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda environment: any(
        device.get("generation", "").startswith(generations) for device in environment["devices"]
    )


# Each fault was reproduced in one of the versions and found in the source of the others, or is
# stated by the project's fix, or is reported in the project's tracker with a program that shows it.
KNOWN_FAULTS = (
    KnownFault(
        package="torch",
        versions=">=2.11,<2.14",
        applies=_has_device("hopper", "blackwell"),
        finding=Finding(
            code="EV002",
            severity=Severity.NOTE,
            message="attention with a mask tensor can give NaN in the gradient of the query",
            cause=(
                "cuDNN's backward, at lengths 64 past a multiple of 128, where scores are far below"
                " zero (pytorch issue 196678); and it reads an fp32 mask beside bf16 or fp16"
                " queries as if it were theirs (pull request 191612)"
            ),
            fix=(
                "isotype train and optimize() keep cuDNN from masks; elsewhere"
                " torch.backends.cuda.enable_cudnn_sdp(False)"
            ),
        ),
    ),
    KnownFault(
        package="bitsandbytes",
        versions=">=0.49.0,<=0.50.2",
        applies=_has_device("cpu-avx512-bf16", "cpu-amx"),
        finding=Finding(
            code="EV002",
            severity=Severity.NOTE,
            message=(
                "a 4-bit layer is repacked in place by the first forward without gradients, and"
                " later gradients are wrong"
            ),
            cause=(
                "on CPUs with AVX512-BF16 evaluate() or generate() repacks Linear4bit for inference"
                " and never unpacks it (seen in 0.50.2)"
            ),
            fix=(
                "isotype train switches it off; elsewhere set support_avx512bf16_for_cpu = False on"
                " every Linear4bit"
            ),
        ),
    ),
    KnownFault(
        package="triton",
        versions="==3.9.*",
        applies=lambda environment: (
            environment["variables"].get("TRITON_INTERPRET", "0") not in ("", "0")
        ),
        finding=Finding(
            code="EV002",
            severity=Severity.WARNING,
            message="the CPU interpreter is wrong for bf16",
            cause=(
                "TRITON_INTERPRET is set: it truncates fp32 to bf16 and computes bf16 on raw bits"
                " (seen in 3.9)"
            ),
            fix=(
                "unset TRITON_INTERPRET; isotype doctor kernels compiles for a GPU without"
                " having one"
            ),
        ),
    ),
)


def find_faults(environment: Mapping[str, Any]) -> list[Finding]:
    """Returns all known faults of an environment that `environment()` returned."""
    return [
        *_known_fault_findings(environment),
        *_device_findings(environment),
        *_variable_findings(environment),
    ]


def _known_fault_findings(environment: Mapping[str, Any]) -> Iterator[Finding]:
    for fault in KNOWN_FAULTS:
        version = environment["distributions"].get(fault.package)
        if version and fault.affects(version) and fault.applies(environment):
            yield replace(fault.finding, place=Place(symbol=f"{fault.package} {version}"))


def _device_findings(environment: Mapping[str, Any]) -> Iterator[Finding]:
    torch = environment["torch"]
    gpus = [device for device in environment["devices"] if device["kind"] != "cpu"]
    if not torch:
        yield Finding(
            code="EV003",
            severity=Severity.ERROR,
            place=Place(symbol="torch"),
            message="torch is not installed, or does not load",
            cause="training needs it; check, lint and explain do not",
            fix=install_command("train"),
        )
    elif (torch["cuda"] or torch["hip"]) and not gpus:
        build = f"CUDA {torch['cuda']}" if torch["cuda"] else f"ROCm {torch['hip']}"
        yield Finding(
            code="EV003",
            severity=Severity.WARNING,
            place=Place(symbol=f"torch {torch['version']}"),
            message=f"built for {build}, and sees no GPU",
            cause=(
                "no driver, a driver older than the build, or a visibility variable that hides"
                " every device"
            ),
            fix=(
                "nvidia-smi (or rocm-smi) shows the driver; or take the CPU build: "
                "pip install torch --index-url https://download.pytorch.org/whl/cpu"
            ),
        )
    for gpu in gpus:
        if gpu["kind"] == "unknown":
            yield Finding(
                code="EV003",
                severity=Severity.WARNING,
                place=Place(symbol=gpu["name"]),
                message="not in the table of hardware",
                cause=gpu["reason"],
                fix="model.device: cpu",
            )


def _variable_findings(environment: Mapping[str, Any]) -> Iterator[Finding]:
    variables = environment["variables"]
    effects = {
        "ACCELERATE_MIXED_PRECISION": (
            "overrides mixed_precision in scripts that use accelerate or HF Trainer, without a word"
        ),
        "NVIDIA_TF32_OVERRIDE": (
            "0 forbids and 1 forces TF32 in cuBLAS and cuDNN, over the program's own setting"
        ),
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": (
            "turns TF32 on for fp32 matrix products, over the program's own setting"
        ),
        "XLA_USE_BF16": "makes every fp32 tensor bf16 under torch_xla",
        "XLA_DOWNCAST_BF16": "makes every fp32 tensor bf16 under torch_xla",
    }
    for name, effect in effects.items():
        if name in variables:
            yield Finding(
                code="EV004",
                severity=Severity.WARNING,
                place=Place(symbol=f"{name}={variables[name]}"),
                message=effect,
                cause="set in the environment of this process",
                fix=f"unset {name}",
            )
