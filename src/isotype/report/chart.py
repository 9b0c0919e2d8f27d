"""Plots as inline SVG. Colours are CSS variables, so that one drawing serves light and dark pages.

A chart needs no script: it is overlaid with invisible columns, and the one under the pointer shows its values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from markupsafe import Markup

from .plots import Guide, Plot, Point, Series, thinned

COLUMNS = 48  # columns of a chart that show their values under the pointer


def line_chart(plot: Plot, *, width: int = 460, height: int = 190) -> Markup:
    """Empty when no value is finite."""
    finite = plot.finite
    if not finite:
        return Markup("")
    shown, ticks = plot.bounds
    frame = _Frame(plot, width, height, min(x for x, _ in finite), max(x for x, _ in finite), ticks)
    parts = [
        *frame.grid(),
        *(frame.resumed(step) for step in plot.marks),
        *(p for s in plot.series for p in frame.series(s)),
        *(frame.guide(g) for g in shown),
    ]
    return _svg([*parts, *frame.labels(shown), *frame.columns()], width, height, plot.title)


class _Frame:
    """The plot area and its scales."""

    left, right, top, bottom = 52, 58, 14, 24

    def __init__(self, plot: Plot, width: int, height: int, first: float, last: float, ticks: Sequence[float]) -> None:
        self.plot, self.written, self.width, self.height, self.ticks = plot, plot.written, width, height, ticks
        self.x0, self.x1, self.y0, self.y1 = first, last, ticks[0], ticks[-1]
        self.end, self.base = width - self.right, height - self.bottom

    def x(self, value: float) -> float:
        span = self.end - self.left
        return self.left + (span * (value - self.x0) / (self.x1 - self.x0) if self.x1 > self.x0 else span / 2)

    def y(self, value: float) -> float:
        return self.base - (self.base - self.top) * (value - self.y0) / (self.y1 - self.y0)

    def grid(self) -> list[str]:
        parts = []
        for tick in self.ticks:
            y = self.y(tick)
            parts.append(f'<line class="grid" x1="{self.left}" x2="{self.end}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text class="tick" x="{self.left - 7}" y="{y + 3.5:.1f}" text-anchor="end">{escape(self.written(tick))}</text>')
        for tick in self.plot.steps:
            parts.append(f'<text class="tick" x="{self.x(tick):.1f}" y="{self.base + 15}" text-anchor="middle">{tick:,.0f}</text>')
        parts.append(f'<text class="tick" x="{self.end + 24}" y="{self.base + 15}">step</text>')
        parts.append(f'<line class="axis" x1="{self.left}" x2="{self.end}" y1="{self.base}" y2="{self.base}"/>')
        return parts

    def resumed(self, step: int) -> str:
        x = self.x(step)
        line = f'<line class="resumed" x1="{x:.1f}" x2="{x:.1f}" y1="{self.top}" y2="{self.base}"/>'
        return f'{line}<text class="tick" x="{x + 4:.1f}" y="{self.top + 9}">resumed</text>' if self.plot.key == "loss" else line

    def guide(self, guide: Guide) -> str:
        y = self.y(guide.value)
        return f'<line class="guide" x1="{self.left}" x2="{self.end}" y1="{y:.1f}" y2="{y:.1f}"/>'

    def labels(self, guides: Sequence[Guide]) -> list[str]:
        """Last values and guides at the right edge, moved apart where they would overlap."""
        wanted = [(self.y(g.value), "guide-label", g.label) for g in guides]
        for one in self.plot.series:
            finite = [y for _, y in one.points if math.isfinite(y)]
            if finite and one.look != "faint":
                wanted.append((self.y(finite[-1]), f"value c{one.colour}", self.written(finite[-1])))
        placed: list[str] = []
        lowest = -math.inf
        for y, look, text in sorted(wanted):
            lowest = max(y, lowest + 13)
            placed.append(f'<text class="{look}" x="{self.end + 8}" y="{lowest + 3.5:.1f}">{escape(text)}</text>')
        return placed

    def series(self, series: Series) -> list[str]:
        points = thinned(series.points)
        finite = [p for p in points if math.isfinite(p[1])]
        if not finite:
            return []
        parts = [f'<path class="{series.look} c{series.colour}" d="{self._path(points)}"/>']
        if series.look == "dots" or len(finite) == 1:
            parts += [f'<circle class="dot c{series.colour}" cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" r="4"/>' for x, y in finite]
        for x in [x for x, y in points if not math.isfinite(y)]:
            mark = f"<title>{escape(series.name)} is not finite at step {x:,.0f}</title>"
            parts.append(f'<circle class="lost" cx="{self.x(min(max(x, self.x0), self.x1)):.1f}" cy="{self.top}" r="4">{mark}</circle>')
        return parts

    def columns(self) -> list[str]:
        """Invisible columns; under the pointer each shows a line and the values at its step."""
        values = [{x: y for x, y in s.points if math.isfinite(y)} for s in self.plot.series]
        steps = sorted({x for found in values for x in found})
        drawn = {x for s, found in zip(self.plot.series, values) if s.look == "dots" for x in found} if len(steps) > COLUMNS else set(steps)
        drawn |= set(steps[:: max(1, len(steps) // COLUMNS)]) | {steps[-1]}
        if len(drawn) > 3 * COLUMNS:
            drawn = set(sorted(drawn)[:: len(drawn) // COLUMNS])
        parts = []
        places = [(self.x(step), step) for step in sorted(drawn)]
        for i, (x, step) in enumerate(places):
            start = (places[i - 1][0] + x) / 2 if i else self.left
            stop = (x + places[i + 1][0]) / 2 if i + 1 < len(places) else self.end
            said = [f"step {step:,.0f}"]
            for one, found in zip(self.plot.series, values):
                if step in found:
                    name, _, how = one.name.partition(", ")
                    said.append(f"{'smoothed' if how.startswith('smoothed') else name} {self.written(found[step])}")
            hit = f'<rect class="hit" x="{start:.1f}" y="0" width="{max(stop - start, 0.1):.1f}" height="{self.height}"/>'
            line = f'<line class="at" x1="{x:.1f}" x2="{x:.1f}" y1="{self.top}" y2="{self.base}"/>'
            text = f'<text class="said" x="{self.end}" y="9" text-anchor="end">{escape("   ".join(said))}</text>'
            parts.append(f'<g class="column">{hit}{line}{text}</g>')
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
