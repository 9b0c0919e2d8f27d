"""`isotype init` writes a commented configuration to start from, or the schema of configurations.

`isotype import` translates the configuration of another tool. Neither imports torch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from ..errors import UsageError
from ..wording import align_columns

if TYPE_CHECKING:
    from ..translate import Translation


def init(
    file: Annotated[Path, typer.Argument(help="File to write; `-` prints it.")] = Path("run.yaml"),
    preset: Annotated[
        str,
        typer.Option(
            help="lora, qlora, full, full-bf16, or a precision (bf16-lora, nf4-lora, fp32, ...)."
        ),
    ] = "lora",
    model: Annotated[str, typer.Option(help="Folder or hub id of the model.")] = "path/to/model",
    data: Annotated[
        str,
        typer.Option(help="Training data: a file, a folder of pictures or clips, or stdlib."),
    ] = "stdlib",
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON Schema of configurations instead.")
    ] = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="With --schema: every key as a table in Markdown.")
    ] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write a commented configuration. Required settings are set; all other settings are shown with
    their defaults.

    Examples:

        isotype init                                          # run.yaml, a LoRA adapter

        isotype init --preset qlora --model Qwen/Qwen2.5-0.5B --data chats.jsonl qwen.yaml

        isotype init --model pony.safetensors --data pictures   # steps and size that fit the
        pictures

        isotype init --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers --data clips       # frames and size
        that fit the clips

        isotype init - --preset full                          # to the screen

        isotype init --schema > isotype.schema.json           # completion and checks in editors:
        name it in the first line of a file,
                                                              # "# yaml-language-server:
                                                              $schema=isotype.schema.json"

        isotype init --schema --markdown                      # every key, as a page to read
    """
    if schema or markdown:
        _print_schema(markdown)
        return
    from ..config.load import find_recipe
    from ..config.write import init_yaml

    proposal = None
    if Path(data).expanduser().is_dir():
        from ..tasks.diffusion.clip_proposal import propose_clip_settings
        from ..tasks.diffusion.picture_proposal import propose_picture_settings

        is_lora = find_recipe(preset).settings.get("adapter.kind", "lora") == "lora"
        proposal = propose_clip_settings(model, data)
        if proposal is None:
            proposal = propose_picture_settings(model, data, is_lora=is_lora)
    proposed = {} if proposal is None else proposal.settings
    text = init_yaml(preset, model=model, data=data, proposed=proposed)
    if proposal is not None and not json_output:
        for reason in proposal.reasons:
            print(f"note  {reason}", file=sys.stderr)
    if str(file) == "-":
        print(
            json.dumps({"file": None, "preset": preset, "text": text}) if json_output else text,
            end="" if not json_output else "\n",
        )
        return
    _write(file, text, force=force)
    if json_output:
        print(json.dumps({"file": str(file), "preset": preset, "text": text}))
    else:
        print(f"wrote {file}. See what it would do: isotype plan {file}")


def _write(file: Path, text: str, *, force: bool) -> None:
    try:
        with file.open("w" if force else "x", encoding="utf-8") as out:
            out.write(text)
    except FileExistsError:
        raise UsageError(
            f"{file}: exists already", fix="--force replaces it, or give another name"
        ) from None
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}") from None


def _print_schema(markdown: bool) -> None:
    if markdown:
        from ..config.write import reference_markdown

        print(reference_markdown(), end="")
        return
    from ..config.schema import RunConfig

    content = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **RunConfig.model_json_schema(),
        "title": "Isotype run",
    }
    print(json.dumps(content, indent=1))


_TOOLS = (
    "axolotl, llamafactory, trl, hf, torchtune, unsloth, simpletuner, kohya, ai-toolkit,"
    " onetrainer, diffusers, musubi-tuner, diffusion-pipe."
)


def import_config(
    file: Annotated[
        Path,
        typer.Argument(
            help="The other tool's configuration, script or notebook.", show_default=False
        ),
    ],
    tool: Annotated[str | None, typer.Option("--from", help=_TOOLS)] = None,
    out: Annotated[
        Path | None, typer.Option(help="File to write; without it the configuration is printed.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Translate another tool's configuration to an Isotype configuration, and report what each key
    became.

    It reads configurations of axolotl, LLaMA-Factory, TRL, Hugging Face TrainingArguments,
    torchtune and Unsloth notebooks, for pictures of SimpleTuner, kohya's sd-scripts, ai-toolkit,
    OneTrainer and diffusers' scripts, and for videos of musubi-tuner and diffusion-pipe. Files may be YAML, JSON, TOML, Python, notebooks,
    shell scripts or config.env.

    Examples:

        isotype import axolotl/qlora.yml --out run.yaml

        isotype import train.py --from trl > run.yaml

        isotype import config/config.env --from simpletuner --out run.yaml
    """
    from ..translate import translate

    result = translate(file, tool)
    if out is not None:
        _write(out, result.text, force=force)
    if json_output:
        answer = {
            "tool": result.tool,
            "file": result.file,
            "out": str(out) if out else None,
            "counts": result.counts,
            "keys": [outcome.to_dict() for outcome in result.outcomes],
            "notes": result.notes,
            "findings": [finding.to_dict() for finding in result.findings],
            "config": result.text,
        }
        print(json.dumps(answer, indent=1, default=str))
        return
    # without --out, the configuration is printed to standard output
    stream = sys.stdout if out is not None else sys.stderr
    _print_outcomes(result, stream)
    if out is not None:
        print(f"wrote {out}. See what it would do: isotype plan {out}")
    else:
        print(result.text, end="")


def _print_outcomes(result: Translation, stream: TextIO) -> None:
    rows = []
    for outcome in result.outcomes:
        became = "; ".join(part for part in (outcome.result, outcome.note) if part)
        rows.append(
            (
                str(outcome.source_key.line or ""),
                outcome.source_key.name_in_file or outcome.source_key.name,
                str(outcome.fate),
                became,
            )
        )
    for line in align_columns(rows, right_aligned=(0,)):
        print(line, file=stream)
    print(
        f"\n{result.tool}: "
        + ", ".join(f"{count} {fate}" for fate, count in result.counts.items() if count),
        file=stream,
    )
    for note in result.notes:
        print(f"note  {note}", file=stream)
    for finding in result.findings:
        print(f"\n{finding.render()}", file=stream)
