"""Describes the number formats, the speed and the memory of a device. torch is imported only when a
device is detected.

There are two tables, `GENERATIONS` and `DEVICES`, and two functions that read them.
`lookup_hardware("t4")` finds a device by its name, and `detect()` finds the device of this machine.

bf16  native    matrix products run in hardware
      emulated  results are correct, but matrix products are as slow as in fp32, or slower
      none      Isotype refuses the format: GPU libraries emulate it, which is much slower than
                fp32, or have no kernels for it (Triton, flash attention)

Peaks are TFLOP/s of dense matrix products with fp32 accumulation (datasheets print twice these
values, which need 2:4 sparsity). Bandwidth is in GB/s.

The figures are taken from the documents below. Some of the figures were not checked a second time.

Source  NVIDIA: CUDA C++ Programming Guide (tensor core input types by compute capability);
        datasheets of P100, V100, T4, A100, A10, A40, L4, L40S, H100, H200, HGX B200; Ampere GA102,
        Ada and Blackwell RTX whitepapers for RTX cards. AMD: ROCm "Data types and precision
        support"; data sheets of Instinct MI50, MI100, MI210, MI250X, MI300X, MI325X, MI355X. CPU:
        Intel 64 ISA extensions reference (AVX512_BF16 from Cooper Lake, AMX-BF16 from Sapphire
        Rapids, AMX-FP16 from Granite Rapids); AMD Zen 4 has AVX512_BF16; Arm ARM, FEAT_BF16
        (Neoverse V1 and later). With AMX, bf16 matrix products were measured to be 4 to 7 times as
        fast as fp32.
"""

from __future__ import annotations

import errno
import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import UsageError
from .memory_limits import usable_memory

GiB = 1 << 30


class Generation(NamedTuple):
    """Says how well torch supports each number format on one hardware generation. The values are
    `native`, `emulated` and `none`.
    """

    kind: str
    bf16: str
    fp16: str
    fp8: str = "none"
    tf32: str = "none"


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One device.

    kind            cuda, rocm or cpu
    name            the maker's name of the device
    generation      a key of GENERATIONS
    architecture    the compute capability `8.0`, `gfx942`, or the type of the machine (`x86_64`)
    bf16 fp16 fp8 tf32   native, emulated or none
    memory          bytes, 0 where unknown
    cores           CPU threads that torch may use, or multiprocessors / compute units; 0 where
                    unknown
    peak_tflops     for each format the published dense TFLOP/s; empty where none is published
    bandwidth_gbs   GB/s as published, or None
    """

    kind: str
    name: str
    generation: str
    architecture: str = ""
    bf16: str
    fp16: str
    fp8: str = "none"
    tf32: str = "none"
    memory: int = 0
    cores: int = 0
    peak_tflops: Mapping[str, float] = field(default_factory=dict)
    bandwidth_gbs: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "peak_tflops": dict(self.peak_tflops)}


GENERATIONS = {
    "kepler": Generation("cuda", "none", "emulated"),  # below what current torch builds support
    "maxwell": Generation("cuda", "none", "emulated"),  # fp16 is storage only
    # 6.1 cards (GTX 10, P40) run fp16 at 1/64 of fp32
    "pascal": Generation("cuda", "none", "native"),
    "volta": Generation("cuda", "none", "native"),  # first tensor cores: fp16 only
    "turing": Generation("cuda", "none", "native"),  # tensor cores for fp16 and integers
    "ampere": Generation("cuda", "native", "native", tf32="native"),
    "ada": Generation("cuda", "native", "native", "native", "native"),
    "hopper": Generation("cuda", "native", "native", "native", "native"),
    "blackwell": Generation("cuda", "native", "native", "native", "native"),
    "vega": Generation("rocm", "none", "native"),  # gfx900 and gfx906 (MI50): no bf16 instructions
    "cdna1": Generation("rocm", "native", "native"),  # gfx908: bf16 at half of fp16's rate
    "cdna2": Generation("rocm", "native", "native"),
    "cdna3": Generation("rocm", "native", "native", "native", "native"),  # fp8 in the FNUZ encoding
    "cdna4": Generation("rocm", "native", "native", "native"),  # tf32 is emulated by bf16 products
    "rdna1": Generation("rocm", "none", "native"),
    "rdna2": Generation("rocm", "none", "native"),  # packed fp16, no bf16 instructions
    "rdna3": Generation("rocm", "native", "native"),  # bf16 through WMMA
    "rdna4": Generation("rocm", "native", "native", "native"),
    "cpu-amx": Generation("cpu", "native", "emulated"),  # AMX-BF16 tiles
    "cpu-amx-fp16": Generation("cpu", "native", "native"),  # AMX-BF16 and AMX-FP16 tiles
    # VDPBF16PS; Zen 4 and later, Cooper Lake
    "cpu-avx512-bf16": Generation("cpu", "native", "emulated"),
    "cpu-avx512": Generation("cpu", "emulated", "emulated"),
    "cpu-avx2": Generation("cpu", "emulated", "emulated"),
    "cpu-arm-bf16": Generation("cpu", "native", "native"),  # FEAT_BF16: BFMMLA
    "cpu": Generation("cpu", "emulated", "emulated"),  # nothing known of it
}


def _make_device(
    name: str,
    generation: str,
    architecture: str,
    memory_gib: float,
    bandwidth_gbs: float | None = None,
    **peak_tflops: float,
) -> Hardware:
    return Hardware(
        name=name,
        generation=generation,
        architecture=architecture,
        memory=int(memory_gib * GiB),
        peak_tflops=peak_tflops,
        bandwidth_gbs=bandwidth_gbs,
        **GENERATIONS[generation]._asdict(),
    )


def _compact_name(spec: str) -> str:
    """Returns a name without spaces and hyphens, except before the memory: `rtx3060-8gb`."""
    name, memory = re.fullmatch(r"(.*?)(?:[-_ ]+(\d+ ?gb))?", spec.lower()).groups()  # type: ignore[union-attr]
    compact = re.sub(r"[-_ ]", "", name)
    return f"{compact}-{memory.replace(' ', '')}" if memory else compact


def _make_geforce(model: str, memory_gib: float, bandwidth_gbs: float, fp32: float) -> Hardware:
    """Returns a GeForce card. The speed of its tensor cores (with sums in fp32) is computed by
    multiplying its fp32 speed by a factor. The factor is the same for all cards of a generation.

    Source  NVIDIA's white papers of Turing (TU102), Ampere (GA102), Ada (AD102) and Blackwell
            (GB202)
    """
    name = f"GeForce {model}"
    if model.startswith("RTX 20"):
        return _make_device(
            name, "turing", "7.5", memory_gib, bandwidth_gbs, fp32=fp32, fp16=4 * fp32
        )
    half = {"bf16": 2 * fp32, "fp16": 2 * fp32, "tf32": fp32, "fp32": fp32}
    if model.startswith("RTX 30"):
        return _make_device(name, "ampere", "8.6", memory_gib, bandwidth_gbs, **half)
    generation, architecture = (
        ("ada", "8.9") if model.startswith("RTX 40") else ("blackwell", "12.0")
    )
    return _make_device(
        name, generation, architecture, memory_gib, bandwidth_gbs, **half, fp8=4 * fp32
    )


# model -> GiB of memory, GB/s, fp32 TFLOP/s
_GEFORCE = {
    "RTX 2060": (6, 336, 6.5), "RTX 2060 12GB": (12, 336, 7.2), "RTX 2070": (8, 448, 7.5), "RTX 2080": (8, 448, 10.1),
    "RTX 3060": (12, 360, 12.7), "RTX 3060 8GB": (8, 240, 12.7), "RTX 3060 Ti": (8, 448, 16.2), "RTX 3070": (8, 448, 20.3),
    "RTX 3070 Ti": (8, 608, 21.7), "RTX 3080": (10, 760, 29.8), "RTX 3080 12GB": (12, 912, 30.6), "RTX 3080 Ti": (12, 912, 34.1),
    "RTX 3090 Ti": (24, 1008, 40.0), "RTX 4060": (8, 272, 15.1), "RTX 4060 Ti": (8, 288, 22.1), "RTX 4060 Ti 16GB": (16, 288, 22.1),
    "RTX 4070": (12, 504, 29.1), "RTX 4070 Super": (12, 504, 35.5), "RTX 4070 Ti": (12, 504, 40.1), "RTX 4070 Ti Super": (16, 672, 44.1),
    "RTX 4080": (16, 717, 48.7), "RTX 4080 Super": (16, 736, 52.2), "RTX 5060": (8, 448, 19.2), "RTX 5060 Ti": (8, 448, 23.7),
    "RTX 5060 Ti 16GB": (16, 448, 23.7), "RTX 5070": (12, 672, 30.9), "RTX 5070 Ti": (16, 896, 43.9), "RTX 5080": (16, 960, 56.3),
}  # fmt: skip

# The names that `--device NAME` accepts. The first variant of a family is the one that clouds offer
# most often.
DEVICES: dict[str, Hardware] = {
    "p100": _make_device("Tesla P100", "pascal", "6.0", 16, 732, fp32=10.6, fp16=21.2),
    "v100": _make_device("Tesla V100", "volta", "7.0", 16, 900, fp32=15.7, fp16=125),
    "t4": _make_device("Tesla T4", "turing", "7.5", 16, 320, fp32=8.1, fp16=65),
    "rtx2080ti": _make_device("GeForce RTX 2080 Ti", "turing", "7.5", 11, 616, fp32=13.4, fp16=53.8),
    "a100": _make_device("A100 80GB", "ampere", "8.0", 80, 2039, fp32=19.5, tf32=156, bf16=312, fp16=312),
    "a100-40gb": _make_device("A100 40GB", "ampere", "8.0", 40, 1555, fp32=19.5, tf32=156, bf16=312, fp16=312),
    "a10": _make_device("A10", "ampere", "8.6", 24, 600, fp32=31.2, tf32=62.5, bf16=125, fp16=125),
    "a40": _make_device("A40", "ampere", "8.6", 48, 696, fp32=37.4, tf32=74.8, bf16=149.7, fp16=149.7),
    "rtx3090": _make_device("GeForce RTX 3090", "ampere", "8.6", 24, 936, fp32=35.6, tf32=35.6, bf16=71, fp16=71),
    "l4": _make_device("L4", "ada", "8.9", 24, 300, fp32=30.3, tf32=60, bf16=121, fp16=121, fp8=242),
    "l40s": _make_device("L40S", "ada", "8.9", 48, 864, fp32=91.6, tf32=183, bf16=362, fp16=362, fp8=733),
    "rtx4090": _make_device("GeForce RTX 4090", "ada", "8.9", 24, 1008, fp32=82.6, tf32=82.6, bf16=165.2, fp16=165.2, fp8=330.3),
    "h100": _make_device("H100 SXM", "hopper", "9.0", 80, 3350, fp32=67, tf32=494.5, bf16=989.5, fp16=989.5, fp8=1979),
    "h100-pcie": _make_device("H100 PCIe", "hopper", "9.0", 80, 2000, fp32=51, tf32=378, bf16=756, fp16=756, fp8=1513),
    "h200": _make_device("H200", "hopper", "9.0", 141, 4800, fp32=67, tf32=494.5, bf16=989.5, fp16=989.5, fp8=1979),
    "b200": _make_device("B200", "blackwell", "10.0", 180, 8000, fp32=75, tf32=1125, bf16=2250, fp16=2250, fp8=4500),
    "rtx5090": _make_device("GeForce RTX 5090", "blackwell", "12.0", 32, 1792, fp32=104.8, tf32=104.8, bf16=209.5, fp16=209.5, fp8=419),
    "mi50": _make_device("Instinct MI50", "vega", "gfx906", 16, 1024, fp32=13.3, fp16=26.5),
    "mi100": _make_device("Instinct MI100", "cdna1", "gfx908", 32, 1229, fp32=46.1, bf16=92.3, fp16=184.6),
    "mi210": _make_device("Instinct MI210", "cdna2", "gfx90a", 64, 1638, fp32=45.3, bf16=181, fp16=181),
    "mi250x": _make_device("Instinct MI250X", "cdna2", "gfx90a", 128, 3277, fp32=95.7, bf16=383, fp16=383),
    "mi300x": _make_device("Instinct MI300X", "cdna3", "gfx942", 192, 5300, fp32=163.4, tf32=653.7, bf16=1307.4, fp16=1307.4, fp8=2614.9),
    "mi325x": _make_device("Instinct MI325X", "cdna3", "gfx942", 256, 6000, fp32=163.4, tf32=653.7, bf16=1307.4, fp16=1307.4, fp8=2614.9),
    "mi355x": _make_device("Instinct MI355X", "cdna4", "gfx950", 288, 8000, fp32=157.3, bf16=2516.6, fp16=2516.6, fp8=5033.2),
    **{_compact_name(model): _make_geforce(model, *facts) for model, facts in _GEFORCE.items()},
    "cpu": _make_device("a CPU without bf16 instructions", "cpu-avx2", "x86_64", 0),
    "cpu-amx": _make_device("a CPU with AMX", "cpu-amx", "x86_64", 0),
    "cpu-avx512-bf16": _make_device("a CPU with AVX512-BF16", "cpu-avx512-bf16", "x86_64", 0),
}  # fmt: skip

_GENERATION_BY_GFX = (
    ("gfx90[06]", "vega"), ("gfx908", "cdna1"), ("gfx90a", "cdna2"), ("gfx94[0-2]", "cdna3"), ("gfx95", "cdna4"),
    ("gfx101", "rdna1"), ("gfx103", "rdna2"), ("gfx11", "rdna3"), ("gfx12", "rdna4"),
)  # fmt: skip


def lookup_hardware(name: str) -> Hardware:
    """Returns the device with this name. Accepted spellings are like `h100`, `T4`, `A100-80GB`,
    `nvidia h200`, `sm_90`, `8.0`, `gfx942`, or a generation (`turing`).

    Raises  UsageError with the nearest names.
    """
    spec = re.sub(
        r"^(?:(?:nvidia|tesla|geforce|amd|instinct|radeon)[-_ ]+)+", "", name.strip().lower()
    )
    without_form = re.sub(r"[-_ ](sxm\d?|hbm\w*)", "", spec)
    for spelling in (
        spec,
        re.sub(r"[ _]", "", spec),
        re.sub(r"[ _]", "-", spec),
        _compact_name(spec),
        without_form,
    ):
        if spelling in DEVICES:
            return DEVICES[spelling]
    # the memory may be named even if there is only one card of this name
    card, _, memory = _compact_name(without_form).rpartition("-")
    if card in DEVICES and f"{DEVICES[card].memory // GiB}gb" == memory:
        return DEVICES[card]
    capability = re.fullmatch(r"(?:sm_?)?(\d{1,2})\.?(\d)a?", spec)
    if capability:
        generation = _generation_from_capability(int(capability[1]), int(capability[2]))
        return _make_device(
            f"compute capability {capability[1]}.{capability[2]}",
            generation,
            f"{capability[1]}.{capability[2]}",
            0,
        )
    if spec.startswith("gfx"):
        return _make_device(spec, _generation_from_gfx(spec), spec, 0)
    if spec in GENERATIONS:
        return _make_device(spec, spec, "", 0)
    suggestions = get_close_matches(spec, DEVICES, n=3, cutoff=0.5)
    raise UsageError(
        f"--device {name}: not known;"
        f" {'did you mean ' + ' or '.join(suggestions) if suggestions else 'known are ' + ' '.join(DEVICES)}"
    )


def detect(device: str = "auto") -> Hardware:
    """Returns the device of this machine. For `auto`, this is a CUDA or ROCm GPU if the machine has
    one, and otherwise the CPU. `cuda` needs a GPU. Other names are refused.

    Raises  UsageError with the reason.
    """
    spec = device.strip().lower()
    kind = spec.partition(":")[0]
    if kind not in ("auto", "cuda", "cpu"):
        raise UsageError(
            f"model.device: {device}: no device that Isotype was tested on",
            fix="model.device: auto, cuda (also ROCm) or cpu",
        )
    if kind != "cpu":
        import torch

        if torch.cuda.is_available():
            index = int(spec.partition(":")[2] or 0)
            if index >= torch.cuda.device_count():
                raise UsageError(
                    f"model.device: {device}: there are {torch.cuda.device_count()} devices here,"
                    " counted from 0"
                )
            return _detect_gpu(torch, index)
        if kind == "cuda":
            raise UsageError(
                f"model.device: {device}: {_no_gpu_reason(torch)}",
                fix="model.device: cpu, or auto; --processes N, not --gpus N",
            )
    return _detect_cpu()


def _no_gpu_reason(torch: Any) -> str:
    if torch.version.cuda is None and getattr(torch.version, "hip", None) is None:
        return f"this torch ({torch.__version__}) was built without CUDA and ROCm"
    return (
        f"torch {torch.__version__} sees no GPU (driver, or"
        f" CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'unset')})"
    )


def _detect_gpu(torch: Any, index: int) -> Hardware:
    properties = torch.cuda.get_device_properties(index)
    if getattr(torch.version, "hip", None):
        architecture = properties.gcnArchName.partition(":")[0]
        generation = _generation_from_gfx(architecture)
    else:
        architecture = f"{properties.major}.{properties.minor}"
        generation = _generation_from_capability(properties.major, properties.minor)
    hardware = _make_device(properties.name, generation, architecture, 0)
    published = _find_published(properties.name, properties.total_memory)
    return replace(
        hardware,
        memory=properties.total_memory,
        cores=properties.multi_processor_count,
        peak_tflops=published.peak_tflops if published else {},
        bandwidth_gbs=published.bandwidth_gbs if published else None,
    )


def _find_published(name: str, memory: int) -> Hardware | None:
    """Returns the device of the table whose name is part of `name`. If several devices match,
    returns the device whose memory size is nearest to `memory`.
    """
    compact_name = re.sub(r"[-_ ]", "", name.lower())
    variant = r"(?=$|sxm|pcie|oam|nvl|hbm|\d+gb)"
    cards = [
        device
        for key, device in DEVICES.items()
        if device.memory and re.search(key.partition("-")[0] + variant, compact_name)
    ]
    if "pcie" in compact_name and any("PCIe" in card.name for card in cards):
        cards = [card for card in cards if "PCIe" in card.name]
    return min(cards, key=lambda d: abs(d.memory - memory), default=None)


def _generation_from_capability(major: int, minor: int) -> str:
    if major >= 10:
        return "blackwell"
    if major == 9:
        return "hopper"
    if major == 8:
        return "ada" if minor >= 9 else "ampere"
    if major == 7:
        return "turing" if minor >= 5 else "volta"
    return {6: "pascal", 5: "maxwell"}.get(major, "kepler")


def _generation_from_gfx(architecture: str) -> str:
    for pattern, generation in _GENERATION_BY_GFX:
        if re.match(pattern, architecture):
            return generation
    raise UsageError(
        f"device {architecture}: this AMD architecture is not in the table of hardware",
        fix="model.device: cpu",
    )


def _detect_cpu() -> Hardware:
    name, flags = _cpu_facts()
    machine = platform.machine().lower()
    generation = cpu_generation(flags, machine)
    return replace(
        _make_device(name, generation, machine, 0), memory=usable_memory(), cores=count_cores()
    )


def cpu_generation(flags: Iterable[str], machine: str) -> str:
    """Returns the generation of a CPU, from the flags of /proc/cpuinfo."""
    flags = set(flags)
    if machine in ("aarch64", "arm64"):
        return "cpu-arm-bf16" if "bf16" in flags else "cpu"
    if "amx_bf16" in flags and "amx_tile" in flags:
        return "cpu-amx-fp16" if "amx_fp16" in flags else "cpu-amx"
    if "avx512_bf16" in flags:
        return "cpu-avx512-bf16"
    if "avx512f" in flags:
        return "cpu-avx512"
    return "cpu-avx2" if "avx2" in flags else "cpu"


def _cpu_facts() -> tuple[str, frozenset[str]]:
    """Returns the name and the flags of the CPU, from /proc/cpuinfo if this file exists."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or platform.machine() or "CPU", frozenset()
    name = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    return name[1].strip() if name else platform.machine(), (
        frozenset(flags[1].split()) if flags else frozenset()
    )


def count_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


SHARED_LOAD = 0.5  # the number of runnable processes per core above which waiting threads sleep
_WAIT_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def wait_passively(
    *,
    is_forced: bool = False,
    load: float | None = None,
    environ: MutableMapping[str, str] | None = None,
    is_torch_loaded: bool | None = None,
) -> bool:
    """Makes OpenMP's threads sleep while they wait, if other programs use the cores and the user
    has not set how threads wait. Returns whether the function changed the setting.

    OpenMP reads the environment variable `OMP_WAIT_POLICY` when torch is loaded. By default, a
    thread that has finished its part of a loop runs an empty loop for about a millisecond while it
    waits. If other programs use the cores, it keeps a core busy that another thread of the loop
    needs. The number of threads does not change, so the results are bit-identical.

    is_forced  also changes the setting if the cores are idle
    load     the number of processes that are ready to run; by default the first number of
             os.getloadavg
    environ  the variables to change; by default os.environ
    is_torch_loaded  whether torch is loaded, in which case the setting has no effect any more
    """
    environ = os.environ if environ is None else environ
    if ("torch" in sys.modules if is_torch_loaded is None else is_torch_loaded) or any(
        name in environ for name in _WAIT_VARIABLES
    ):
        return False
    if load is None:
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if not is_forced and load < SHARED_LOAD * (os.cpu_count() or 1):
        return False
    environ["OMP_WAIT_POLICY"] = "PASSIVE"
    return True


# "... DefaultCPUAllocator: can't allocate memory: you tried to allocate 11096064 bytes. Error code
# 12", on Windows "not enough memory: ..."
_CPU_ALLOCATOR_ERROR = re.compile(
    r"DefaultCPUAllocator: (?:can't allocate|not enough) memory: you tried to allocate (\d+) bytes"
)
# texts of exceptions of other libraries that mean a lack of memory
_MEMORY_MESSAGES = ("std::bad_alloc", "Cannot allocate memory")


def out_of_memory_message(error: BaseException) -> str | None:
    """Returns the line of an error that says how much memory could not be allocated; None for other
    errors. For an allocation on the CPU, PyTorch raises a plain RuntimeError.
    """
    import torch

    if isinstance(error, torch.OutOfMemoryError):
        return str(error).splitlines()[0]
    if isinstance(error, MemoryError):
        return str(error) or "Python could not allocate memory"
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return str(error)
    if not isinstance(error, RuntimeError):
        return None
    message = str(error)
    if match := _CPU_ALLOCATOR_ERROR.search(message):
        return f"tried to allocate {int(match[1]):,} bytes"
    if any(phrase in message for phrase in _MEMORY_MESSAGES):
        return message.splitlines()[0]
    return None
