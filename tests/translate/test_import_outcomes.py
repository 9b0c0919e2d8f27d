"""import_outcomes.tsv: docs/measured.md states its sums, and no published configuration gave a
contradictory result.
"""

from __future__ import annotations

import csv
import re
from pathlib import Path

TABLE = Path(__file__).with_name("import_outcomes.tsv")
PAGE = Path(__file__).parents[2] / "docs/measured.md"
FATES = ("taken", "renamed", "changed", "no effect", "not offered")


def rows():
    with TABLE.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def test_sums_of_the_page_are_those_of_the_table():
    sums: dict[str, list[int]] = {}
    for row in rows():
        total = sums.setdefault(row["project"], [0] * 5)
        keys = sum(int(row[fate] or 0) for fate in FATES)
        for index, more in enumerate(
            (
                1,
                row["outcome"] == "translated",
                row["outcome"] != "translated",
                keys,
                len(row["unknown"].split()),
            )
        ):
            total[index] += more
    page = PAGE.read_text(encoding="utf-8").partition("\n## Import")[2].partition("\n## ")[0]
    told = [
        [int(number.replace(",", "")) for number in re.findall(r"\| ([\d,]+)(?= \|)", line)]
        for line in page.splitlines()
        if line.startswith("| ")
    ]
    assert [line for line in told if line] == list(sums.values())


def test_no_result_has_a_contradiction():
    assert not [row["file"] for row in rows() if row["contradictions"]]
