"""The chart of a terminal."""

from __future__ import annotations

import math

from isotype.report.chart import terminal_chart


def test_it_falls_where_the_values_fall() -> None:
    lines = terminal_chart([(float(i), 2 + 5 * math.exp(-i / 80)) for i in range(1, 500)]).splitlines()
    assert len(lines) == 7
    widths = [len(line.rstrip()) for line in lines[:-1]]
    assert widths == sorted(widths)
    assert lines[-2].split()[0] == "2.01"
    assert lines[-1].split() == ["1", "499"]


def test_a_terminal_without_blocks_gets_ascii() -> None:
    assert terminal_chart([(1.0, 3.0), (2.0, 1.0)], encoding="ascii").isascii()
    assert terminal_chart([(1.0, 3.0), (2.0, 1.0)], encoding=None).isascii()
    assert not terminal_chart([(1.0, 3.0), (2.0, 1.0)], encoding="utf-8").isascii()
