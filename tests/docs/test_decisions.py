"""docs/decisions: every page has a status and a date, and the index lists every page."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scripts import script

FOLDER = Path(__file__).parents[2] / "docs/decisions"


def written_index():
    return script(FOLDER / "write_index.py").index


def test_index_lists_every_page():
    assert (FOLDER / "README.md").read_text(encoding="utf-8") == written_index()(), "run: python docs/decisions/write_index.py"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("# 0001 A title\n\n**Context.**\n", "Status: accepted"),
        ("# 0002 A title\n\nStatus: accepted. Date: 2026-11-21.\n", "begins with '# 0001"),
        ("# 0001 A title\n\nStatus: superseded by 0009. Date: 2026-11-21.\n", "no decision 0009"),
    ],
)
def test_a_page_without_status_or_with_a_wrong_number_is_named(tmp_path, text, told):
    (tmp_path / "0001-a-title.md").write_text(text)
    with pytest.raises(ValueError, match=r"0001-a-title\.md") as raised:
        written_index()(tmp_path)
    assert told in str(raised.value)


def test_a_number_used_twice_is_named(tmp_path):
    for name in ("0001-one.md", "0001-two.md"):
        (tmp_path / name).write_text("# 0001 One\n\nStatus: accepted. Date: 2026-11-21.\n")
    with pytest.raises(ValueError, match=r"0001-two\.md: 0001-one\.md"):
        written_index()(tmp_path)


def test_a_superseded_page_links_to_its_successor(tmp_path):
    (tmp_path / "0001-one.md").write_text("# 0001 One\n\nStatus: superseded by 0002. Date: 2026-11-21.\n")
    (tmp_path / "0002-two.md").write_text("# 0002 Two\n\nStatus: accepted. Date: 2026-11-22.\n")
    assert "| [0001](0001-one.md) | One | 2026-11-21 | superseded by [0002](0002-two.md) |" in written_index()(tmp_path)
