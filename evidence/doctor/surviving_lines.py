"""Counts how many lines of the doctor, as it was at a commit, are still there: python evidence/doctor/surviving_lines.py [COMMIT].

A line survives where `git blame -w -M -C -C` leads to that commit or one before it: moved within the repository or indented otherwise
counts as the same line.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter

OPENED = "0b193eb"  # the last commit before issue 19 that changed the doctor
FOLDER = "src/isotype/doctor"


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout


def kind(file: str) -> str:
    """`lint, Python` or `check, sheets`."""
    room = file.removeprefix(f"{FOLDER}/").partition("/")
    return f"{room[0] if room[1] else 'shared'}, {'Python' if file.endswith('.py') else 'sheets'}"


def main(commit: str) -> None:
    before = set(git("rev-list", commit).split())
    then, kept, new = Counter[str](), Counter[str](), Counter[str]()
    for file in git("ls-tree", "-r", "--name-only", commit, FOLDER).split():
        if file.endswith((".py", ".txt", ".tsv")):
            then[kind(file)] += git("show", f"{commit}:{file}").count("\n")
    for file in git("ls-tree", "-r", "--name-only", "HEAD", FOLDER).split():
        if file.endswith((".py", ".txt", ".tsv")):
            for line in git("blame", "-w", "-M", "-C", "-C", "--line-porcelain", "HEAD", "--", file).splitlines():
                if found := re.match(r"([0-9a-f]{40}) \d+ \d+", line):
                    (kept if found[1] in before else new)[kind(file)] += 1
    for room in sorted({*then, *kept, *new}):
        print(f"{room:20} {then[room]:6} then {kept[room]:6} of them still there {new[room]:6} new")
    print(f"{'all':20} {then.total():6} then {kept.total():6} of them still there {new.total():6} new")


if __name__ == "__main__":
    main(*(sys.argv[1:] or [OPENED]))
