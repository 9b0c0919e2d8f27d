"""`isotype diff RUN1 RUN2`: which settings and results differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from .app import RUNS


def register(app: typer.Typer) -> None:
    app.command(name="diff", rich_help_panel=RUNS)(diff)


def diff(
    first: Annotated[Path, typer.Argument(help="A run's folder.")],
    second: Annotated[Path, typer.Argument(help="Another run's folder.")],
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Compare two runs key by key: their settings, the precision that each declared and what was observed of it, and their losses.

    A dtype is of the tensors observed in that role; how many there were depends on steps and lengths, and is not compared.

    Examples:

        isotype diff runs/one runs/two
    """
    from ..config.compare import compare
    from ..config.load import load
    from ..config.yaml_text import write_value
    from ..report.record import read_run
    from ..report.verdicts import precision_differences
    from ..runs.folder import require_run

    one, two = (load(require_run(run) / "resolved.yaml", resolved=True).config for run in (first, second))
    changes = [c for c in compare(one, two) if c.key != "run.folder"]
    records = [read_run(run) for run in (first, second)]
    results = [
        {
            "loss": r.last("loss"),
            "eval_loss": r.best_evaluation,
            "steps": int(r.curve("loss")[-1][0]) if r.curve("loss") else 0,
            "trained_seconds": r.result.get("trained_seconds"),
        }
        for r in records
    ]
    missing = [str(run) for run, record in zip((first, second), records) if not record.precision.get("declared")]
    precision = {} if missing else precision_differences(records[0].precision, records[1].precision)
    if json_output:
        settings = {c.key: [c.old, c.new] for c in changes}
        results_of = {str(first): results[0], str(second): results[1]}
        print(json.dumps({"settings": settings, "precision": precision or None, "results": results_of}))
        return
    rows = [(c.key, write_value(c.old), write_value(c.new)) for c in changes]
    rows += [(f"{of} {role}", _in_words(a), _in_words(b)) for of, roles in precision.items() for role, (a, b) in roles.items()]
    width = max(len(key) for key in (*(key for key, *_ in rows), "trained_seconds")) + 2
    rows += [(key, _shown(results[0][key]), _shown(results[1][key])) for key in results[0]]
    column = max(len(text) for text in (str(first), str(second), *(value for _, *values in rows for value in values)))
    print(f"{'':{width}}{first!s:>{column}}  {second!s:>{column}}")
    for key, one_value, two_value in rows:
        print(f"{key:{width}}{one_value:>{column}}  {two_value:>{column}}".rstrip())
    if not changes:
        print("every setting is the same")
    if missing:
        print(f"no precision was recorded in {' and '.join(dict.fromkeys(missing))}: it is not compared")
    elif not any(precision.values()):
        print("declared and observed dtypes are the same")


def _in_words(value: str | list[str] | None) -> str:
    return " ".join(value) if isinstance(value, list) else value or "not observed"


def _shown(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, float) else "" if value is None else str(value)
