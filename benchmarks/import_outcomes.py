"""`isotype import` on folders of configurations, a line for each file: `python
benchmarks/import_outcomes.py NAME=FOLDER ...`

Writes tab-separated lines to standard output (project, file, outcome, tool, keys by what became of
them, keys not known, contradictions in the result) and the sums to standard error. A result with a
contradiction is a fault of `isotype import`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

from isotype.config.load import load
from isotype.environment.hardware import lookup_hardware
from isotype.errors import UsageError
from isotype.precision import resolve
from isotype.translate import Fate, translate

TASK_ROLES = {
    "vae": "fp32",
    "text_encoder": "compute",
    "timesteps": "fp32",
    "latents": "fp32",
    "ema": "fp32",
}
SUFFIXES = (".yaml", ".yml", ".json", ".toml", ".py", ".ipynb", ".sh")


def contradictions(file: Path) -> list[str]:
    """Of the precision settings of a configuration of Isotype, on a GPU that has bf16: codes of
    warnings, and errors as they are told.
    """
    config = load(file).config
    roles = {
        role: value for role, value in config.precision.model_dump().items() if value is not None
    }
    try:
        resolved = resolve(
            roles,
            device=lookup_hardware("h100"),
            adapter=config.adapter.kind,
            optimizer=config.train.optimizer,
            task_roles=TASK_ROLES,
        )
    except UsageError as error:
        return [str(error)]
    return [finding.code for finding in resolved.warnings]


def outcome(file: Path) -> tuple[str, ...]:
    """outcome, tool, five counts, unknown keys, contradictions in the result."""
    try:
        result = translate(file)
    except UsageError as error:
        reason = " ".join(str(error).replace(f"{file}:", "").split("fix  ")[0].split())
        return (f"refused: {reason}", "", *[""] * len(Fate), "", "")
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder, "run.yaml")
        written.write_text(result.text, encoding="utf-8")
        wrong = contradictions(written)
    unknown = [
        entry.source_key.name for entry in result.outcomes if "does not know this key" in entry.note
    ]
    return (
        "translated",
        result.tool,
        *[str(result.counts[fate]) for fate in Fate],
        " ".join(unknown),
        " ".join(wrong),
    )


def main(projects: list[str]) -> None:
    print(
        "project",
        "file",
        "outcome",
        "tool",
        *[str(fate) for fate in Fate],
        "unknown",
        "contradictions",
        sep="\t",
    )
    for project in projects:
        name, _, folder = project.partition("=")
        sums: Counter[str] = Counter()
        for file in sorted(
            path for path in Path(folder).rglob("*") if path.suffix in SUFFIXES and path.is_file()
        ):
            row = outcome(file)
            print(name, file.relative_to(folder), *row, sep="\t")
            sums["files"] += 1
            sums[row[0].partition(":")[0]] += 1
            for fate, count in zip(Fate, row[2:7], strict=True):
                sums[str(fate)] += int(count or 0)
            sums["unknown keys"] += len(row[7].split())
            sums["results with a contradiction"] += bool(row[8])
        print(name, dict(sums), file=sys.stderr)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("projects", nargs="+", metavar="NAME=FOLDER")
    main(parser.parse_args().projects)
