"""The environment of this process: versions, devices, and environment variables that change the precision.

`environment()` becomes a run's `env.json`; `requirements()` turns one back into pins. torch is imported only to look at devices.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from ..errors import IsotypeError, UsageError
from ..version import __version__
from .hardware import detect

KEY_PACKAGES = (
    "torch", "transformers", "peft", "bitsandbytes", "accelerate", "triton", "trl", "liger-kernel", "datasets", "tokenizers", "safetensors",
    "diffusers", "deepspeed", "flash-attn", "xformers", "torchao", "torchvision", "numpy", "pydantic",
)  # fmt: skip
LOCAL = "a local folder"
VARIABLES = (
    "ACCELERATE_MIXED_PRECISION", "ACCELERATE_DOWNCAST_BF16", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TRITON_INTERPRET", "XLA_USE_BF16", "XLA_DOWNCAST_BF16", "PYTORCH_ENABLE_MPS_FALLBACK", "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MKL_NUM_THREADS", "ONEDNN_MAX_CPU_ISA",
    "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF",
)  # fmt: skip


def environment() -> dict[str, Any]:
    """Everything that a run's numbers may depend on, for `env.json`."""
    everything = installed()
    return {
        "isotype": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "command": sys.argv,
        "packages": {name: everything[name] for name in KEY_PACKAGES if name in everything},
        "torch": _torch(),
        "devices": devices(),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "distributions": dict(sorted(everything.items())),
        "sources": _sources(),
    }


def installed() -> dict[str, str]:
    """Every installed distribution: normalised name -> version. The first on the path wins, as for imports."""
    found: dict[str, str] = {}
    for distribution in metadata.distributions():
        fields = _fields(distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or "")
        if "Name" in fields:
            found.setdefault(normalised(fields["Name"]), fields.get("Version") or distribution.version)
    return found


def _fields(text: str) -> dict[str, str]:
    """The first of each field before the description. `distribution.metadata` parses the description too: five times as long for all."""
    found: dict[str, str] = {}
    for line in text.partition("\n\n")[0].splitlines():
        name, colon, value = line.partition(":")
        if colon:
            found.setdefault(name, value.strip())
    return found


def normalised(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def devices() -> list[dict[str, Any]]:
    """The CPU, and every GPU that torch sees."""
    found = [detect("cpu").as_json()]
    torch = _import_torch()
    if torch is not None and torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            try:
                found.append(detect(f"cuda:{index}").as_json())
            except IsotypeError as error:  # an architecture that is not in the table is named too
                found.append({"kind": "unknown", "name": torch.cuda.get_device_name(index), "reason": str(error)})
    return found


def _torch() -> dict[str, Any]:
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
        "tf32_matmul": _multiplies_in_tf32(torch.backends.cuda.matmul),
    }


def _multiplies_in_tf32(matmul: Any) -> bool:
    """Whether a GPU may compute products of fp32 tensors in TF32."""
    # where it was set by its new name, PyTorch raises when the old one is read; the new one is right for both
    return bool(matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else matmul.allow_tf32)


def _import_torch() -> Any:
    try:
        import torch
    except (ImportError, OSError):  # not installed, or its libraries do not load
        return None
    return torch


def _sources() -> dict[str, str]:
    """Distributions that no package index has: name -> where they were installed from."""
    found = {}
    for distribution in metadata.distributions():
        text = distribution.read_text("direct_url.json")
        if text and distribution.metadata["Name"]:
            given = json.loads(text)
            vcs = given.get("vcs_info")
            url = f"{vcs['vcs']}+{given['url']}@{vcs['commit_id']}" if vcs else given["url"]
            found[normalised(distribution.metadata["Name"])] = LOCAL if url.startswith("file:") else url
    return found


def requirements(run: Path) -> str:
    """Pins that re-create the environment of a run, as pip reads them (`pip install -r`). Raises UsageError."""
    file = run / "env.json" if run.is_dir() else run
    try:
        recorded = json.loads(file.read_text(encoding="utf-8"))
        pins: dict[str, str] = dict(recorded["distributions"])
        python = recorded["python"]
    except FileNotFoundError:
        raise UsageError(f"--requirements {run}: no env.json there: not a run folder") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"--requirements {run}: not the env.json of a run ({type(error).__name__}: {error})") from None
    sources = recorded.get("sources", {})
    lines = [f"# The environment of {run}: Python {python}, {recorded.get('platform', 'unknown platform')}"]
    # a local version (2.13.0+cpu) is on no public index but torch's own
    local = pins.get("torch", "").partition("+")[2]
    if local.startswith(("cpu", "cu", "rocm", "xpu")):
        lines.append(f"--extra-index-url https://download.pytorch.org/whl/{local}")
    for name, version in sorted(pins.items()):
        source = sources.get(name)
        if source is None:
            lines.append(f"{name}=={version}")
        elif source == LOCAL:
            lines.append(f"# {name}=={version} was installed from {LOCAL}")
        else:
            lines.append(f"{name} @ {source}")
    return "\n".join(lines) + "\n"
