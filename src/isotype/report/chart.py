"""Line charts and bars as inline SVG. Colours are CSS variables, so that one drawing serves light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from markupsafe import Markup

Point = tuple[float, float]
MOST_POINTS = 600  # of one line: more than a page has pixels for


@dataclass(frozen=True)
class Series:
    """A named line. `faint`: the raw values behind a smoothed line; `dots`: few values, each with its own mark."""

    name: str
    points: Sequence[Point]
    look: Literal["line", "faint", "dots"] = "line"
    colour: int = 1


@dataclass(frozen=True)
class Guide:
    """A horizontal line at a value that means something."""

    value: float
    label: str


def line_chart(
    series: Sequence[Series],
    *,
    label: str,
    written: Callable[[float], str],
    guides: Sequence[Guide] = (),
    from_zero: bool = False,
    width: int = 460,
    height: int = 190,
) -> Markup:
    """An SVG of the series over steps; `written` writes a value on the axis. Empty when nothing finite is there."""
    finite = [p for s in series for p in s.points if math.isfinite(p[1])]
    if not finite:
        return Markup("")
    low, high = min(y for _, y in finite), max(y for _, y in finite)
    # A guide far above the curve would flatten it: it is drawn only where it is in reach.
    shown = [g for g in guides if math.isfinite(g.value) and g.value <= high * 3 + 1e-12]
    low, high = min([low, *(g.value for g in shown)]), max([high, *(g.value for g in shown)])
    ticks = nice_ticks(0.0 if from_zero else low, high)
    frame = _Frame(width, height, min(x for x, _ in finite), max(x for x, _ in finite), ticks[0], ticks[-1], written, ticks)
    parts = [*frame.grid(), *(p for s in series for p in frame.series(s)), *(frame.guide(g) for g in shown), *frame.labels(series, shown)]
    return _svg(parts, width, height, label)


def bar_chart(bars: Sequence[tuple[str, int]], *, label: str, width: int = 460, height: int = 170) -> Markup:
    """Vertical bars with their counts above and their names below."""
    if not bars or not any(count for _, count in bars):
        return Markup("")
    top, bottom, step, most = 22, height - 24, width / len(bars), max(count for _, count in bars)
    parts = []
    for i, (name, count) in enumerate(bars):
        size = (bottom - top) * count / most
        w = min(step * 0.76, 64.0)
        x = (i + 0.5) * step - w / 2
        parts.append(f'<rect class="bar" x="{x:.1f}" y="{bottom - size:.1f}" width="{w:.1f}" height="{max(size, 1.0):.1f}" rx="3"/>')
        middle = x + w / 2
        parts.append(f'<text class="value" x="{middle:.1f}" y="{bottom - size - 6:.1f}" text-anchor="middle">{count:,}</text>')
        parts.append(f'<text class="tick" x="{middle:.1f}" y="{height - 7}" text-anchor="middle">{escape(name)}</text>')
    parts.append(f'<line class="axis" x1="0" x2="{width}" y1="{bottom}" y2="{bottom}"/>')
    return _svg(parts, width, height, label)


def nice_ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Round values that enclose [low, high]."""
    if high <= low:
        pad = abs(low) * 0.1 or 1.0
        low, high = (0.0 if low >= 0 else low - pad), high + pad
    step = (high - low) / about
    magnitude = 10.0 ** math.floor(math.log10(step))
    step = magnitude * next(m for m in (1, 2, 2.5, 5, 10) if m * magnitude >= step * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * k for k in range(first, last + 1)]


def smoothed(points: Sequence[Point], share: float = 0.04) -> list[Point]:
    """A moving average over `share` of the points; values that are not finite break it and stay."""
    span = max(1, int(len(points) * share / 2))
    result: list[Point] = []
    for i, (x, y) in enumerate(points):
        near = [v for _, v in points[max(0, i - span) : i + span + 1] if math.isfinite(v)]
        result.append((x, sum(near) / len(near) if near and math.isfinite(y) else math.nan))
    return result


def thinned(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """At most about `most` points: of every bucket its smallest and largest, so that no peak is lost."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(len(points) / (most // 2))
    result: list[Point] = []
    for start in range(0, len(points), size):
        bucket = points[start : start + size]
        finite = [p for p in bucket if math.isfinite(p[1])]
        if len(finite) < len(bucket):
            result.append(next(p for p in bucket if not math.isfinite(p[1])))
        if finite:
            result += sorted({min(finite, key=lambda p: p[1]), max(finite, key=lambda p: p[1])})
    return sorted(result, key=lambda p: p[0])


@dataclass(frozen=True)
class _Frame:
    """The plot area and its scales."""

    width: int
    height: int
    x0: float
    x1: float
    y0: float
    y1: float
    written: Callable[[float], str]
    ticks: Sequence[float]

    left, right, top, bottom = 52, 58, 10, 24

    def x(self, value: float) -> float:
        span = self.width - self.left - self.right
        return self.left + (span * (value - self.x0) / (self.x1 - self.x0) if self.x1 > self.x0 else span / 2)

    def y(self, value: float) -> float:
        return self.height - self.bottom - (self.height - self.top - self.bottom) * (value - self.y0) / (self.y1 - self.y0)

    def grid(self) -> list[str]:
        end, base = self.width - self.right, self.height - self.bottom
        parts = []
        for tick in self.ticks:
            y = self.y(tick)
            parts.append(f'<line class="grid" x1="{self.left}" x2="{end}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text class="tick" x="{self.left - 7}" y="{y + 3.5:.1f}" text-anchor="end">{escape(self.written(tick))}</text>')
        inside = [t for t in nice_ticks(self.x0, self.x1) if self.x0 <= t <= self.x1 and t == int(t)] or [self.x0]
        for tick in inside:
            parts.append(f'<text class="tick" x="{self.x(tick):.1f}" y="{base + 15}" text-anchor="middle">{tick:,.0f}</text>')
        parts.append(f'<line class="axis" x1="{self.left}" x2="{end}" y1="{base}" y2="{base}"/>')
        return parts

    def guide(self, guide: Guide) -> str:
        y = self.y(guide.value)
        return f'<line class="guide" x1="{self.left}" x2="{self.width - self.right}" y1="{y:.1f}" y2="{y:.1f}"/>'

    def labels(self, series: Sequence[Series], guides: Sequence[Guide]) -> list[str]:
        """Last values and guides at the right edge, moved apart where they would overlap."""
        wanted = [(self.y(g.value), "guide-label", g.label) for g in guides]
        for one in series:
            finite = [y for _, y in one.points if math.isfinite(y)]
            if finite and one.look != "faint":
                wanted.append((self.y(finite[-1]), "value", self.written(finite[-1])))
        placed: list[str] = []
        lowest = -math.inf
        for y, look, text in sorted(wanted):
            lowest = max(y, lowest + 13)
            placed.append(f'<text class="{look}" x="{self.width - self.right + 8}" y="{lowest + 3.5:.1f}">{escape(text)}</text>')
        return placed

    def series(self, series: Series) -> list[str]:
        points = thinned(series.points)
        finite = [p for p in points if math.isfinite(p[1])]
        if not finite:
            return []
        parts = [f'<path class="{series.look} c{series.colour}" d="{self._path(points)}"/>']
        if series.look == "dots" or len(finite) == 1:
            for x, y in finite:
                title = f"<title>{escape(series.name)} at step {x:,.0f}: {escape(self.written(y))}</title>"
                parts.append(f'<circle class="dot c{series.colour}" cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" r="4">{title}</circle>')
        for x in [x for x, y in points if not math.isfinite(y)]:
            mark = f"<title>{escape(series.name)} is not finite at step {x:,.0f}</title>"
            parts.append(f'<circle class="lost" cx="{self.x(min(max(x, self.x0), self.x1)):.1f}" cy="{self.top + 4}" r="4">{mark}</circle>')
        return parts

    def _path(self, points: Sequence[Point]) -> str:
        """A line that is interrupted where a value is not finite."""
        words, pen_up = [], True
        for x, y in points:
            if math.isfinite(y):
                words.append(f"{'M' if pen_up else 'L'}{self.x(x):.1f} {self.y(y):.1f}")
            pen_up = not math.isfinite(y)
        return "".join(words)


def _svg(parts: Sequence[str], width: int, height: int, label: str) -> Markup:
    return Markup(f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>')
