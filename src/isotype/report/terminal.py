"""A small line chart in characters, for a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from .words import plain

_EIGHTHS = " ▁▂▃▄▅▆▇█"


def terminal_chart(points: Sequence[tuple[float, float]], *, width: int = 60, height: int = 6, encoding: str | None = "utf-8") -> str:
    """Columns as high as the mean of their values, the axis beside them; `#` where the terminal has no block characters."""
    finite = [(x, y) for x, y in points if math.isfinite(y)]
    if not finite:
        return "  (no finite value)"
    means = _columns(finite, min(width, len(finite)))
    high, low = max(means), min(means)
    # the lowest column keeps a little height; the axis shows its value
    floor = low - 0.05 * (high - low or abs(low) or 1.0)
    eighths = [max(1, round((y - floor) / (high - floor or 1.0) * height * 8)) for y in means]
    blocks = _EIGHTHS if _has_blocks(encoding) else " ########"
    rows = []
    for row in range(height - 1, -1, -1):
        label = plain(high) if row == height - 1 else plain(low) if row == 0 else ""
        rows.append(f"{label:>9} " + "".join(blocks[min(8, max(0, e - 8 * row))] for e in eighths).rstrip())
    first, last = f"{finite[0][0]:,.0f}", f"{finite[-1][0]:,.0f}"
    steps = first if len(means) == 1 else first + " " + last.rjust(len(means) - len(first) - 1)
    return "\n".join([*rows, " " * 10 + steps])


def _columns(points: Sequence[tuple[float, float]], count: int) -> list[float]:
    cuts = [round(i * len(points) / count) for i in range(count + 1)]
    return [sum(y for _, y in points[a:b]) / (b - a) for a, b in pairwise(cuts)]


def _has_blocks(encoding: str | None) -> bool:
    try:
        _EIGHTHS.encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
