"""Every relative link of every Markdown page leads to a file, a folder or a heading that exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(page for pattern in ("*.md", "docs/**/*.md", "benchmarks/**/*.md", "examples/**/*.md") for page in ROOT.glob(pattern))
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


def leads_somewhere(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    return target.exists() and (not anchor or target.suffix != ".md" or anchor in headings(target))


def test_relative_links_lead_somewhere():
    links = [(page, link) for page in PAGES for link in LINK.findall(prose(page.read_text(encoding="utf-8")))]
    links = [(page, link) for page, link in links if not link.startswith(("http:", "https:", "mailto:"))]
    assert len(links) > 100
    assert [f"{page.relative_to(ROOT)}: {link}" for page, link in links if not leads_somewhere(page, link)] == []
