"""Every relative link of every Markdown page leads to a file, a folder or a heading that exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("benchmarks/**/*.md"),
        *ROOT.glob("examples/**/*.md"),
    ]
)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def prose(text: str) -> str:
    """The page without its code blocks and code spans, in which brackets are no links."""
    return re.sub(r"`[^`\n]*`(?!\])", "", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))


def headings(page: Path) -> set[str]:
    """The anchors that GitHub and the site give a page's headings."""
    lines = re.findall(
        r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_relative_links_lead_somewhere(page: Path):
    for link in LINK.findall(prose(page.read_text(encoding="utf-8"))):
        if link.startswith(("http:", "https:", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.relative_to(ROOT)}: {link}"
        if anchor and target.suffix == ".md":
            assert anchor in headings(target), f"{page.relative_to(ROOT)}: {link}"
