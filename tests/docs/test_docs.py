"""The site, the pages of the design, links, and pages that scripts write."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import isotype
import isotype.ops
import isotype.testing
from tests.scripts import script

ROOT = Path(__file__).parents[2]
API = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs/api").glob("*.md"))


def module_of(name: str):
    return script(ROOT / f"docs/{name}.py")


@pytest.fixture(scope="module")
def builder():
    return module_of("build")


@pytest.mark.full
def test_site_has_no_warnings(tmp_path):
    """Reads and resolves every page, and imports what the reference names; writes no HTML, which
    takes four times as long.
    """
    pytest.importorskip("sphinx")
    command = [
        sys.executable,
        str(ROOT / "docs/build.py"),
        str(tmp_path / "site"),
        "--builder",
        "dummy",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_reference_names_every_public_name():
    named = set(
        re.findall(r"^\.\. auto\w+:: isotype\.(?:[\w.]+\.)?(\w+)$", API, flags=re.MULTILINE)
    )
    public = {*isotype.__all__, *isotype.ops.__all__, *isotype.testing.__all__} - {"__version__"}
    assert public - named == set(), "add what is missing to a page of docs/api"


# --- docs/design: each page is short and listed, every room is on the map, and every path that a
# page for contributors names exists.


DESIGN = ROOT / "docs/design"
FOR_CONTRIBUTORS = [
    ROOT / "CONTRIBUTING.md",
    ROOT / "docs/platforms.md",
    *sorted((ROOT / "docs/contributing").glob("*.md")),
]


def text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def test_every_path_that_a_page_names_exists():
    named = [(page.name, path) for page in FOR_CONTRIBUTORS
             for path in re.findall(r"`((?:src|tests|docs|benchmarks|examples)/[^`\s*]*)`", text(page))]  # fmt: skip
    paths = [(page, path) for page, path in named if not re.search(r"NAME|NNN|\.\.\.", path)]
    assert len(paths) > 20
    assert [(page, path) for page, path in paths if not (ROOT / path).exists()] == []


def test_every_room_is_on_the_map():
    rooms = {path.parent.name for path in (ROOT / "src/isotype").glob("*/__init__.py")}
    missing = {room for room in rooms if f"`{room}/`" not in text(DESIGN / "README.md")}
    assert not missing, f"add a row for {sorted(missing)}"


def test_pages_are_few_short_and_listed():
    pages = sorted(DESIGN.glob("*.md"))
    assert len(pages) <= 15
    assert not [page.name for page in pages if len(text(page).splitlines()) > 120]
    assert not [
        page.name
        for page in pages
        if page.name != "README.md" and f"]({page.name})" not in text(DESIGN / "README.md")
    ]
    assert len(text(ROOT / "docs/measured.md").splitlines()) <= 150


def test_a_step_is_read_in_ten_files():
    section = text(DESIGN / "README.md").partition("## From the row")[2].partition("\n## ")[0]
    files = re.findall(r"^\| \d+ \| `([^`]+)`", section, flags=re.MULTILINE)
    assert 5 <= len(files) <= 10
    assert not [file for file in files if not (ROOT / "src/isotype" / file).exists()]


# --- Every relative link of every Markdown page leads to a file, a folder or a heading that exists.


PAGES = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/**/*.md", "examples/**/*.md")
    for page in ROOT.glob(pattern)
)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def prose(text: str) -> str:
    """The page without its code blocks and code spans, in which brackets are no links."""
    return re.sub(
        r"`[^`\n]*`(?!\])", "", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    )


def headings(page: Path) -> set[str]:
    """The anchors that GitHub and the site give a page's headings."""
    lines = re.findall(
        r"^#+ (.+)$",
        re.sub(
            r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
        ),
        re.MULTILINE,
    )
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


def leads_somewhere(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    return target.exists() and (not anchor or target.suffix != ".md" or anchor in headings(target))


def test_relative_links_lead_somewhere():
    links = [
        (page, link)
        for page in PAGES
        for link in LINK.findall(prose(page.read_text(encoding="utf-8")))
    ]
    links = [
        (page, link) for page, link in links if not link.startswith(("http:", "https:", "mailto:"))
    ]
    assert len(links) > 100
    assert [
        f"{page.relative_to(ROOT)}: {link}"
        for page, link in links
        if not leads_somewhere(page, link)
    ] == []


# --- docs/families.md is what its script writes.


@pytest.mark.parametrize(
    "whole", [False, pytest.param(True, marks=pytest.mark.full)], ids=["a row", "whole"]
)
def test_the_page_of_families_is_what_its_script_writes(whole):
    families, page = module_of("families"), (ROOT / "docs/families.md").read_text(encoding="utf-8")
    assert families.table(("gpt_oss",))[-1] in page.splitlines()
    assert not whole or families.page() == page
