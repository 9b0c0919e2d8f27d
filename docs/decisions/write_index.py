"""Writes README.md, the index of this folder's pages, from each page's title and status line: `python docs/decisions/write_index.py`."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).resolve().parent
INTRODUCTION = """# Decisions

One page for each choice that lasts: what the situation was, what was decided, what follows, and the figures behind it. A page is never
rewritten into another decision: a later page supersedes it, and its status then names that page.

A page is `NNNN-short-title.md`. Its first line is `# NNNN Title`, its third `Status: accepted. Date: 2026-11-21.` or
`Status: superseded by 0123. Date: 2026-11-21.` (the date of the decision). `python docs/decisions/write_index.py` writes this index anew.

| number | decision | date | status |
|---|---|---|---|
"""
HEAD = re.compile(r"# (\d{4}) (.+)\n\nStatus: (accepted|superseded by (\d{4}))\. Date: (\d{4}-\d\d-\d\d)\.\n")


def index(folder: Path = HERE) -> str:
    """The text of README.md. Raises ValueError naming the page whose first three lines have another form, or a number used twice."""
    rows, seen = [], {}
    pages = {page.name[:4]: page.name for page in folder.glob("[0-9]*.md")}
    for page in sorted(folder.glob("[0-9]*.md")):
        head = HEAD.match(page.read_text(encoding="utf-8"))
        if head is None or head[1] != page.name[:4]:
            raise ValueError(
                f"{page.name}: begins with '# {page.name[:4]} Title', an empty line, and 'Status: accepted. Date: YYYY-MM-DD.'"
            )
        if head[1] in seen:
            raise ValueError(f"{page.name}: {seen[head[1]]} has this number too")
        seen[head[1]] = page.name
        status = head[3]
        if head[4]:
            if head[4] not in pages:
                raise ValueError(f"{page.name}: there is no decision {head[4]} that supersedes it")
            status = f"superseded by [{head[4]}]({pages[head[4]]})"
        rows.append(f"| [{head[1]}]({page.name}) | {head[2]} | {head[5]} | {status} |\n")
    return INTRODUCTION + "".join(rows)


if __name__ == "__main__":
    (HERE / "README.md").write_text(index(), encoding="utf-8")
