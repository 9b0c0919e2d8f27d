"""The GPUs a kernel is compiled for, by name (`sm_90`, `gfx942`), what each allows a program, and the Triton versions that are read."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from ...errors import UsageError

if TYPE_CHECKING:
    from triton.backends.compiler import GPUTarget

DEFAULT = "sm_90"
SUPPORTED = ((3, 4), (3, 9))  # first and last minor version of Triton that was read and tried


@dataclass(frozen=True)
class Limits:
    """What one program (block) may use. Source: CUDA C++ programming guide, table of compute capabilities; AMD CDNA3 ISA guide."""

    shared_bytes: int
    registers: int  # a thread


# NVIDIA's opt-in shared memory a block in KiB, by compute capability; AMD's local data share
_SHARED_KIB = {70: 96, 75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99}
_LDS_KIB = {"gfx950": 160}


def parse_target(text: str | int) -> GPUTarget:
    """`sm_90`, `sm90`, `90` or `gfx942` as Triton's own target.

    Raises  UsageError for anything else.
    """
    require_triton()
    from triton.backends.compiler import GPUTarget

    word = str(text).strip().lower()
    if nvidia := re.fullmatch(r"(?:sm_?)?(\d{2,3})[af]?", word):
        arch = int(nvidia[1])
        if arch < 70 or arch > 129:
            raise UsageError(f"architecture {text!r}: NVIDIA architectures from sm_70 to sm_129 are compiled for")
        return GPUTarget("cuda", arch, 32)
    if re.fullmatch(r"gfx[0-9a-f]{3,4}", word):
        return GPUTarget("hip", word, 64 if word.startswith("gfx9") else 32)
    raise UsageError(f"architecture {text!r}: expected something like sm_80, sm_90, sm_100 or gfx942")


def target_name(target: GPUTarget) -> str:
    return f"sm_{target.arch}" if target.backend == "cuda" else str(target.arch)


def limits(target: GPUTarget) -> Limits:
    if target.backend == "cuda":
        return Limits(shared_bytes=_SHARED_KIB.get(int(target.arch), 99) * 1024, registers=255)
    return Limits(shared_bytes=_LDS_KIB.get(str(target.arch), 64) * 1024, registers=512)


def require_triton() -> str:
    """The installed Triton's version.

    Raises  UsageError when there is none, or one that this has not been tried with.
    """
    try:
        found = version("triton")
    except PackageNotFoundError:
        raise UsageError("Triton is not installed; install it with: pip install 'triton>=3.4,<3.10' (no GPU is needed)") from None
    numbers = tuple(int(n) for n in re.findall(r"\d+", found)[:2])
    first, last = SUPPORTED
    if not first <= numbers <= last:
        span = f"{first[0]}.{first[1]} to {last[0]}.{last[1]}"
        raise UsageError(f"Triton {found} is installed; isotype doctor kernels reads Triton {span}")
    return found
