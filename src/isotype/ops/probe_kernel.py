"""The smallest kernel that shows whether Triton runs: see `probe`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_one(x):
    tl.store(x, tl.load(x) + 1.0)
