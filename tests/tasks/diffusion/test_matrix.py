"""A slice of benchmarks/diffusion_matrix.py: a cell a preset; the whole table is in benchmarks/results."""

from __future__ import annotations

from benchmarks.diffusion_matrix import CLASSES, REFUSED, RESULT, TRAINS

from isotype.precision import PRESETS


def test_the_committed_table_has_every_cell_and_no_failure():
    rows = [line for line in RESULT.read_text().splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + 2 * len(CLASSES)
    cells = [cell.strip() for row in rows[1:] for cell in row.strip("| ").split("|")[2:]]
    assert len(cells) == 2 * len(CLASSES) * len(PRESETS)
    assert {cell.split()[0] for cell in cells} == {TRAINS, REFUSED}
    assert all(len(cell.split()) == 2 for cell in cells if cell.startswith(REFUSED))
