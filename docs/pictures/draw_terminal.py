"""Draws a command's output as a picture: `python docs/pictures/draw_terminal.py OUT.png FOLDER
isotype doctor check .` runs the command in FOLDER, and `OUT.png FILE.log isotype train run.yaml`
draws the text of a file as the output of that command.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from textwrap import wrap

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

COLOURS = {"error": "#ff7b72", "warning": "#e3b341", "note": "#79c0ff", "fix": "#7ee787"}


def draw(out: str, shown: str, text: str) -> None:
    lines = [f"$ {shown}"]
    for line in text.rstrip().splitlines():
        name = re.match(r"  \S.*?\s{2,}", line)  # a row: its second line begins below its value
        indent = " " * (len(name[0]) if name else 13)
        lines += wrap(
            line, 120, subsequent_indent=indent, drop_whitespace=False, replace_whitespace=False
        ) or [""]
    width, height = max(map(len, lines)) * 0.073 + 0.3, len(lines) * 0.17 + 0.25
    figure = plt.figure(figsize=(width, height), dpi=110, facecolor="#0d1117")
    for number, line in enumerate(lines):
        first = (line.split() or [""])[0]
        colour = COLOURS.get(first, "#8b949e" if number == 0 else "#e6edf3")
        figure.text(
            0.15 / width,
            1 - (0.25 + number * 0.17) / height,
            line,
            color=colour,
            family="monospace",
            size=8.6,
            parse_math=False,
        )
    figure.savefig(out, facecolor=figure.get_facecolor())


if __name__ == "__main__":
    out, source, *command = sys.argv[1:]
    if Path(source).is_file():
        text = Path(source).read_text(encoding="utf-8")
    else:
        text = subprocess.run(
            [sys.executable, "-m", *command],
            cwd=source,
            capture_output=True,
            text=True,
            check=False,
        ).stdout
    draw(out, " ".join(command), text)
