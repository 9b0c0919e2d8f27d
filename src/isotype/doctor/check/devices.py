"""What a device named on the command line can do."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ...errors import UsageError


@dataclass(frozen=True, slots=True)
class Device:
    """capability: CUDA compute capability times ten, None where there is none; bf16: native there."""

    name: str
    kind: str
    capability: int | None = None
    bf16: bool = True

    @property
    def tf32(self) -> bool:
        return self.capability is not None and self.capability >= 80

    @property
    def fp8(self) -> bool:
        return (self.capability is not None and self.capability >= 89) or self.kind == "rocm-fp8"


_CAPABILITY = {
    "p100": 60, "1080": 61, "p40": 61, "p4": 61, "v100": 70, "titan v": 70, "t4": 75, "2060": 75, "2070": 75, "2080": 75,
    "titan rtx": 75, "rtx 8000": 75, "a100": 80, "a30": 80, "a800": 80, "a10": 86, "a10g": 86, "a40": 86, "a6000": 86, "3060": 86,
    "3070": 86, "3080": 86, "3090": 86, "a4000": 86, "a5000": 86, "l4": 89, "l40": 89, "l40s": 89, "4070": 89, "4080": 89, "4090": 89,
    "rtx 6000 ada": 89, "h100": 90, "h200": 90, "h800": 90, "h20": 90, "gh200": 90, "b100": 100, "b200": 100, "gb200": 100, "b300": 103,
    "5070": 120, "5080": 120, "5090": 120,
}  # fmt: skip


def find(name: str) -> Device | None:
    word = re.sub(r"[-_]", " ", name.strip().lower())
    if word == "cpu":
        return Device("CPU", "cpu")
    if word in ("mps", "apple") or re.fullmatch(r"m[1-4]( (pro|max|ultra))?", word):
        return Device(name, "mps")
    if re.fullmatch(r"(amd )?(instinct )?mi(2[15]0x?|300[xa]?|325x|350x?|355x)", word):
        return Device(name, "rocm-fp8" if "mi3" in word else "rocm")
    if match := re.fullmatch(r"sm ?(\d{2,3})a?", word):
        return Device(name, "cuda", int(match[1]), int(match[1]) >= 80)
    short = re.sub(r"\b(?:nvidia|geforce|tesla|rtx|gtx|quadro|titan|\d+ ?gb|sxm\d?|pcie|ti|super|laptop|gpu|nvl|hbm\d?e?)\b", " ", word)
    for candidate in (word, " ".join(short.split())):
        if candidate in _CAPABILITY:
            capability = _CAPABILITY[candidate]
            return Device(name.upper() if len(name) < 6 else name, "cuda", capability, capability >= 80)
    return None


def parse(name: str) -> Device:
    """Raises UsageError naming what is known."""
    device = find(name)
    if device is None:
        raise UsageError(f"--device {name}: not known; give cpu, mps, a GPU such as {', '.join(list(_CAPABILITY)[4::7])}, mi300x, or sm_80")
    return device
