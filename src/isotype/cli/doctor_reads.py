"""The doctor's commands that run nothing and import no torch: `check`, `explain`, `env`."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import UsageError

CODE = re.compile(r"^[A-Za-z]{2,3}\d{3}$")
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
FailOn = Annotated[str, typer.Option("--fail-on", help="Exit 1 from this severity on: error, warning or note.")]


def register(doctor: typer.Typer) -> None:
    doctor.command("check", help=_CHECK)(check)
    doctor.command("explain", help=_EXPLAIN)(explain)
    doctor.command("env", help=_ENV)(env)


_CHECK = """What a training configuration will really do, and its contradictions, before the run.

    isotype doctor check configs/

    isotype doctor check train.yaml ds_config.json --device t4
"""


def check(
    paths: Annotated[
        list[str],
        typer.Argument(help="Folders or files: SimpleTuner, Hugging Face, accelerate, DeepSpeed, axolotl, ...", show_default=False),
    ],
    device: Annotated[str | None, typer.Option(help="What it will run on: h100, a100, t4, v100, mi300x, cpu, sm_80, ...")] = None,
    fail_on: FailOn = "error",
    json_output: Json = False,
) -> None:
    from ..doctor.check.check import as_json, table, trouble_without_files
    from ..doctor.check.check import check as check_paths
    from ..doctor.output import answer, threshold

    least = threshold(fail_on)
    checked = check_paths(paths, device=device)
    findings = list(checked.findings)
    if nothing := trouble_without_files(checked, paths):
        findings.append(nothing)
    if not json_output:
        for record in checked.records:
            if shown := table(record):
                print(shown + "\n")
    subject = f"{checked.files} file{'s' * (checked.files != 1)}, {len(checked.records)} run{'s' * (len(checked.records) != 1)}"
    records = [as_json(record) for record in checked.records]
    raise typer.Exit(answer(findings, subject=subject, json_output=json_output, fail_on=least, records=records))


_EXPLAIN = """The cause of an error in a log, or the page of a code.

    isotype doctor explain train.log

    isotype doctor explain < train.log

    isotype doctor explain "expected mat1 and mat2 to have the same dtype, but got: float != c10::BFloat16"

    isotype doctor explain CF001

    isotype doctor explain --list
"""


def explain(
    what: Annotated[
        list[str] | None,
        typer.Argument(help="A code (CF001), a log file, or an error's text; standard input when left out.", show_default=False),
    ] = None,
    list_codes: Annotated[bool, typer.Option("--list", help="List every code with its title.")] = False,
    json_output: Json = False,
) -> None:
    given = list(what or [])
    if list_codes or (not given and sys.stdin.isatty()):
        _list(json_output)
        return
    if len(given) == 1 and CODE.match(given[0]) and not Path(given[0]).exists():
        show_page(given[0].upper(), json_output)
        return
    from ..doctor.explain import explain as explain_lines
    from ..doctor.output import answer

    source: str | None = None
    if not given or given == ["-"]:
        sys.stdin.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal's stream, or a test's that has the method
        findings = explain_lines(sys.stdin)
    elif len(given) == 1 and _is_file(given[0]):
        source = given[0]
        try:
            with open(source, encoding="utf-8", errors="replace") as log:
                findings = explain_lines(log, source=source)
        except OSError as error:
            raise UsageError(f"{source}: {error.strerror}") from error
    else:
        text = " ".join(given)
        if len(given) == 1 and re.fullmatch(r"[\w./~-]+\.(?:log|txt|out|err)", text):
            raise UsageError(f"{text}: no such file")
        findings = explain_lines(text.splitlines())
    raise typer.Exit(answer(findings, subject=source or "explain", json_output=json_output))


def _is_file(text: str) -> bool:
    try:
        if Path(text).is_dir():
            raise UsageError(f"{text} is a folder: give a log file")
        return Path(text).exists()
    except OSError:  # a pasted text is longer than a file name may be
        return False


def show_page(code: str, json_output: bool) -> None:
    from ..pages import codes, page

    text = page(code)
    if text is None:
        if code[:2] == "LT":
            raise UsageError(f"{code}: lint is gone", fix="isotype doctor conform, trace or kernels run the code; LT010 is CF018 now")
        near = [c for c in codes() if c[:2] == code[:2]]
        raise UsageError(
            f"{code} is not a code" + (f"; {code[:2]} codes are {', '.join(near)}" if near else "; isotype doctor explain --list shows all")
        )
    print(json.dumps({"findings": [], "code": code, "page": text}, indent=1) if json_output else text.rstrip())


def _list(json_output: bool) -> None:
    from ..pages import codes, page

    titles = {code: (page(code) or "").partition("\n")[0].removeprefix("# ").removeprefix(code).lstrip(": ") for code in codes()}
    print(
        json.dumps({"findings": [], "codes": titles}, indent=1)
        if json_output
        else "\n".join(f"{code}  {title}" for code, title in titles.items())
    )


_ENV = """Versions and devices; warns of versions with known dtype faults and of versions that do not work together.

    isotype doctor env

    isotype doctor env --requirements runs/qwen > requirements.txt     # the environment of a run, for pip install -r

Exit status 1 when something is broken.
"""


def env(
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object: env.json of a run, and the findings.")] = False,
    requirements: Annotated[
        Path | None, typer.Option(help="A run folder: print pins that re-create its environment.", show_default=False)
    ] = None,
) -> None:
    from ..environment import versions

    if requirements is not None:
        pins = versions.requirements(requirements)
        print(json.dumps({"requirements": pins.splitlines()}) + "\n" if json_output else pins, end="")
        return
    from ..doctor.output import answer
    from ..environment.versions import faults

    here = versions.environment()
    if not json_output:
        print(_as_text(here) + "\n")
    raise typer.Exit(answer(faults(here), subject="environment", json_output=json_output, environment=here))


def _as_text(here: dict[str, Any]) -> str:
    torch = here["torch"]
    lines = [f"isotype   {here['isotype']}, Python {here['python']}, {here['platform']}"]
    for device in here["devices"]:
        facts = [
            f"bf16 {device.get('bf16')}, fp16 {device.get('fp16')}" if "bf16" in device else device.get("reason", ""),
            device.get("generation", ""),
            f"{device['cores']} cores" if device.get("cores") else "",
            f"{device['memory'] / (1 << 30):.1f} GiB" if device.get("memory") else "",
        ]
        lines.append(f"device    {device['name']} ({device['kind']}): {', '.join(f for f in facts if f)}")
    if torch:
        build = f"CUDA {torch['cuda']}" if torch["cuda"] else f"ROCm {torch['hip']}" if torch["hip"] else "CPU"
        lines.append(f"torch     {torch['version']}, built for {build}, {torch['threads']} threads, {torch['cpu_capability']}")
    others = [f"{name} {version}" for name, version in here["packages"].items() if name != "torch"]
    lines.append("packages  " + ", ".join(others))
    if here["variables"]:
        lines.append("variables " + " ".join(f"{name}={value}" for name, value in here["variables"].items()))
    return "\n".join(lines)
