"""`isotype import`: another tool's configuration becomes one of Isotype. Imports no torch."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from ..errors import UsageError

if TYPE_CHECKING:
    from ..translate import Translation


_TOOLS = "axolotl, llamafactory, trl, hf, torchtune, unsloth, simpletuner, kohya, ai-toolkit, onetrainer, diffusers."


def import_config(
    file: Annotated[Path, typer.Argument(help="The other tool's configuration, script or notebook.", show_default=False)],
    tool: Annotated[str | None, typer.Option("--from", help=_TOOLS)] = None,
    out: Annotated[Path | None, typer.Option(help="File to write; without it the configuration is printed.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Make an Isotype configuration of another tool's, and say what became of each of its keys.

    Reads axolotl, LLaMA-Factory, TRL, Hugging Face TrainingArguments, torchtune, Unsloth notebooks; of pictures SimpleTuner, kohya's
    sd-scripts, ai-toolkit, OneTrainer and diffusers' scripts: YAML, JSON, TOML, Python, notebooks, shell scripts and config.env.

    Examples:

        isotype import axolotl/qlora.yml --out run.yaml

        isotype import train.py --from trl > run.yaml

        isotype import config/config.env --from simpletuner --out run.yaml
    """
    from ..translate import translate

    result = translate(file, tool)
    if out is not None:
        try:
            with out.open("w" if force else "x", encoding="utf-8") as written:
                written.write(result.text)
        except FileExistsError:
            raise UsageError(f"{out}: exists already", fix="--force replaces it, or give another name") from None
        except OSError as error:
            raise UsageError(f"{out}: {error.strerror}") from None
    if json_output:
        answer = {
            "tool": result.tool,
            "file": result.file,
            "out": str(out) if out else None,
            "counts": result.counts,
            "keys": [outcome.as_json() for outcome in result.outcomes],
            "notes": result.notes,
            "findings": [finding.as_json() for finding in result.findings],
            "config": result.text,
        }
        print(json.dumps(answer, indent=1, default=str))
        return
    account = sys.stdout if out is not None else sys.stderr  # without --out, standard output is the configuration
    _tell(result, account)
    if out is not None:
        print(f"wrote {out}. See what it would do: isotype plan {out}")
    else:
        print(result.text, end="")


def _tell(result: Translation, to: TextIO) -> None:
    rows = []
    for outcome in result.outcomes:
        became = "; ".join(part for part in (outcome.became, outcome.note) if part)
        rows.append((str(outcome.given.line or ""), outcome.given.written or outcome.given.name, str(outcome.fate), became))
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
    for line, key, fate, became in rows:
        print(f"{line:>{widths[0]}}  {key:<{widths[1]}}  {fate:<{widths[2]}}  {became}".rstrip(), file=to)
    print(f"\n{result.tool}: " + ", ".join(f"{count} {fate}" for fate, count in result.counts.items() if count), file=to)
    for note in result.notes:
        print(f"note  {note}", file=to)
    for finding in result.findings:
        print(f"\n{finding.render()}", file=to)
