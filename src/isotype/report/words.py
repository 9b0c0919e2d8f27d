"""How values are written on the page."""

from __future__ import annotations

import math


def plain(value: float) -> str:
    """A number in a short form: `2.41`, `0.0002`, `1.2e-05`, `12,300`."""
    if not math.isfinite(value):
        return "not finite"
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 1e7:
        return f"{value:.2g}"
    if size >= 1000:
        return f"{value:,.0f}"
    if size < 1e-3:
        return f"{value:.2g}"
    return f"{value:.4g}" if size >= 1 else f"{value:.3g}"


def percent(value: float) -> str:
    """Three digits: those of a share of 98 to 99% are the ticks of an axis."""
    return f"{100 * value:.3g}%" if abs(value) >= 0.1 else f"{100 * value:.2g}%"


def bytes_written(value: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def duration(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def count(value: float) -> str:
    """`874`, `12.3k`, `4.26M`."""
    for unit in ("", "k", "M", "B"):
        if abs(value) < 1000:
            return f"{value:.3g}{unit}" if unit else f"{value:.0f}"
        value /= 1000
    return f"{value:.3g}T"
