"""Curves as data, as SVG, and as characters of a terminal."""

from __future__ import annotations

from itertools import pairwise
from xml.etree import ElementTree

import pytest

from isotype.report.chart import line_chart, terminal_chart
from isotype.report.plots import Plot, Series


def plot(*series: Series, **how) -> Plot:
    return Plot(key="x", title="X", series=series, **how)


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


def test_a_terminal_without_blocks_gets_ascii() -> None:
    assert terminal_chart([(1.0, 3.0), (2.0, 1.0)], encoding="ascii").isascii()
    assert terminal_chart([(1.0, 3.0), (2.0, 1.0)], encoding=None).isascii()
    assert not terminal_chart([(1.0, 3.0), (2.0, 1.0)], encoding="utf-8").isascii()
