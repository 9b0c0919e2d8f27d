"""Curves as data, and drawn as SVG."""

from __future__ import annotations

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from isotype.report.chart import length_chart, line_chart
from isotype.report.plots import Guide, Plot, Series, nice_ticks, smoothed, thinned

NAN = float("nan")


def plot(*series: Series, **how) -> Plot:
    return Plot(key="x", title="X", series=series, **how)


def test_charts_are_well_formed_and_inside_their_frame() -> None:
    points = [(float(x), (x % 7) * 10.0**8 if x != 50 else NAN) for x in range(1, 2000)]
    svg = ElementTree.fromstring(line_chart(plot(Series("a<b", points), Series("c", [(5.0, 1.0)], "dots", 2))))
    for path in svg.iter("path"):
        numbers = [float(v) for v in re.findall(r"-?[\d.]+", path.get("d") or "")]
        assert all(0 <= x <= 460 for x in numbers[::2])
        assert all(0 <= y <= 190 for y in numbers[1::2])
        assert len(numbers) < 3000
    assert not line_chart(plot(Series("a", [(1.0, NAN)])))
    assert not length_chart([(1, 0)], label="x")


def test_pointing_at_a_chart_shows_its_values_without_a_script() -> None:
    many = [(float(x), float(x)) for x in range(1, 5000)]
    svg = ElementTree.fromstring(line_chart(plot(Series("loss", many), Series("evaluation", [(77.0, 3.5)], "dots", 2))))
    columns = [g for g in svg.iter("g") if g.get("class") == "column"]
    said = ["".join(g.itertext()) for g in columns]
    assert "step 77   loss 77   evaluation 3.5" in said
    assert said[0].startswith("step 1 ")
    assert said[-1] == "step 4,999   loss 4,999"
    assert 40 <= len(columns) <= 150
    edges = [(float(r.get("x", 0)), float(r.get("width", 0))) for g in columns for r in g.iter("rect")]
    assert all(x + width == pytest.approx(after, abs=0.15) for (x, width), (after, _) in pairwise(edges)), "columns without gaps"


def test_a_chart_has_a_text_description() -> None:
    words = plot(
        Series("loss", [(1.0, 5.0), (2.0, 3.0), (3.0, 4.0)]), guides=[Guide(1.0, "clip 1")], trouble="1 value is not finite."
    ).described()
    assert words == "X: loss from 5 at step 1 to 4 at step 3, lowest 3 at step 2; a line at clip 1; 1 value is not finite."


def test_lengths_name_their_edges_and_their_counts() -> None:
    bars = [(64 * (i + 1), 100 - 9 * i) for i in range(11)]
    svg = length_chart(bars, label="Rows")
    assert "≤704" not in svg
    assert "≤640" in svg
    assert "19 rows of 577 to 640 tokens" in svg
    assert 'aria-label="Rows: 100 up to 64 tokens' in svg
    ElementTree.fromstring(svg)


def test_a_guide_out_of_reach_does_not_flatten_the_curve() -> None:
    low = Series("a", [(1.0, 0.1), (2.0, 0.2)])
    assert "clip 100" not in line_chart(plot(low, guides=[Guide(100.0, "clip 100")])).partition(">")[2]
    assert "clip 0.3" in line_chart(plot(low, guides=[Guide(0.3, "clip 0.3")])).partition(">")[2]


def test_thinning_keeps_peaks_and_gaps() -> None:
    points = [(float(x), 1000.0 if x == 777 else NAN if x == 888 else 1.0) for x in range(10_000)]
    kept = thinned(points)
    assert len(kept) <= 620
    assert (777.0, 1000.0) in kept
    assert sum(y != y for _, y in kept) == 1


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (2.2, 5.8), (0.0, 0.0), (-3.0, -3.0), (1e-9, 2e-9), (1e12, 5e12)])
def test_ticks_are_few_and_enclose(low: float, high: float) -> None:
    ticks = nice_ticks(low, high)
    assert ticks[0] <= low
    assert high <= ticks[-1]
    assert 2 <= len(ticks) <= 8
    assert smoothed([(0.0, low)]) == [(0.0, low)]
