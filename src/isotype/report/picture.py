"""`report.png`: the page's essentials on one picture, for a chat window. Drawn by matplotlib, without a display."""

from __future__ import annotations

import contextlib
import io
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from textwrap import wrap
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.patches import FancyBboxPatch
from matplotlib.ticker import FuncFormatter
from matplotlib.transforms import Bbox

from .page import Tile, samples, status, subtitle, tiles
from .plots import Plot, loss_plot, plots
from .record import RunRecord, pictures_over_time
from .verdicts import precision, preflight, verdict

WIDTH, DPI, MARGIN, GAP = 12.0, 120, 0.45, 0.16  # inches, dots an inch
PAGE, CARD, INK, SOFT, FAINT, LINE = "#f5f5f2", "#ffffff", "#171714", "#54534d", "#6a6962", "#e4e3dc"
COLOURS = {1: "#2563c4", 2: "#b8500f"}
MOODS = {"good": ("#17693e", "#e2f3e9"), "warn": ("#7a4f00", "#fbf0d8"), "bad": ("#a5211a", "#fce8e6"), "busy": ("#1e55ab", "#e4edfb")}
COLUMNS, MOST_SMALL, MOST_SAMPLES, MOST_TEXT = 3, 6, 3, 300  # characters, of which a line shows what fits
MOST_DRAWN, MOST_TIMES = 6, 7  # prompts and steps in the grid of a diffusion run


def picture(record: RunRecord) -> bytes:
    """A PNG of 1440 pixels' width, as high as it needs to be."""
    sheet = _Sheet()
    _head(sheet, record)
    if error := record.result.get("error"):
        lines = [line for text in str(error).splitlines()[:6] for line in wrap(_clean(text), 150)[:2]]
        _lines(sheet, lines, colour=MOODS["bad"][0], back=MOODS["bad"][1])
    if record.metrics:
        said = verdict(record)
        colour, back = MOODS[said.mood]
        _lines(
            sheet,
            [line for text in (said.learnt, said.precision) for line in wrap(_clean(text), 140)],
            colour=colour,
            back=back,
            mono=False,
        )
    _tiles(sheet, tiles(record))
    if loss := loss_plot(record):
        _curves(sheet, sheet.axes(MARGIN, WIDTH - 2 * MARGIN, 3.1), loss)
        sheet.down(3.1)
    every = plots(record)
    small = [plot for plot in every if plot.constant is None][:MOST_SMALL]
    for start in range(0, len(small), COLUMNS):
        for span, plot in zip(sheet.columns(COLUMNS), small[start : start + COLUMNS]):
            _curves(sheet, sheet.axes(*span, 2.0), plot)
        sheet.down(2.0)
    if same := [f"{plot.title}: {plot.constant}" for plot in every if plot.constant is not None]:
        _lines(sheet, wrap(f"The same throughout: {',  '.join(same)}", 150), colour=SOFT, back=CARD, mono=False)
    _precision(sheet, record)
    _samples(sheet, record)
    return sheet.png()


class _Sheet:
    """A page of variable height: boxes are placed from top to bottom, in inches, and the figure is cut to the used height."""

    def __init__(self) -> None:
        self.height, self.used = 40.0, MARGIN
        self.figure = Figure(figsize=(WIDTH, self.height), dpi=DPI, facecolor=PAGE)  # what is measured is what is drawn
        self.canvas = FigureCanvasAgg(self.figure)

    def down(self, inches: float, gap: float = GAP) -> None:
        self.used += inches + gap

    def columns(self, n: int) -> list[tuple[float, float]]:
        """(left, width) of each."""
        width = (WIDTH - 2 * MARGIN - (n - 1) * GAP) / n
        return [(MARGIN + i * (width + GAP), width) for i in range(n)]

    def text(self, x: float, y: float, words: str, *, size: float = 10, colour: str = INK, mono: bool = False, **how: Any) -> Any:
        """Words at `x` inches from the left and `y` below the current height; a dollar sign is a dollar sign."""
        family = "DejaVu Sans Mono" if mono else "DejaVu Sans"
        return self.figure.text(
            x / WIDTH,
            1 - (self.used + y) / self.height,
            words,
            fontsize=size,
            color=colour,
            va="top",
            family=family,
            parse_math=False,
            **how,
        )

    def line(self, x: float, y: float, words: str, *, right: float = WIDTH - MARGIN - 0.18, **how: Any) -> Any:
        """`text` on one line, cut where it would pass `right` inches from the left."""
        drawn = self.text(x, y, words, **how)
        with _any_script():
            while (end := drawn.get_window_extent(self.canvas.get_renderer()).x1 / self.figure.dpi) > right and words:
                words = words[: int(len(words) * (right - x) / (end - x)) - 1]
                drawn.set_text(f"{words.rstrip()}…")
        return drawn

    def card(self, left: float, width: float, height: float, colour: str = CARD, edge: str = LINE) -> None:
        x, y = left / WIDTH, 1 - (self.used + height) / self.height
        box = FancyBboxPatch(
            (x, y), width / WIDTH, height / self.height, boxstyle="round,pad=0,rounding_size=0.008", mutation_aspect=WIDTH / self.height,
            facecolor=colour, edgecolor=edge, linewidth=0.8, transform=self.figure.transFigure, zorder=0,
        )  # fmt: skip
        self.figure.add_artist(box)

    def axes(self, left: float, width: float, height: float) -> Axes:
        """A card with axes inside."""
        self.card(left, width, height)
        before, after, above, below = 0.72, 0.82, 0.52, 0.34  # from its edges
        return self.figure.add_axes(
            (
                (left + before) / WIDTH,
                1 - (self.used + height - below) / self.height,
                (width - before - after) / WIDTH,
                (height - above - below) / self.height,
            ),
            facecolor="none",
        )

    def png(self) -> bytes:
        used = self.used + MARGIN - GAP
        with io.BytesIO() as file, _any_script():
            box = Bbox([[0, self.height - used], [WIDTH, self.height]])
            self.figure.savefig(file, format="png", dpi=DPI, facecolor=PAGE, bbox_inches=box)
            return file.getvalue()


@contextmanager
def _any_script() -> Iterator[None]:
    """Hides matplotlib's warnings about missing glyphs, since a model may answer in any script."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        yield


def _head(sheet: _Sheet, record: RunRecord) -> None:
    words, mood = status(record)
    name = sheet.line(MARGIN, 0, _clean(record.folder.resolve().name), right=WIDTH - MARGIN - 3, size=19, weight="bold")
    colour, back = MOODS[mood]
    end = name.get_window_extent(sheet.canvas.get_renderer()).x1 / sheet.figure.dpi
    sheet.text(
        end + 0.25,
        0.09,
        words,
        size=9.5,
        colour=colour,
        weight="bold",
        bbox={"facecolor": back, "edgecolor": "none", "boxstyle": "round,pad=0.45"},
    )
    sheet.line(MARGIN, 0.42, _clean(subtitle(record)), right=WIDTH - MARGIN, size=10.5, colour=SOFT)
    sheet.down(0.68)


def _tiles(sheet: _Sheet, found: Sequence[Tile]) -> None:
    if not found:
        return
    for (left, width), tile in zip(sheet.columns(len(found)), found):
        sheet.card(left, width, 0.95)
        sheet.text(left + 0.14, 0.12, tile.label, size=8.5, colour=SOFT)
        sheet.text(left + 0.14, 0.32, tile.value, size=16, weight="bold")
        sheet.text(left + 0.14, 0.69, tile.note[: int(width / 0.075)], size=7.5, colour=FAINT)
    sheet.down(0.95)


def _curves(sheet: _Sheet, axes: Axes, plot: Plot) -> None:
    """A plot as on the page: faint raw values, the smoothed line, dots for evaluations, guides, and marks where a value is lost."""
    shown, ticks = plot.bounds
    for one in plot.series:
        xs, ys = [x for x, _ in one.points], [y for _, y in one.points]
        colour = COLOURS[one.colour]
        if one.look == "faint":
            axes.plot(xs, ys, color=colour, alpha=0.35, linewidth=0.8)
        else:
            lonely = "o" if one.look == "dots" or len(xs) == 1 else None
            axes.plot(xs, ys, color=colour, linewidth=1.7, marker=lonely, markersize=5, markeredgecolor=CARD, label=one.name)
        lost = [x for x, y in one.points if not math.isfinite(y)]
        axes.plot(lost, [ticks[-1]] * len(lost), "o", color=MOODS["bad"][0], markersize=5, clip_on=False)
    ends = [(g.value, g.label, SOFT) for g in shown]
    for one in plot.series:
        finite = [y for _, y in one.points if math.isfinite(y)]
        if finite and one.look != "faint":
            ends.append((finite[-1], plot.written(finite[-1]), COLOURS[one.colour]))
    for step in plot.marks:
        axes.axvline(step, color=FAINT, linewidth=1, linestyle=(0, (1, 2)))
        if plot.key == "loss":
            axes.annotate("resumed", (step, 1), xycoords=("data", "axes fraction"), xytext=(3, -8), textcoords="offset points", fontsize=7,
                          color=FAINT, parse_math=False)  # fmt: skip
    for guide in shown:
        axes.axhline(guide.value, color=FAINT, linewidth=1, linestyle=(0, (5, 4)))
    _style(axes, plot.title, plot.written, ticks)
    axes.set_xticks(plot.steps, [f"{step:,.0f}" for step in plot.steps])
    room = (ticks[-1] - ticks[0]) * 0.17 / (axes.get_position().height * sheet.height)
    lowest = -math.inf
    for value, words, colour in sorted(ends):
        lowest = max(value, lowest + room)
        axes.annotate(words, (1, lowest), xycoords=("axes fraction", "data"), xytext=(6, 0), textcoords="offset points", va="center",
                      fontsize=8, color=colour, weight="bold", parse_math=False, annotation_clip=False)  # fmt: skip
    if plot.legend:
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3, frameon=False, fontsize=8, labelcolor=SOFT, borderaxespad=0.2)


def _style(axes: Axes, title: str, written: Callable[[float], str], ticks: Sequence[float]) -> None:
    axes.set_title(title, loc="left", fontsize=10.5, fontweight="bold", color=INK, pad=9, parse_math=False)
    axes.set_yticks(ticks)
    axes.set_ylim(ticks[0], ticks[-1])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: written(value)))
    axes.grid(axis="y", color=LINE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=7.5, labelcolor=FAINT, pad=5)
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)


def _precision(sheet: _Sheet, record: RunRecord) -> None:
    rows = precision(record)["rows"]
    if not rows:
        return
    height = 0.75 + 0.215 * len(rows)
    sheet.card(MARGIN, WIDTH - 2 * MARGIN, height)
    checked = preflight(record)
    said = f"; preflight: {checked['passed']} of {len(checked['checks'])} checks passed" if checked else ""
    sheet.text(MARGIN + 0.18, 0.16, f"Precision, declared and observed{said}", size=10.5, weight="bold")
    for i, row in enumerate(rows):
        y = 0.52 + 0.215 * i
        sheet.text(MARGIN + 0.18, y, _clean(row["role"]), size=8.5, colour=SOFT, mono=True)
        sheet.text(MARGIN + 1.75, y, _clean(str(row["declared"] or ""))[:40], size=8.5, mono=True)
        sign = {"good": "✓ ", "bad": "✗ "}.get(row["mood"], "")
        colour = MOODS[row["mood"]][0] if row["mood"] else FAINT
        sheet.text(MARGIN + 5.2, y, (sign + _clean(row["observed"]))[:60], size=8.5, colour=colour)
    sheet.down(height)


def _samples(sheet: _Sheet, record: RunRecord) -> None:
    """Prompts with their first and last answer side by side, and the answer in the data; pictures as a grid over time."""
    steps, drawn = pictures_over_time(record, rows=MOST_DRAWN, columns=MOST_TIMES)
    if drawn:
        _grid(sheet, steps, drawn)
        return
    shown = [sample for sample in samples(record) if sample["answers"]][:MOST_SAMPLES]
    if not shown:
        return
    steps = sorted({one["step"] for sample in shown for one in sample["answers"]})
    middle = WIDTH / 2
    rows_of = [3 + bool(sample["reference"]) for sample in shown]
    height = 0.62 + 0.225 * sum(rows_of) + 0.1 * (len(shown) - 1)
    sheet.card(MARGIN, WIDTH - 2 * MARGIN, height)
    title = "Samples before and after" if len(steps) > 1 else "Samples"
    sheet.text(MARGIN + 0.18, 0.16, title, size=10.5, weight="bold")
    y = 0.5
    for sample in shown:
        sheet.line(MARGIN + 0.18, y, _short(sample["prompt"]), size=9, weight="bold")
        ends = sample["answers"][:1] + sample["answers"][1:][-1:]
        for index, one in enumerate(ends):
            left, right = (
                (MARGIN + 0.18, middle - 0.1) if index == 0 and len(ends) > 1 else (middle if index else MARGIN + 0.18, WIDTH - 0.6)
            )
            which = ("before, ", "after, ")[index] if len(ends) > 1 else ""
            sheet.text(left, y + 0.225, f"{which}step {one['step']}", size=8, colour=FAINT)
            sheet.line(left, y + 0.43, _short(one["text"]) or "nothing", right=right, size=9)
        y += 0.675
        if sample["reference"]:
            sheet.text(MARGIN + 0.18, y, "in the data", size=8, colour=FAINT)
            sheet.line(MARGIN + 1.0, y, _short(str(sample["reference"])), size=9, colour=MOODS["good"][0])
            y += 0.225
        y += 0.1
    sheet.down(height)


def _grid(sheet: _Sheet, steps: Sequence[int], drawn: Mapping[str, Mapping[int, bytes]]) -> None:
    """A row a prompt, a column a step."""
    gap, words = 0.08, 2.2
    side = min(1.5, (WIDTH - 2 * MARGIN - 0.36 - words - gap * (len(steps) - 1)) / len(steps))
    height = 0.72 + (side + gap) * len(drawn)
    sheet.card(MARGIN, WIDTH - 2 * MARGIN, height)
    sheet.text(MARGIN + 0.18, 0.16, "Samples over time", size=10.5, weight="bold")
    lefts = [MARGIN + 0.18 + words + j * (side + gap) for j in range(len(steps))]
    for left, step in zip(lefts, steps):
        sheet.text(left, 0.42, f"step {step}", size=8, colour=FAINT)
    for i, (prompt, by_step) in enumerate(drawn.items()):
        top = 0.62 + i * (side + gap)
        for k, line in enumerate(wrap(_short(prompt), 24)[:5]):
            sheet.text(MARGIN + 0.18, top + 0.2 * k, line, size=9, weight="bold")
        for left, step in zip(lefts, steps):
            if step not in by_step:
                continue
            axes = sheet.figure.add_axes((left / WIDTH, 1 - (sheet.used + top + side) / sheet.height, side / WIDTH, side / sheet.height))
            axes.axis("off")
            with contextlib.suppress(OSError, SyntaxError, ValueError):  # a damaged file leaves its place empty
                axes.imshow(imread(io.BytesIO(by_step[step]), format="png"))
    sheet.down(height)


def _lines(sheet: _Sheet, lines: Sequence[str], *, colour: str, back: str, mono: bool = True) -> None:
    height = 0.24 + 0.19 * len(lines)
    sheet.card(MARGIN, WIDTH - 2 * MARGIN, height, colour=back, edge=back)
    for i, line in enumerate(lines):
        sheet.text(MARGIN + 0.18, 0.12 + 0.19 * i, line, size=8.5 if mono else 9.5, colour=colour, mono=mono)
    sheet.down(height)


def _short(text: str) -> str:
    flat = _clean(" ".join(text.split()))
    return flat[:MOST_TEXT]


def _clean(text: str) -> str:
    """The text without characters that no font can draw."""
    return "".join(c for c in text if c.isprintable())
