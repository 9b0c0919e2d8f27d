"""`isotype env`: versions, devices, and what is wrong with them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .app import ABOUT

HELP = """Show versions and devices, and warn of versions with known dtype faults and of versions that do not work together.

Examples:

    isotype env

    isotype env --json

    isotype env --requirements runs/qwen > requirements.txt     # the environment of a run, for pip install -r

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
        if json_output:
            import json

            print(json.dumps({"requirements": pins.splitlines()}))
        else:
            print(pins, end="")
        return
    from ..doctor.output import answer
    from ..environment.known_faults import faults

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


def register(app: typer.Typer) -> None:
    app.command(name="env", rich_help_panel=ABOUT, help=HELP)(env)
