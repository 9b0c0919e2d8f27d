"""bf16 as the interpreter stores it (raw uint16) to numbers and back, rounding once, to nearest even."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def widen(bits: Any) -> Array:
    """uint16 bits -> fp32, exactly."""
    raw = np.asarray(bits, dtype=np.uint16)
    return np.ascontiguousarray(raw.astype(np.uint32) << np.uint32(16)).view(np.float32).reshape(raw.shape)


def narrow(values: Any) -> Array:
    """fp16, fp32, fp64 or integers -> uint16 bits, rounded once to nearest even; overflow becomes infinity, NaN stays NaN."""
    given = np.asarray(values)
    if given.dtype not in (np.float32, np.float16):
        given = _to_odd(given.astype(np.float64))
    single = np.ascontiguousarray(given, dtype=np.float32)
    bits = single.view(np.uint32)
    rounded = (bits + (((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF))) >> np.uint32(16)
    return np.where(np.isnan(single), np.uint16(0x7FC0), rounded.astype(np.uint16)).reshape(given.shape)


def truncate(values: Any) -> Array:
    """fp32 -> uint16 bits towards zero, for casts that ask for it (`fp_downcast_rounding="rtz"`)."""
    single = np.ascontiguousarray(values, dtype=np.float32)
    bits = (single.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(single), np.uint16(0x7FC0), bits).reshape(np.asarray(values).shape)


def _to_odd(values: Array) -> Array:
    """fp64 -> fp32 with inexact results made odd, so that the rounding to bf16 that follows is the only one."""
    with np.errstate(over="ignore", invalid="ignore"):
        single = values.astype(np.float32)
        back = single.astype(np.float64)
        beyond = np.abs(back) > np.abs(values)
    single = np.where(beyond, np.nextafter(single, np.float32(0)), single).astype(np.float32)
    inexact = (single.astype(np.float64) != values) & np.isfinite(values)
    bits = np.ascontiguousarray(single).view(np.uint32) | inexact.astype(np.uint32).reshape(single.shape)
    odd: Array = bits.view(np.float32)
    return odd
