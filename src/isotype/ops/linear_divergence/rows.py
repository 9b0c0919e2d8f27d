"""What computes on the logits of two heads: Triton on a GPU, C++ on a CPU, blocks of plain PyTorch elsewhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..backend import cpp_runs, triton_runs
from ..cpp import CppKernels
from ..cross_entropy.rows import NO_SOURCE, Source
from . import eager
from .eager import Pair

KERNELS = CppKernels(__file__, divergences="dpiiiffpipiipdpiffpipiipfppppi")


class Cpp:
    """The C++ kernel: fp32, bf16 or fp16 logits on a CPU."""

    @staticmethod
    def divergences(
        z_NV: Tensor, teacher_NV: Tensor, pair: Pair, out_NV: Tensor, upstream_N: Tensor | None, want_entropy: bool,
        sources: tuple[Source | None, Source | None] = (None, None),
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """As `eager`'s. Of bf16 products (`sources`) the eight largest logits of each side are made again in fp32, on both."""
        rows = z_NV.shape[0]
        found, entropy = torch.empty(rows), torch.empty(rows if want_entropy else 0)
        if upstream_N is not None:
            assert out_NV.dtype == z_NV.dtype, "a CPU product's result has its operands' dtype"
            upstream_N = upstream_N.to(torch.float32).contiguous()
        given: list[Any] = []
        for z, rule, source in ((z_NV, pair.student, sources[0]), (teacher_NV, pair.teacher, sources[1])):
            shape = z_NV.shape if z is z_NV else ()
            given += [z.dtype, z, *shape, z.stride(0), rule.logit_scale, rule.softcap, *(source.arguments if source else NO_SOURCE)]
        KERNELS("divergences", *given, pair.beta, found, entropy if want_entropy else None, upstream_N, out_NV, out_NV.stride(0))
        return found, entropy


def row_paths(z: Tensor, teacher: Tensor) -> Any:
    """What computes on these logits, with the function of `eager`."""
    if triton_runs(z):
        from . import triton

        return triton
    return Cpp if cpp_runs(KERNELS, z, teacher) else eager
