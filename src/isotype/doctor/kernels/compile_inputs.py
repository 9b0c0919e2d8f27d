"""Defines the inputs of one compilation: the kernel without its decorators (`UnwrappedKernel`), the
GPU (`parse_target`), and the types and constexprs of its parameters (`Combination`). `Reach` says
how likely it is that a caller uses a combination.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from ...errors import UsageError

if TYPE_CHECKING:
    from triton.backends.compiler import GPUTarget

DEFAULT_TARGET = "sm_90"
# the first and the last minor version of Triton that was tested
SUPPORTED_TRITON = ((3, 4), (3, 9))


# Shared memory per block in KiB: for NVIDIA the opt-in maximum by compute capability, for AMD the
# local data share. Source: CUDA C++ programming guide, table of compute capabilities; AMD CDNA3 ISA
# guide
_NVIDIA_SHARED_KIB = {
    70: 96,
    75: 64,
    80: 163,
    86: 99,
    87: 163,
    89: 99,
    90: 227,
    100: 227,
    103: 227,
    110: 227,
    120: 99,
    121: 99,
}
_AMD_SHARED_KIB = {"gfx950": 160}


def parse_target(text: str | int) -> GPUTarget:
    """Parses `sm_90`, `sm90`, `90` or `gfx942` to a Triton target.

    Raises  UsageError for anything else
    """
    require_triton()
    from triton.backends.compiler import GPUTarget

    name = str(text).strip().lower()
    if nvidia := re.fullmatch(r"(?:sm_?)?(\d{2,3})[af]?", name):
        arch = int(nvidia[1])
        if arch < 70 or arch > 129:
            raise UsageError(
                f"architecture {text!r}: NVIDIA architectures from sm_70 to sm_129 are compiled for"
            )
        return GPUTarget("cuda", arch, 32)
    if re.fullmatch(r"gfx[0-9a-f]{3,4}", name):
        warp_size = 64 if name.startswith("gfx9") else 32
        return GPUTarget("hip", name, warp_size)
    raise UsageError(
        f"architecture {text!r}: expected something like sm_80, sm_90, sm_100 or gfx942"
    )


def target_name(target: GPUTarget) -> str:
    if target.backend == "cuda":
        return f"sm_{target.arch}"
    return str(target.arch)


def shared_bytes(target: GPUTarget) -> int:
    """Returns the number of bytes of shared memory that one program (block) may use."""
    if target.backend == "cuda":
        return 1024 * _NVIDIA_SHARED_KIB.get(int(target.arch), 99)
    return 1024 * _AMD_SHARED_KIB.get(str(target.arch), 64)


def require_triton() -> str:
    """Returns the version of the installed Triton.

    Raises  UsageError if Triton is not installed, or has an untested version
    """
    try:
        installed_version = version("triton")
    except PackageNotFoundError:
        raise UsageError(
            "Triton is not installed; install it with: pip install 'triton>=3.4,<3.10' (no GPU is"
            " needed)"
        ) from None
    numbers = tuple(int(n) for n in re.findall(r"\d+", installed_version)[:2])
    first, last = SUPPORTED_TRITON
    if not first <= numbers <= last:
        span = f"{first[0]}.{first[1]} to {last[0]}.{last[1]}"
        raise UsageError(f"Triton {installed_version} is installed; Isotype supports Triton {span}")
    return installed_version


# the fields of `triton.Config` that are options of the compiler
OPTION_NAMES = ("num_warps", "num_stages", "num_ctas", "maxnreg")


@dataclass(frozen=True)
class Configuration:
    """The values that one `triton.Config` sets.

    constexprs  the values of `tl.constexpr` parameters
    options     options of the compiler, such as num_warps
    """

    constexprs: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class UnwrappedKernel:
    """A kernel without its decorators.

    function    the `@triton.jit` function
    configs     the configurations of `@triton.autotune`, or a single empty one
    heuristics  the functions of `@triton.heuristics`, by the name of the constexpr
    """

    function: Any
    configs: list[Configuration]
    heuristics: dict[str, Any]

    def with_defaults(self, constexprs: Mapping[str, Any]) -> dict[str, Any]:
        """Completes the constexprs with the defaults of the `tl.constexpr` parameters, the values
        of the first configuration, and the values of heuristics.
        """
        defaults = {
            p.name: p.default for p in self.function.params if p.is_constexpr and p.has_default
        }
        values = {**defaults, **self.configs[0].constexprs, **constexprs}
        for name, heuristic in self.heuristics.items():
            if name not in constexprs:
                try:
                    values[name] = heuristic(values)
                except Exception:
                    # the heuristic reads tensors, which exist only at a launch
                    continue
        return values


def is_kernel(value: Any) -> bool:
    """True if the value is a `@triton.jit` function, also if other decorators wrap the function."""
    from triton.runtime.jit import JITFunction, KernelInterface

    while isinstance(value, KernelInterface) and not isinstance(value, JITFunction):
        value = getattr(value, "fn", None)
    return isinstance(value, JITFunction)


def read_configuration(config: Any) -> Configuration:
    options = {name: getattr(config, name, None) for name in OPTION_NAMES}
    return Configuration(
        dict(config.kwargs), {name: value for name, value in options.items() if value is not None}
    )


def unwrap_kernel(kernel: Any) -> UnwrappedKernel:
    """Removes the decorators of a kernel.

    Raises  UsageError if it is no kernel, or runs in Triton's interpreter
    """
    from triton.runtime.jit import JITFunction, KernelInterface

    configs: list[Configuration] = []
    heuristics: dict[str, Any] = {}
    inner = kernel
    while isinstance(inner, KernelInterface) and not isinstance(inner, JITFunction):
        configs = configs or [
            read_configuration(config) for config in getattr(inner, "configs", [])
        ]
        heuristics |= getattr(inner, "values", {})
        inner = getattr(inner, "fn", None)
    if type(inner).__name__ == "InterpretedFunction":
        raise UsageError(
            f"{getattr(inner, '__name__', kernel)} runs in Triton's interpreter: unset"
            " TRITON_INTERPRET to compile it"
        )
    if not isinstance(inner, JITFunction):
        raise UsageError(f"{getattr(kernel, '__name__', kernel)!r} is no @triton.jit kernel")
    return UnwrappedKernel(inner, configs or [Configuration()], heuristics)


def locate_kernel(function: Any) -> tuple[str, int]:
    """Returns the file of a kernel and the line of its `def`, below the decorators."""
    source, first_line = inspect.getsourcelines(function.fn)
    offset = next((i for i, text in enumerate(source) if text.lstrip().startswith("def ")), 0)
    return function.fn.__code__.co_filename, first_line + offset


FLOATS = ("fp64", "fp32", "bf16", "fp16")  # the float types that an element of a pointer can have


class Reach(IntEnum):
    """How likely it is that a caller uses a combination of argument types. The higher the value,
    the more important is a failure of this combination.
    """

    INFERRED = 1  # inferred from the source of the kernel and its launches
    COMPILED = 2  # the same launch under torch.compile
    MIXED = 3  # launched by a call with one tensor in another dtype
    CONFIRMED = 4  # listed by the user (MATRIX of the module, or arguments), or a recorded launch

    @property
    def description(self) -> str:
        return (
            "plausible: inferred from the source, no call was seen",
            "reachable: under torch.compile, which passes Python floats as fp64",
            "reachable: a call with one tensor in another dtype launches it",
            "reachable: listed in MATRIX or a recorded launch",
        )[self - 1]


@dataclass(frozen=True)
class Combination:
    """One combination of argument types for which a kernel is compiled.

    label                 describes the combination in messages
    types                 parameter -> Triton's type name (`*bf16`, `i32`, `fp32`, `constexpr`)
    constexprs            parameter (or a path into a tuple parameter) -> value
    attributes            the position of a parameter (as a path, see constexprs) -> the attributes
                          that Triton's launcher would set for it, such as divisibility by 16
    options               num_warps, num_stages and the like
    reach                 how likely it is that a caller uses the combination
    counterpart           for a launch under torch.compile, which passes Python floats as fp64: the
                          label of the combination of the same launch with fp32. Otherwise ""
    is_traced_by_compile  whether torch.compile would trace the launch; False for an explicit
                          signature, and for a launch inside a custom operator
    """

    label: str
    types: Mapping[str, Any]
    constexprs: Mapping[Any, Any] = field(default_factory=dict)
    attributes: Mapping[tuple[int, ...], Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    reach: Reach = Reach.CONFIRMED
    counterpart: str = ""
    is_traced_by_compile: bool = False

    @property
    def key(self) -> str:
        """Returns a key for comparisons. Two combinations have the same key if Triton compiles them
        to the same program.
        """
        return repr(
            [
                sorted(map(repr, part.items()))
                for part in (self.types, self.constexprs, self.attributes, self.options)
            ]
        )

    @property
    def type_summary(self) -> str:
        """Returns the types without the constexprs: `logits_ptr *bf16, scale fp32`."""
        return ", ".join(
            f"{name} {type_name}"
            for name, type_name in self.types.items()
            if type_name != "constexpr"
        )


def is_float_pointer(type_name: Any) -> bool:
    """Whether a type name of Triton is a pointer to floats. `*kfp32` is a pointer to constants."""
    return (
        isinstance(type_name, str)
        and type_name.startswith("*")
        and type_name.removeprefix("*").removeprefix("k") in FLOATS
    )


def remove_duplicates(combinations: Sequence[Combination]) -> list[Combination]:
    """Removes equal combinations. If several combinations are equal, the function keeps the one
    with the highest `reach`. The order of the list does not change.
    """
    unique: dict[str, Combination] = {}
    for combination in combinations:
        unique[combination.key] = max(
            unique.get(combination.key, combination), combination, key=lambda c: c.reach
        )
    return list(unique.values())
