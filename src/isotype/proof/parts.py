"""Lists the parts of `isotype proof`, with the most useful part first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeAlias

ResultRow: TypeAlias = dict[str, Any]  # one row of the results of a part


@dataclass(frozen=True)
class Scale:
    """Says on which device the parts run, and at which sizes.

    device   a device of torch: `cuda` or `cpu`
    is_tiny  whether the sizes are so small that they only test the code; the measured times are
             then of no use
    """

    device: str
    is_tiny: bool = False


@dataclass(frozen=True)
class Part:
    """One part of `isotype proof`.

    description  one line about what it does
    function     `module:function` in this folder; called with a `Scale`, it yields rows. A row has
                 `name`, and `passed` if it is a check
    seconds      the expected time on a GPU. The part is begun only if as much time is left
    max_seconds  the part's process is ended after this time
    packages     packages that the part needs besides those of the extra `train`
    """

    description: str
    function: str
    seconds: int
    max_seconds: int
    packages: tuple[str, ...] = ()

    def load(self) -> Callable[[Scale], Iterator[ResultRow]]:
        module, name = self.function.split(":")
        function: Callable[[Scale], Iterator[ResultRow]] = getattr(
            import_module(f".{module}", __package__), name
        )
        return function


# name after --part -> the part
PARTS = {
    "kernels": Part("every op beside its fp64 reference", "kernels:check_ops", 60, 240),
    "adapters": Part(
        "gradients of LoRA layers beside fp64 and PEFT", "adapters:check_bf16_base", 30, 120
    ),
    "adapters-nf4": Part(
        "the same on a base in NF4", "adapters:check_nf4_base", 30, 120, ("bitsandbytes",)
    ),
    "presets": Part(
        "six presets learn a text, beside the same run in fp32", "learning:check_presets", 90, 300
    ),
    "resume": Part("an interrupted run ends with the same bytes", "learning:check_resume", 30, 120),
    "speed-0.5b": Part(
        "steps of a model of 0.5B parameters beside PEFT", "speed:measure_half_billion", 60, 200
    ),
    "speed-8b": Part("steps of layers of an 8B model beside PEFT", "speed:measure_8b", 80, 240),
    "speed-8b-nf4": Part(
        "the same on a base in NF4", "speed:measure_8b_nf4", 80, 240, ("bitsandbytes",)
    ),
    "memory": Part("the planned memory beside the measured peak", "speed:measure_memory", 60, 200),
    "liger": Part(
        "the steps of layers of an 8B model with Liger's kernels beside PEFT's adapters",
        "speed:measure_liger",
        60,
        240,
        ("liger_kernel",),
    ),
    "unsloth": Part(
        "the steps of layers of an 8B model beside Unsloth",
        "speed:measure_unsloth",
        90,
        240,
        ("unsloth", "bitsandbytes"),
    ),
}
# the parts whose checks compare kernels with fp64
KERNEL_PARTS = ("kernels", "adapters", "adapters-nf4")
