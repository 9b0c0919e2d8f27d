"""The outputs shown in docs/doctor are what the commands print for docs/doctor/examples."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

from tests.warm import interpreter

DOCS = Path(__file__).parents[2] / "docs" / "doctor"
SHOWN = [
    (page, command, output)
    for page in ("check.md", "explain.md")
    for command, output in re.findall(
        r"```\n\$ isotype doctor ([^\n]+)\n(.*?)\n```",
        (DOCS / page).read_text(encoding="utf-8"),
        re.DOTALL,
    )
]


@cache
def printed(command: str) -> str:
    done = subprocess.run(
        [interpreter(), "-m", "isotype", "doctor", *command.split()],
        cwd=DOCS / "examples",
        capture_output=True,
        text=True,
        timeout=900,
    )
    return "\n".join(line.rstrip() for line in done.stdout.strip().splitlines())


def test_output_is_todays(subtests):
    for page, command, output in SHOWN:
        with subtests.test(f"{page}: {command}"):
            assert printed(command) == output


FRONT = (DOCS / "README.md").read_text(encoding="utf-8")
NAMED = [
    (page, command)
    for page in ("README.md", "trace.md", "conform.md")
    for command in re.findall(
        r"`isotype doctor ((?:conform|kernels|trace) \w+\.py:\w+)`",
        (DOCS / page).read_text(encoding="utf-8"),
    )
]


def shown_whole(block: str, text: str) -> None:
    """Every line of a block, up to where it is cut, is in what the commands print."""
    for line in block.splitlines():
        for piece in line.split("..."):
            assert " ".join(piece.split()).strip(" ,;") in text, line


def test_the_front_page_cuts_but_does_not_change():
    text = " ".join("\n".join(printed(command) for _, command, _ in SHOWN).split())
    blocks = [
        b
        for b in re.findall(r"```\n(.*?)\n```", FRONT, re.DOTALL)
        if re.search(r"^error (?:EX|CF)\d", b, re.MULTILINE)
    ]
    assert len(blocks) >= 2
    shown_whole("\n".join(blocks), text)


@pytest.mark.parametrize(
    ("page", "command"),
    [pytest.param(*n, marks=[pytest.mark.slow] if "qlora" in n[1] else []) for n in NAMED],
)
def test_a_page_shows_what_running_prints(page: str, command: str):
    pytest.importorskip(
        "peft" if "qlora" in command else "triton" if command.startswith("kernels") else "torch"
    )
    text = (DOCS / page).read_text(encoding="utf-8").partition(f"`isotype doctor {command}`")[2]
    block = text.partition("```\n")[2].partition("\n```")[0]
    shown_whole(block, " ".join(printed(command).replace(f"{DOCS / 'examples'}/", "").split()))


def test_the_front_page_shows_the_summary_of_everything():
    block = (
        FRONT.partition("## All reading commands at once")[2]
        .partition("```\n")[2]
        .partition("\n```")[0]
    )
    assert block
    assert printed(".").endswith(block)


def test_run_page_shows_todays_output():
    page = (DOCS / "run.md").read_text(encoding="utf-8")
    shown = re.search(r"```\n(isotype doctor run\n.*?)\n```", page, re.DOTALL)
    assert shown is not None
    done = subprocess.run(
        [interpreter(), "-m", "isotype", "doctor", "run", "qlora.py"],
        cwd=DOCS / "examples",
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 1
    assert shown[1] in done.stderr
