"""Builds the site: `python docs/build.py build/site`. Needs the extra `docs`; a warning fails (exit
1).

The pages are copied as they lie in the repository (docs, benchmarks and the files beside
README.md), so that links between them stay valid. Two things are done to the copy: links to files
that are no pages become the file's path as text, and the doctor's codes get pages with the text that
`isotype doctor explain CODE` prints.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    "docs/**/*.md",
    "benchmarks/**/*.md",
    "examples/*.md",
    "AGENTS.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
)
LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"(^```.*?^```)", flags=re.DOTALL | re.MULTILINE)
HOME = '<!doctype html><meta charset="utf-8"><title>Isotype</title><meta http-equiv="refresh" content="0; url=docs/index.html">'


def pages() -> list[Path]:
    """Every page of the site, in the repository."""
    return sorted({page for pattern in PAGES for page in ROOT.glob(pattern)})


def within_site(text: str, page: Path) -> str:
    """The page's text with each relative link leading to a page of the site, or written as the path
    of a file in the repository.
    """
    known = {other.resolve() for other in pages()}

    def resolved(match: re.Match[str]) -> str:
        label, link = match[1], match[2]
        path, _, anchor = link.partition("#")
        if "://" in link or not path or link.startswith("mailto:"):
            return match[0]
        target = (page.parent / path).resolve()
        # what does not exist is left for Sphinx to report
        if target in known or target.suffix == ".png" or not target.exists():
            return match[0]
        if target / "README.md" in known:
            return f"[{label}]({path.rstrip('/')}/README.md{'#' + anchor if anchor else ''})"
        inside = f"`{target.relative_to(ROOT)}`"
        return inside if label.strip("`") in inside else f"{label} ({inside})"

    return "".join(
        part if part.startswith("```") else LINK.sub(resolved, part) for part in FENCE.split(text)
    )


def copy(folder: Path) -> None:
    """The sources that Sphinx reads, below `folder`."""
    for page in pages():
        copied = folder / page.relative_to(ROOT)
        copied.parent.mkdir(parents=True, exist_ok=True)
        copied.write_text(within_site(page.read_text(encoding="utf-8"), page), encoding="utf-8")
    for picture in ROOT.glob("docs/pictures/*.png"):
        copied = folder / picture.relative_to(ROOT)
        copied.parent.mkdir(parents=True, exist_ok=True)
        copied.write_bytes(picture.read_bytes())
    for index in ("docs/design/README.md", "benchmarks/README.md"):
        list_siblings(folder / index)
    write_codes(folder / "docs/codes")


def list_siblings(index: Path) -> None:
    """Adds the pages beside and below an index to a hidden table of contents; Sphinx does not count
    its links as one.
    """
    others = sorted(
        page.relative_to(index.parent).with_suffix("")
        for page in index.parent.glob("**/*.md")
        if page != index
    )
    with index.open("a", encoding="utf-8") as file:
        file.write(
            "\n```{toctree}\n:hidden:\n\n"
            + "\n".join(other.as_posix() for other in others)
            + "\n```\n"
        )


# the codes whose pages contain error messages, which people search for
MESSAGE_FAMILY = "EX"


def write_codes(folder: Path) -> None:
    """A page for each code of `explain`, which contains the forms of its error messages, and a page
    for each other family of codes (two letters), with a section for each code. One page for every
    code makes a build three times as long.
    """
    from isotype.pages import codes, page

    folder.mkdir(parents=True)
    families: dict[str, list[str]] = {}
    names: list[str] = []
    for code in codes():
        text = page(code)
        assert text, code
        if code.startswith(MESSAGE_FAMILY):
            (folder / f"{code}.md").write_text(f"{text.strip()}\n", encoding="utf-8")
            names.append(code)
        else:
            families.setdefault(code[:2], []).append(one_level_down(text.strip()))
    for family, sections in families.items():
        (folder / f"{family}.md").write_text(
            f"# {family}\n\n" + "\n\n".join(sections) + "\n", encoding="utf-8"
        )
    listed = "\n".join(sorted([*names, *families]))
    (folder / "index.md").write_text(
        f"# Codes\n\nWhat `isotype doctor explain CODE` prints.\n\n```{{toctree}}\n:maxdepth: 2\n\n{listed}\n```\n",
        encoding="utf-8",
    )


def one_level_down(text: str) -> str:
    """The page with a # more before each heading, and code blocks as they are."""
    return "".join(
        part if part.startswith("```") else re.sub(r"^#", "##", part, flags=re.MULTILINE)
        for part in FENCE.split(text)
    )


def build(out: Path, builder: str = "html") -> int:
    """Sphinx's exit status: 0, or 1 where it had a warning. The builder `dummy` reads and resolves
    everything and writes no page.
    """
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder)
        copy(source)
        path = os.pathsep.join(
            [str(ROOT / "src"), str(ROOT / "docs"), os.environ.get("PYTHONPATH", "")]
        )
        options = [
            "-q",
            "-W",
            "--keep-going",
            "-b",
            builder,
            "-c",
            str(ROOT / "docs"),
            "-d",
            str(source / ".doctrees"),
        ]
        command = [sys.executable, "-m", "sphinx", *options, folder, str(out)]
        status = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": path}, check=False
        ).returncode
    if status == 0 and builder == "html":
        (out / "index.html").write_text(HOME, encoding="utf-8")
    return status


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder of the site")
    parser.add_argument("--builder", default="html", help="Sphinx's builder; dummy only checks")
    asked = parser.parse_args()
    sys.exit(build(asked.out.resolve(), asked.builder))
