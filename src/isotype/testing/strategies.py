"""Hypothesis strategies for dtypes, shapes and tensors, for properties over the product of both.

@given(tensors(shapes(2, 3), dtypes=TRAINING))
def test_keeps_dtype(x): ...
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from ..dtypes import FLOATS, TRAINING_FLOATS, TensorSpec, to_torch

if TYPE_CHECKING:
    import torch

TRAINING = TRAINING_FLOATS  # fp32 bf16 fp16
EDGES = (1, 2, 3, 7, 8, 16, 17)  # around the block sizes of kernels


def dtypes(words: Sequence[str] = FLOATS) -> st.SearchStrategy[torch.dtype]:
    """torch dtypes, by Isotype's words."""
    return st.sampled_from([to_torch(word) for word in words])


def dims(largest: int = 17, *, empty: bool = False) -> st.SearchStrategy[int]:
    """One size: 1, odd, a power of two, or one more; 0 too when `empty`."""
    return st.sampled_from([size for size in ((0,) if empty else ()) + EDGES if size <= largest])


def shapes(least: int = 1, most: int = 3, *, largest: int = 17, empty: bool = False) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of `least` to `most` dimensions."""
    return st.lists(dims(largest, empty=empty), min_size=least, max_size=most).map(tuple)


@st.composite
def tensors(
    draw: st.DrawFn,
    shape: st.SearchStrategy[tuple[int, ...]] | tuple[int, ...] | None = None,
    *,
    dtype: st.SearchStrategy[torch.dtype] | None = None,
    scale: float = 1.0,
    requires_grad: bool = False,
) -> torch.Tensor:
    """Normal values of a drawn seed, shape and dtype; every other one is not contiguous."""
    import torch

    sizes = shape if isinstance(shape, tuple) else draw(shape if shape is not None else shapes())
    wanted = draw(dtype if dtype is not None else dtypes(TRAINING))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    values = (torch.randn(sizes, generator=generator) * scale).to(wanted)
    if len(sizes) > 1 and draw(st.booleans()):
        values = values.transpose(-1, -2).contiguous().transpose(-1, -2)
    return values.requires_grad_(requires_grad)


@st.composite
def arguments(draw: st.DrawFn, signature: str, *, largest: int = 17, requires_grad: bool = True) -> tuple[Any, ...]:
    """Tensors that fit an OpContract's inputs: `"gate: F[*n d], up: F[*n d]"`; letters and names are drawn once and shared.

    `int[...]` gives int64 values of 0 to 1.
    """
    import torch

    letters: dict[str, torch.dtype] = {}
    sizes: dict[str, int] = {}
    runs: dict[str, tuple[int, ...]] = {}
    made = []
    for part in (p.split(":", 1)[-1] for p in signature.split("->")[0].split(",") if p.strip()):
        spec = TensorSpec.parse(part)
        shape: list[int] = []
        for dim in spec.dims:
            if dim.startswith("*") or dim == "...":
                if dim not in runs or dim == "...":
                    runs[dim] = draw(shapes(1, 2, largest=largest))
                shape += runs[dim]
            elif dim.isdigit():
                shape.append(int(dim))
            else:
                shape.append(sizes.setdefault(dim, draw(dims(largest))) if dim != "_" else draw(dims(largest)))
        if spec.dtype == "int":
            made.append(
                torch.zeros(shape, dtype=torch.int64).random_(0, 2, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
            )
            continue
        if spec.free or spec.dtype in ("any", "float"):
            key = spec.dtype if spec.free else f"#{len(made)}"
            if key not in letters:
                letters[key] = draw(dtypes(TRAINING))
            dtype = letters[key]
        else:
            dtype = draw(dtypes(spec.dtype.split("|")))
        made.append(draw(tensors(tuple(shape), dtype=st.just(dtype), requires_grad=requires_grad)))
    return tuple(made)
