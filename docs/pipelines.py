"""The table of pipelines in docs/diffusion.md: `python docs/pipelines.py --write` trains a tiny
pipeline of every family and writes what its run showed (three minutes). A test trains them too, and
compares.
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from isotype.tasks.diffusion.families import REFUSED

PAGE = Path(__file__).with_name("diffusion.md")
LOADED_BY_COMFYUI = PAGE.parents[1] / "benchmarks/results/comfyui_loader.md"
BEGIN, END = "<!-- pipelines -->\n", "<!-- end of pipelines -->\n"
HEAD = (
    "| `_class_name` in model_index.json | objective | loader of the LoRA | read by ComfyUI 0.33.0 | resumed run |",
    "|---|---|---|---|---|",
)
LEARNS = {"flow_matching": "flow matching", "epsilon": "noise, or v", "v": "noise, or v"}


def count_tensors_in_comfyui() -> dict[str, int]:
    """For each pipeline, the number of tensors that ComfyUI loaded in the benchmark
    `comfyui_loader.py`.
    """
    lines = LOADED_BY_COMFYUI.read_text(encoding="utf-8").splitlines()
    rows = [line.split("|") for line in lines if line.startswith("| `")]
    return {row[1].strip(" `"): int(row[3]) for row in rows}


def row(name: str, outcome: Any) -> str:
    """outcome  `tests.tasks.diffusion.every_family.Outcome`"""
    pipeline = name.partition(",")[0]
    learns = LEARNS[outcome.objective] + outcome.source
    resumed = "bit-identical" if outcome.resumed else "no"
    comfyui = outcome.comfyui
    if comfyui == "yes":
        comfyui = f"all {count_tensors_in_comfyui()[pipeline]} tensors"
    return f"| `{pipeline}` | {learns} | `{outcome.loader}` | {comfyui} | {resumed} |"


def train_all() -> list[str]:
    sys.path.insert(0, str(PAGE.parents[1]))
    from tests.tasks.diffusion.conftest import Studio
    from tests.tasks.diffusion.every_family import CASES, train_pipeline

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        studio = Studio(Path(folder))
        for name in CASES:
            place = Path(folder, "runs", name)
            place.mkdir(parents=True)
            with redirect_stdout(io.StringIO()):
                outcome = train_pipeline(name, studio, place)
            rows.append(row(name, outcome))
    return rows


def rows_of_page() -> list[str]:
    """The rows that the page has now."""
    text = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    return [line for line in text.splitlines() if line.startswith("| `") and line not in HEAD]


def refused() -> list[str]:
    by_reason: dict[str, list[str]] = {}
    for name, reason in REFUSED.items():
        by_reason.setdefault(reason, []).append(f"`{name}`")
    return [f"* {', '.join(names)}: {reason}" for reason, names in by_reason.items()]


def page(rows: list[str]) -> str:
    """The page with a table of these rows."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    table = "\n".join([*HEAD, *rows, "", "Refused by name:", "", *refused()]) + "\n"
    return before + BEGIN + table + END + rest.partition(END)[2]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    text = page(train_all())
    if arguments.write:
        PAGE.write_text(text, encoding="utf-8")
    else:
        print(text.partition(BEGIN)[2].partition(END)[0])


if __name__ == "__main__":
    main()
