"""Draws the curves of a run as inline SVG.

Colours are CSS variables, so that a drawing fits light and dark pages. A chart needs no script: it
is overlaid with invisible columns, and the column under the pointer shows its values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any, Literal

from markupsafe import Markup

from ..wording import format_bytes, format_compact, format_number, format_percent
from .record import RunRecord, spread_evenly

Point = tuple[float, float]  # (x, y) of a curve, in units of the data
LOSSES_OF_PICTURES = (
    "Training loss: the squared error of the predicted velocity or noise, a mean over the latent"
    " pixels of a step's pictures, before its update; it depends on the noise levels that were"
    " drawn. Evaluation loss: the same at fixed noise levels of the evaluation pictures."
)
_PAIR = "over the pairs of a step"
# objective -> the training loss: a mean of what, over what
_LOSS_BY_OBJECTIVE = {
    "sft": "the mean of -ln p over the learnt tokens of a step's rows",
    "distil": (
        "the mean, over the learnt tokens of a step's rows, of the divergence between the teacher's"
        " and the student's probabilities, and of the cross-entropy with the weight"
        " distil.cross_entropy"
    ),
    "dpo": (
        f"the mean {_PAIR} of -ln sigmoid(beta m), where m is the margin: how much more the model"
        " prefers the chosen answer than the reference does. It is ln 2 = 0.693 at the start"
    ),
    "ipo": (
        f"the mean {_PAIR} of (m - 1 / (2 beta))^2, where m is the margin per token: how much more"
        " the model prefers the chosen answer than the reference does"
    ),
    "simpo": (
        f"the mean {_PAIR} of -ln sigmoid(beta m - simpo_gamma), where m is the chosen answer's mean"
        " ln p per token less the rejected answer's. There is no reference"
    ),
    "orpo": (
        f"the mean {_PAIR} of the chosen answer's -ln p per token, plus beta times -ln sigmoid of"
        " the logarithm of the ratio of the answers' odds. There is no reference"
    ),
    "cpo": (
        f"the mean {_PAIR} of -ln sigmoid(beta m), where m is the chosen answer's ln p less the"
        " rejected answer's, plus the chosen answer's -ln p per token. There is no reference"
    ),
    "kto": (
        "the weighted mean over the answers of a step of 1 - sigmoid(beta d), where d is how far a"
        " wanted answer lies above the reference point, or an unwanted answer below it. It is 0.5"
        " at the start"
    ),
    "reward": (
        f"the mean {_PAIR} of -ln sigmoid(s - t), where s and t are the scores of the chosen and"
        " the rejected answer. It is near ln 2 = 0.693 at the start"
    ),
}
# A noisy curve with more points is smoothed, and the raw curve is drawn faintly behind it.
SMOOTHED_ABOVE = 30
MAX_POINTS = 600  # per line; more points than a page has pixels for
COLUMNS = 48  # the number of columns of a chart that show values under the pointer
FIT_RATIO = 0.5  # an axis starts above 0 if the minimum is above this share of the maximum
_NOISY = ("tokens_per_second", "share_changed")  # metrics that are drawn as a smoothed line


@dataclass(frozen=True)
class Series:
    """A named line. The style `faint` is for the raw values behind a smoothed line. The style
    `dots` is for a small number of values, each of which is drawn as a dot.
    """

    name: str
    points: Sequence[Point]
    style: Literal["line", "faint", "dots"] = "line"
    colour: int = 1


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Curves over steps, with a title and a sentence that explains them.

    format_value  formats a value for the axis
    guide         the value and the label of a horizontal line
    warning       a sentence about values that are not finite
    from_zero     whether the axis begins at 0, unless the values are so close together that the
                  curve would look flat
    resumed       the steps at which the run was resumed
    """

    key: str
    title: str
    series: Sequence[Series]
    format_value: Callable[[float], str] = format_number
    note: str = ""
    guide: tuple[float, str] | None = None
    from_zero: bool = True
    warning: str = ""
    resumed: Sequence[int] = ()

    @property
    def finite(self) -> list[Point]:
        return [p for series in self.series for p in _finite(series.points)]

    @property
    def legend(self) -> list[Series]:
        """Returns the series that the legend shows. A single series needs no legend."""
        labelled = [series for series in self.series if series.style != "faint"]
        return labelled if len(labelled) > 1 else []


def describe_losses(record: RunRecord) -> str:
    """Returns a sentence on the training loss of the run's objective, and one on the evaluation
    loss.
    """
    user_objective = record.plan.get("objective")
    if user_objective:
        return (
            f"Training loss: the value that your objective {user_objective} returns, before a step's"
            " update. Evaluation loss: the same of the evaluation rows, without dropout."
        )
    if record.plan.get("task") == "diffusion":
        return LOSSES_OF_PICTURES
    objective = str(record.setting("train", "objective") or ("sft" if record.settings else ""))
    # an attached trainer has no settings, and computes its own loss
    loss = _LOSS_BY_OBJECTIVE.get(objective, "the loss that the trainer logs")
    rows = "all learnt tokens" if objective in ("sft", "distil") else "all"
    return (
        f"Training loss: {loss}; it is computed before the step's update. Evaluation loss: the same"
        f" mean over {rows} of the evaluation rows, without dropout."
    )


def loss_plot(record: RunRecord) -> Plot | None:
    """Returns the plot of the training loss, raw and smoothed, with the evaluations. Returns None
    if no value is finite.
    """
    note = describe_losses(record)
    plot = _metric_plot(
        record,
        "loss",
        "Loss",
        record.curve("eval_loss"),
        name="training loss",
        smoothing="smoothed over 4% of the steps",
        evaluation_name="evaluation loss",
        note=note,
        from_zero=False,
    )
    return plot if plot.finite else None


# (key, title, note, format of values); these metrics have evaluations
_PREFERENCE_PLOTS: tuple[tuple[str, str, str, Callable[[float], str]], ...] = (
    ("rewards/margins", "Margin", "The mean reward of chosen answers above that of rejected ones.", format_number),
    ("margin", "Margin", "The mean score of chosen answers above that of rejected ones.", format_number),
    ("accuracy", "Accuracy", "Pairs in which the chosen answer has the higher score.", format_percent),
    ("rewards/accuracies", "Accuracy", "Pairs with the larger reward on the chosen side; of kto, answers on their side of its reference.",
     format_percent),
)  # fmt: skip
_STEP_PLOTS: tuple[tuple[str, str, str, Callable[[float], str]], ...] = (
    (
        "share_changed",
        "Share changed",
        "Trained elements that the update before moved. Low: updates vanish in rounding.",
        format_percent,
    ),
    ("learning_rate", "Learning rate", "", format_number),
    ("tokens_per_second", "Tokens per second", "", format_compact),
    ("memory_bytes", "Peak memory", "", format_bytes),
    (
        "promotions",
        "Unintended promotions",
        "Module outputs wider than the declared compute dtype, a step.",
        format_number,
    ),
    (
        "loss_scale",
        "Loss scale",
        "One that keeps falling means gradients that overflow.",
        format_compact,
    ),
)


def plots(record: RunRecord) -> list[Plot]:
    """Returns the plots of all metrics except the loss. A metric that the run did not record has no
    plot.
    """
    result = []
    evaluation_sets = record.setting("data", "eval")
    for name in evaluation_sets if isinstance(evaluation_sets, dict) else ():
        key = f"eval_loss_{name}"
        title = f"Evaluation loss, {name}"
        result.append(
            _metric_plot(
                record,
                key,
                title,
                record.curve(key),
                points=[],
                evaluation_name=title.lower(),
                note=describe_losses(record),
                from_zero=False,
            )
        )
    for key, title, note, format_value in _PREFERENCE_PLOTS:
        result.append(
            _metric_plot(
                record,
                key,
                title,
                record.curve(f"eval_{key}"),
                name="training",
                note=note,
                format_value=format_value,
            )
        )
    result.append(_gradient_norm_plot(record))
    overflow_count = record.metrics_rows.overflow_count
    if overflow_count:
        scaled_count = record.metrics_rows.scaled_count
        skipped = f" {overflow_count} of {scaled_count} logged steps overflowed and were skipped."
    else:
        skipped = ""
    for key, title, note, format_value in _STEP_PLOTS:
        if key != "promotions" or any(v for _, v in record.curve(key)):
            note += skipped if key == "loss_scale" else ""
            result.append(
                _metric_plot(
                    record, key, title, is_noisy=key in _NOISY, note=note, format_value=format_value
                )
            )
    return [plot for plot in result if plot.finite]


def _metric_plot(
    record: RunRecord,
    key: str,
    title: str,
    evaluations: Sequence[Point] = (),
    *,
    points: list[Point] | None = None,
    name: str = "",
    is_noisy: bool = True,
    smoothing: str = "smoothed",
    evaluation_name: str = "evaluation",
    **options: Any,
) -> Plot:
    """Returns the plot of a metric. If the curve is noisy and has many points, the raw values are
    drawn faintly behind a smoothed line. If `points` is None, the plot shows the recorded values of
    the metric `key`.
    """
    if points is None:
        points = record.curve(key)
    name = name or title.lower()
    series = []
    if is_noisy and len(points) > SMOOTHED_ABOVE:
        series.append(Series(name, points, "faint"))
        series.append(Series(f"{name}, {smoothing}", smooth(points)))
    elif points:
        series.append(Series(name, points, "line"))
    if evaluations:
        series.append(Series(evaluation_name, evaluations, "dots", colour=2))
    nonfinite_count = sum(not math.isfinite(v) for _, v in [*points, *evaluations])
    warning = ""
    if nonfinite_count == 1:
        warning = "1 value is not finite: marked at the top."
    elif nonfinite_count:
        warning = f"{nonfinite_count} values are not finite: marked at the top."
    return Plot(
        key=key, title=title, series=series, warning=warning, resumed=record.resume_steps, **options
    )


def _gradient_norm_plot(record: RunRecord) -> Plot:
    clip = record.setting("train", "clip")
    if not isinstance(clip, int | float) or clip <= 0:
        return _metric_plot(record, "grad_norm", "Gradient norm", note="Not clipped.")
    finite_values = [v for _, v in _finite(record.curve("grad_norm"))]
    clipped_share = sum(value > clip for value in finite_values) / max(1, len(finite_values))
    note = f"Clipped above {format_number(float(clip))}: {format_percent(clipped_share)} of the steps were."
    return _metric_plot(
        record,
        "grad_norm",
        "Gradient norm",
        note=note,
        guide=(float(clip), f"clip {format_number(float(clip))}"),
    )


def _finite(points: Sequence[Point]) -> list[Point]:
    return [point for point in points if math.isfinite(point[1])]


def smooth(points: Sequence[Point]) -> list[Point]:
    """Returns a moving average over 4% of the points. Values that are not finite interrupt the
    curve.
    """
    import numpy as np

    span = max(1, int(len(points) * 0.04 / 2))
    values = np.pad([y for _, y in points], span, constant_values=math.nan)
    window = np.ones(2 * span + 1)
    is_finite = np.isfinite(values)
    # sums each window separately, so that one huge value does not make other windows inexact
    sums = np.convolve(np.where(is_finite, values, 0.0), window, "valid")
    counts = np.convolve(is_finite, window, "valid")
    return [
        (x, float(total / number) if math.isfinite(y) else math.nan)
        for (x, y), total, number in zip(points, sums, counts)
    ]


def nice_ticks(low: float, high: float) -> list[float]:
    """Returns about five round values whose range includes [low, high]."""
    if high <= low:
        pad = abs(low) * 0.1 or 1.0
        if low >= 0:
            low = 0.0
        else:
            low -= pad
        high = high + pad
    step = (high - low) / 4
    magnitude = 10.0 ** math.floor(math.log10(step))
    step = magnitude * next(
        factor for factor in (1, 2, 2.5, 5, 10) if factor * magnitude >= step * 0.999
    )
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [step * k for k in range(first, last + 1)]


def thin_points(points: Sequence[Point]) -> list[Point]:
    """Reduces the points to about MAX_POINTS. Every bucket keeps its smallest and largest values,
    so that no peak is lost, and its first value that is not finite.
    """
    if len(points) <= MAX_POINTS:
        return list(points)
    bucket_size = math.ceil(len(points) / (MAX_POINTS // 2))
    result: list[Point] = []
    for start in range(0, len(points), bucket_size):
        bucket = points[start : start + bucket_size]
        if finite := sorted(_finite(bucket), key=lambda p: p[1]):
            result += {finite[0], finite[-1]}
        result += [p for p in bucket if not math.isfinite(p[1])][:1]
    return sorted(result, key=lambda p: p[0])


def line_chart(plot: Plot, *, width: int = 460, height: int = 190) -> Markup:
    """Returns the plot as SVG. The SVG text is empty if no value is finite."""
    if not plot.finite:
        return Markup("")
    frame = _Frame(plot, width, height)
    lines = [part for series in plot.series for part in frame.series(series)]
    parts = "".join([*frame.grid(), *frame.resumed(), *lines, *frame.labels(), *frame.columns()])
    return Markup(
        f'<svg viewBox="0 0 {width} {height}" role="img"'
        f' aria-label="{escape(plot.title)}">{parts}</svg>'
    )


class _Frame:
    """The plot area and its scales. If the guide, which is a horizontal line, is far above the
    curve, it is left out. Otherwise the curve would look flat.
    """

    left_margin = 52
    right_margin = 58
    top_margin = 14
    bottom_margin = 24

    def __init__(self, plot: Plot, width: int, height: int) -> None:
        self.plot, self.format_value, self.height = plot, plot.format_value, height
        self.end = width - self.right_margin
        self.base = height - self.bottom_margin
        steps, values = zip(*plot.finite)
        low = min(values)
        high = max(values)
        self.guide = plot.guide if plot.guide and plot.guide[0] <= high * 3 + 1e-12 else None
        if self.guide:
            low = min(low, self.guide[0])
            high = max(high, self.guide[0])
        self.x0: float = min(steps)
        self.x1: float = max(steps)
        if plot.from_zero and low <= FIT_RATIO * high:
            low = 0.0
        self.ticks = nice_ticks(low, high)
        self.y0 = self.ticks[0]
        self.y1 = self.ticks[-1]

    def x(self, value: float) -> float:
        span: float = self.end - self.left_margin
        if self.x1 <= self.x0:
            return self.left_margin + span / 2
        return self.left_margin + span * (value - self.x0) / (self.x1 - self.x0)

    def y(self, value: float) -> float:
        return self.base - (self.base - self.top_margin) * (value - self.y0) / (self.y1 - self.y0)

    def _horizontal_line(self, css_class: str, y: float) -> str:
        return f'<line class="{css_class}" x1="{self.left_margin}" x2="{self.end}" y1="{y:.1f}" y2="{y:.1f}"/>'

    def _vertical_line(self, css_class: str, x: float) -> str:
        return f'<line class="{css_class}" x1="{x:.1f}" x2="{x:.1f}" y1="{self.top_margin}" y2="{self.base}"/>'

    def grid(self) -> list[str]:
        parts = []
        for tick in self.ticks:
            parts.append(self._horizontal_line("grid", self.y(tick)))
            text = escape(self.format_value(tick))
            parts.append(
                f'<text class="tick" x="{self.left_margin - 7}" y="{self.y(tick) + 3.5:.1f}"'
                f' text-anchor="end">{text}</text>'
            )
        ticks = [
            tick
            for tick in nice_ticks(self.x0, self.x1)
            if self.x0 <= tick <= self.x1 and tick == int(tick)
        ] or [self.x0]
        for tick in ticks:
            parts.append(
                f'<text class="tick" x="{self.x(tick):.1f}" y="{self.base + 15}"'
                f' text-anchor="middle">{tick:,.0f}</text>'
            )
        parts.append(f'<text class="tick" x="{self.end + 24}" y="{self.base + 15}">step</text>')
        parts.append(self._horizontal_line("axis", self.base))
        if self.guide:
            parts.append(self._horizontal_line("guide", self.y(self.guide[0])))
        return parts

    def resumed(self) -> list[str]:
        """Returns a vertical line at each step where the run was resumed."""
        positions = [self.x(step) for step in self.plot.resumed if self.x0 <= step <= self.x1]
        labels = [
            f'<text class="tick" x="{x + 4:.1f}" y="{self.top_margin + 9}">resumed</text>'
            for x in positions
            if self.plot.key == "loss"
        ]
        return [*(self._vertical_line("resumed", x) for x in positions), *labels]

    def labels(self) -> list[str]:
        """Returns the labels at the right edge: one for the last value of each line, and one for
        the guide, which is a horizontal line. Labels that would overlap are moved apart.
        """
        if self.guide:
            labels = [(self.y(self.guide[0]), "guide-label", self.guide[1])]
        else:
            labels = []
        for series in self.plot.series:
            if series.style != "faint" and (finite := _finite(series.points)):
                labels.append(
                    (
                        self.y(finite[-1][1]),
                        f"value c{series.colour}",
                        self.format_value(finite[-1][1]),
                    )
                )
        elements: list[str] = []
        label_y = -math.inf
        for y, css_class, text in sorted(labels):
            label_y = max(y, label_y + 13)
            elements.append(
                f'<text class="{css_class}" x="{self.end + 8}"'
                f' y="{label_y + 3.5:.1f}">{escape(text)}</text>'
            )
        return elements

    def series(self, series: Series) -> list[str]:
        points = thin_points(series.points)
        finite = _finite(points)
        if not finite:
            return []
        parts = [f'<path class="{series.style} c{series.colour}" d="{self._path(points)}"/>']
        if series.style == "dots" or len(finite) == 1:
            parts += [
                f'<circle class="dot c{series.colour}" cx="{self.x(x):.1f}" cy="{self.y(y):.1f}"'
                ' r="4"/>'
                for x, y in finite
            ]
        for x in [x for x, y in points if not math.isfinite(y)]:
            mark = f"<title>{escape(series.name)} is not finite at step {x:,.0f}</title>"
            parts.append(
                f'<circle class="lost" cx="{self.x(min(max(x, self.x0), self.x1)):.1f}"'
                f' cy="{self.top_margin}" r="4">{mark}</circle>'
            )
        return parts

    def columns(self) -> list[str]:
        """Returns invisible columns. The column under the pointer shows a vertical line and the
        values at its step.
        """
        values = [(series, dict(_finite(series.points))) for series in self.plot.series]
        dot_steps = {
            step for series, by_step in values if series.style == "dots" for step in by_step
        }
        steps = sorted({step for _, by_step in values for step in by_step})
        positions = [
            (self.x(step), step)
            for step in sorted(
                {*spread_evenly(steps, COLUMNS), *spread_evenly(sorted(dot_steps), COLUMNS)}
            )
        ]
        edges = [
            self.left_margin,
            *((left + right) / 2 for (left, _), (right, _) in pairwise(positions)),
            self.end,
        ]
        parts = []
        for (x, step), (start, stop) in zip(positions, pairwise(edges)):
            lines = [f"step {step:,.0f}"]
            for series, by_step in values:
                if step in by_step:
                    name, _, detail = series.name.partition(", ")
                    if detail.startswith("smoothed"):
                        name = "smoothed"
                    lines.append(f"{name} {self.format_value(by_step[step])}")
            hit_area = (
                f'<rect class="hit" x="{start:.1f}" y="0" width="{max(stop - start, 0.1):.1f}"'
                f' height="{self.height}"/>'
            )
            text = (
                f'<text class="said" x="{self.end}" y="9"'
                f' text-anchor="end">{escape("   ".join(lines))}</text>'
            )
            parts.append(f'<g class="column">{hit_area}{self._vertical_line("at", x)}{text}</g>')
        return parts

    def _path(self, points: Sequence[Point]) -> str:
        """Returns the path of a line. The line is interrupted at values that are not finite."""
        segments = []
        is_pen_up = True
        for x, y in points:
            if math.isfinite(y):
                segments.append(f"{'M' if is_pen_up else 'L'}{self.x(x):.1f} {self.y(y):.1f}")
            is_pen_up = not math.isfinite(y)
        return "".join(segments)
