"""`isotype check`: what a training configuration will really do, and its contradictions. Imports no torch."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ..finding import exit_code, worst_first
from .app import DOCTOR
from .shared_options import refuse_two_forms, threshold


def register(app: typer.Typer) -> None:
    app.command(
        name="check",
        rich_help_panel=DOCTOR,
        help="Contradictions in training configurations, before the run.\n\n"
        "    isotype check configs/\n\n"
        "    isotype check train.yaml ds_config.json --device t4\n\n"
        "    isotype check . --sarif > isotype.sarif",
    )(check)


def check(
    paths: Annotated[
        list[str],
        typer.Argument(help="Folders or files: SimpleTuner, Hugging Face, accelerate, DeepSpeed, axolotl, ...", show_default=False),
    ],
    device: Annotated[str | None, typer.Option(help="What it will run on: h100, a100, t4, v100, mi300x, cpu, sm_80, ...")] = None,
    env: Annotated[
        bool, typer.Option("--env", help="Include the variables of this shell that start with ACCELERATE_, FSDP_ or DEEPSPEED_.")
    ] = False,
    installed: Annotated[bool, typer.Option("--installed", help="Include the versions installed beside this Python.")] = False,
    fail_on: Annotated[str, typer.Option(help="Exit 1 at this severity: error, warning or note.")] = "error",
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    sarif: Annotated[bool, typer.Option("--sarif", help="Print SARIF 2.1.0.")] = False,
) -> None:
    from ..doctor.check.check import as_json, table, trouble_without_files
    from ..doctor.check.check import check as check_paths
    from ..doctor.output import answer

    least = threshold(fail_on)
    refuse_two_forms(json_output, sarif)
    checked = check_paths(paths, device=device, environment=env, installed=installed)
    findings = list(checked.findings)
    if nothing := trouble_without_files(checked, paths):
        findings.append(nothing)
    if sarif:
        from ..doctor.sarif import as_sarif

        print(json.dumps(as_sarif(worst_first(findings)), indent=1))
        raise typer.Exit(exit_code(findings, least))
    if not json_output:
        for record in checked.records:
            if shown := table(record):
                print(shown + "\n")
    subject = f"{checked.files} file{'s' * (checked.files != 1)}, {len(checked.records)} run{'s' * (len(checked.records) != 1)}"
    raise typer.Exit(
        answer(findings, subject=subject, json_output=json_output, fail_on=least, records=[as_json(record) for record in checked.records])
    )
