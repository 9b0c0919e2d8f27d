"""The outputs shown in docs/doctor are what the commands print for docs/doctor/examples (of the commands that need no torch)."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs" / "doctor"
SHOWN = [
    (page, command, output)
    for page in ("check.md", "explain.md")
    for command, output in re.findall(r"```\n\$ isotype ([^\n]+)\n(.*?)\n```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)
]


@cache
def printed(command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "isotype", *command.split()], cwd=DOCS / "examples", capture_output=True, text=True, check=False, timeout=60
    )
    return "\n".join(line.rstrip() for line in done.stdout.strip().splitlines())


@pytest.mark.parametrize(("page", "command", "output"), SHOWN, ids=[f"{page}: {command}" for page, command, _ in SHOWN])
def test_output_is_todays(page: str, command: str, output: str):
    assert printed(command) == output


def test_the_front_page_cuts_but_does_not_change():
    """Every line of the front page's blocks of `check` and `explain`, up to where it is cut, is in what the commands print."""
    text = " ".join("\n".join(printed(command) for _, command, _ in SHOWN).split())
    front = (DOCS / "README.md").read_text(encoding="utf-8")
    blocks = [b for b in re.findall(r"```\n(.*?)\n```", front, re.DOTALL) if re.search(r"^error (?:EX|CF)\d", b, re.MULTILINE)]
    assert len(blocks) >= 2
    for line in "\n".join(blocks).splitlines():
        assert " ".join(line.partition(" ...")[0].split()) in text, line


def test_something_is_shown():
    assert len(SHOWN) >= 7
