"""Records what a full quickstart answers, for machines on which the quickstart ends early.

python -m benchmarks.quickstart_answers FOLDER   runs `isotype quickstart --folder FOLDER` without
                                                 its time limits, and writes full_run.json into
                                                 isotype.quickstart. Stages that are done in FOLDER
                                                 are not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
from dataclasses import replace
from pathlib import Path

from isotype.quickstart.text import FULL_RUN, STAGES, quickstart, summarise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    stages = [replace(stage, seconds=math.inf) for stage in STAGES]
    if quickstart(folder, stages=stages):
        raise SystemExit("interrupted: the same command goes on")
    summary = summarise(folder)
    record = {
        "command": "python -m benchmarks.quickstart_answers",
        "python": platform.python_version(),
        "steps": sum(stage.steps for stage in STAGES),
        "loss": summary["loss"]["tune"][-1][1],
        "answers": {sample["prompt"]: sample["after"] for sample in summary["samples"]},
    }
    FULL_RUN.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
