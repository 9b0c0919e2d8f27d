"""docs/architecture.md and docs/contributing: every path that they name exists, and every room of the package is on the map."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "docs/architecture.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "docs/platforms.md",
    *sorted((ROOT / "docs/contributing").glob("*.md")),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_path_that_a_page_names_exists(page: Path):
    named = re.findall(r"`((?:src|tests|docs|evidence|benchmarks|examples)/[^`\s*]*)`", page.read_text(encoding="utf-8"))
    told = [path for path in named if not re.search(r"NAME|NNN|\.\.\.", path)]
    assert told
    assert not [path for path in told if not (ROOT / path).exists()]


def test_every_room_is_on_the_map():
    rooms = {path.parent.name for path in (ROOT / "src/isotype").glob("*/__init__.py")}
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    missing = {room for room in rooms if f"src/isotype/{room}/" not in page}
    assert not missing, f"add a row for {sorted(missing)}"
