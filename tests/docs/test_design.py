"""docs/design: each page is short and listed, every room is on the map, and every path that a page for contributors names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DESIGN = ROOT / "docs/design"
FOR_CONTRIBUTORS = [ROOT / "CONTRIBUTING.md", ROOT / "docs/platforms.md", *sorted((ROOT / "docs/contributing").glob("*.md"))]


def text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", FOR_CONTRIBUTORS, ids=lambda page: page.stem)
def test_every_path_that_a_page_names_exists(page: Path):
    named = re.findall(r"`((?:src|tests|docs|benchmarks|examples)/[^`\s*]*)`", text(page))
    paths = [path for path in named if not re.search(r"NAME|NNN|\.\.\.", path)]
    assert paths
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_every_room_is_on_the_map():
    rooms = {path.parent.name for path in (ROOT / "src/isotype").glob("*/__init__.py")}
    missing = {room for room in rooms if f"`{room}/`" not in text(DESIGN / "README.md")}
    assert not missing, f"add a row for {sorted(missing)}"


def test_pages_are_few_short_and_listed():
    pages = sorted(DESIGN.glob("*.md"))
    assert len(pages) <= 15
    assert not [page.name for page in pages if len(text(page).splitlines()) > 120]
    assert not [page.name for page in pages if page.name != "README.md" and f"]({page.name})" not in text(DESIGN / "README.md")]
    assert len(text(ROOT / "docs/measured.md").splitlines()) <= 150


def test_a_step_is_read_in_ten_files():
    section = text(DESIGN / "README.md").partition("## From the row")[2].partition("\n## ")[0]
    files = re.findall(r"^\| \d+ \| `([^`]+)`", section, flags=re.MULTILINE)
    assert 5 <= len(files) <= 10
    assert not [file for file in files if not (ROOT / "src/isotype" / file).exists()]
