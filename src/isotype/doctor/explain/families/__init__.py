"""The families of errors: each file holds what one part of a program refuses, its causes and its page."""

from . import (  # noqa: F401  each registers itself
    arguments,
    attention,
    bitsandbytes,
    buffers,
    demands,
    layers,
    libraries,
    missing_kernels,
    products,
    refusals,
    regions,
    scaling,
    sharding,
    triton,
    updates,
    values,
    wording,
)
