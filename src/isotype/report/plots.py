"""The curves of a run as data: what `chart` draws into the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .record import RunRecord
from .words import bytes_written, count, percent, plain

Point = tuple[float, float]
LOSSES = (
    "Training loss: mean of -ln p over the learnt tokens of a step's rows, before its update. "
    "Evaluation loss: the same mean over all learnt tokens of the evaluation rows, without dropout."
)
LOSSES_OF_PICTURES = (
    "Training loss: the squared error of the predicted velocity or noise, a mean over the latent pixels of a step's pictures, before its "
    "update; it depends on the noise levels that were drawn. Evaluation loss: the same at fixed noise levels of the evaluation pictures."
)


def losses_told(record: RunRecord) -> str:
    """What the loss of this run is."""
    return LOSSES_OF_PICTURES if record.plan.get("task") == "diffusion" else LOSSES


MANY = 30  # number of points above which a noisy curve is smoothed, with the raw curve drawn faintly behind it
MOST_POINTS = 600  # of one line: more than a page has pixels for
FITTED = 0.5  # an axis is fitted to values whose least is above this share of their greatest
_NOISY = ("tokens_per_second", "share_changed")


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


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Curves over steps with a title and one sentence that says how to read them.

    written    writes a value on the axis
    trouble    what is wrong with the values themselves
    from_zero  the axis begins at 0, unless the values lie so close together that their course could not be seen
    """

    key: str
    title: str
    series: Sequence[Series]
    written: Callable[[float], str] = plain
    note: str = ""
    guides: Sequence[Guide] = ()
    from_zero: bool = True
    trouble: str = ""
    resumed: Sequence[int] = ()
    """Steps that the run went on from after it was stopped."""

    @property
    def finite(self) -> list[Point]:
        return [p for s in self.series for p in s.points if math.isfinite(p[1])]

    @property
    def legend(self) -> list[Series]:
        """The series to name: none where there is only one."""
        named = [s for s in self.series if s.look != "faint"]
        return named if len(named) > 1 else []

    @property
    def bounds(self) -> tuple[list[Guide], list[float]]:
        """The guides in reach and the ticks of the axis. A guide far above the curve would flatten it."""
        values = [y for _, y in self.finite]
        low, high = min(values), max(values)
        shown = [g for g in self.guides if math.isfinite(g.value) and g.value <= high * 3 + 1e-12]
        low, high = min([low, *(g.value for g in shown)]), max([high, *(g.value for g in shown)])
        return shown, nice_ticks(0.0 if self.from_zero and low <= FITTED * high else low, high)

    @property
    def marks(self) -> list[int]:
        """The resumes that lie within the curves."""
        first, last = min(x for x, _ in self.finite), max(x for x, _ in self.finite)
        return [step for step in self.resumed if first <= step <= last]

    @property
    def steps(self) -> list[float]:
        """Where the axis below is marked: whole steps within the curves."""
        first, last = min(x for x, _ in self.finite), max(x for x, _ in self.finite)
        return [t for t in nice_ticks(first, last) if first <= t <= last and t == int(t)] or [first]


def loss_plot(record: RunRecord) -> Plot | None:
    """Training loss, raw and smoothed, with the evaluations."""
    plot = _plot(
        record, "loss", "Loss", record.curve("eval_loss"), name="training loss", smoothing="smoothed over 4% of the steps",
        evaluated="evaluation loss", note=losses_told(record), from_zero=False,
    )  # fmt: skip
    return plot if plot.finite else None


# key, title, note, how values are written; those with evaluations
_OF_PREFERENCES: tuple[tuple[str, str, str, Callable[[float], str]], ...] = (
    ("rewards/margins", "Margin", "The mean reward of chosen answers above that of rejected ones.", plain),
    ("margin", "Margin", "The mean score of chosen answers above that of rejected ones.", plain),
    ("accuracy", "Accuracy", "Pairs in which the chosen answer has the higher score.", percent),
    ("rewards/accuracies", "Accuracy", "Pairs with the larger reward on the chosen side; of kto, answers on their side of its reference.",
     percent),
)  # fmt: skip
_OTHERS: tuple[tuple[str, str, str, Callable[[float], str]], ...] = (
    ("share_changed", "Share changed", "Trained elements that the update before moved. Low: updates vanish in rounding.", percent),
    ("learning_rate", "Learning rate", "", plain),
    ("tokens_per_second", "Tokens per second", "", count),
    ("memory_bytes", "Peak memory", "", bytes_written),
    ("promotions", "Unintended promotions", "Module outputs wider than the declared compute dtype, a step.", plain),
    ("loss_scale", "Loss scale", "One that keeps falling means gradients that overflow.", count),
)


def plots(record: RunRecord) -> list[Plot]:
    """The smaller ones; a metric that the run did not write has none."""
    found, sets = [], record.setting("data", "eval")
    for name in sets if isinstance(sets, dict) else ():
        key, title = f"eval_loss_{name}", f"Evaluation loss, {name}"
        found.append(_plot(record, key, title, record.curve(key), points=[], evaluated=title.lower(), note=LOSSES, from_zero=False))
    for key, title, note, written in _OF_PREFERENCES:
        found.append(_plot(record, key, title, record.curve(f"eval_{key}"), name="training", note=note, written=written))
    found.append(_norm(record))
    overflowed = [row.get("overflow") is True for row in record.metrics if "loss_scale" in row]
    skipped = f" {sum(overflowed)} of {len(overflowed)} logged steps overflowed and were skipped." if any(overflowed) else ""
    for key, title, note, written in _OTHERS:
        if key != "promotions" or any(v for _, v in record.curve(key)):
            note += skipped if key == "loss_scale" else ""
            found.append(_plot(record, key, title, noisy=key in _NOISY, note=note, written=written))
    return [plot for plot in found if plot.finite]


def _plot(
    record: RunRecord, key: str, title: str, evaluations: Sequence[Point] = (), *, points: list[Point] | None = None, name: str = "",
    noisy: bool = True, smoothing: str = "smoothed", evaluated: str = "evaluation", **how: Any,
) -> Plot:  # fmt: skip
    """A metric's curve; of a noisy one with many points the raw values are faint behind a smoothed line. `points`: by default `key`'s."""
    points, name = record.curve(key) if points is None else points, name or title.lower()
    many = noisy and len(points) > MANY
    series = [Series(name, points, "faint" if many else "line")] if points else []
    series += [Series(f"{name}, {smoothing}", smoothed(points))] if many else []
    series += [Series(evaluated, evaluations, "dots", colour=2)] if evaluations else []
    return Plot(key=key, title=title, series=series, trouble=_lost([*points, *evaluations]), resumed=record.resumed_at, **how)


def _norm(record: RunRecord) -> Plot:
    clip = record.setting("train", "clip")
    finite = [v for _, v in record.curve("grad_norm") if math.isfinite(v)]
    guides, note = [], "Not clipped."
    if isinstance(clip, int | float) and clip > 0:
        over = sum(v > clip for v in finite) / len(finite) if finite else 0.0
        note = f"Clipped above {plain(float(clip))}: {percent(over)} of the steps were."
        guides = [Guide(float(clip), f"clip {plain(float(clip))}")]
    return _plot(record, "grad_norm", "Gradient norm", note=note, guides=guides)


def _lost(points: Sequence[Point]) -> str:
    lost = sum(not math.isfinite(v) for _, v in points)
    return f"{lost} value{'s are' if lost > 1 else ' is'} not finite: marked at the top." if lost else ""


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
    import numpy as np

    span = max(1, int(len(points) * share / 2))
    values, window = np.pad([y for _, y in points], span, constant_values=math.nan), np.ones(2 * span + 1)
    known = np.isfinite(values)
    # each window is added up by itself, so that one huge value leaves those without it exact
    sums, counts = np.convolve(np.where(known, values, 0.0), window, "valid"), np.convolve(known, window, "valid")
    return [(x, float(total / number) if math.isfinite(y) else math.nan) for (x, y), total, number in zip(points, sums, counts)]


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
