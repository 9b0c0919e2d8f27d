"""`isotype init`: writes a commented configuration to start from, or the schema of all of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ..errors import UsageError


def init(
    file: Annotated[Path, typer.Argument(help="File to write; `-` prints it.")] = Path("run.yaml"),
    preset: Annotated[str, typer.Option(help="lora, qlora, full, full-bf16, or a precision (bf16-lora, nf4-lora, fp32, ...).")] = "lora",
    model: Annotated[str, typer.Option(help="Folder or hub id of the model.")] = "path/to/model",
    data: Annotated[str, typer.Option(help="Training data: a file, or stdlib.")] = "stdlib",
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema of configurations instead.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="With --schema: every key as a table in Markdown.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write a commented configuration: what a run needs is set, everything else is shown with its default.

    Examples:

        isotype init                                          # run.yaml, a LoRA adapter

        isotype init --preset qlora --model Qwen/Qwen2.5-0.5B --data chats.jsonl qwen.yaml

        isotype init - --preset full                          # to the screen

        isotype init --schema > isotype.schema.json           # completion and checks in editors: name it in the first line of a file,
                                                              # "# yaml-language-server: $schema=isotype.schema.json"

        isotype init --schema --markdown                      # every key, as a page to read
    """
    if schema or markdown:
        _print_schema(markdown)
        return
    from ..config.write import init_yaml

    text = init_yaml(preset, model=model, data=data)
    if str(file) == "-":
        print(json.dumps({"file": None, "preset": preset, "text": text}) if json_output else text, end="" if not json_output else "\n")
        return
    try:
        with file.open("w" if force else "x", encoding="utf-8") as out:
            out.write(text)
    except FileExistsError:
        raise UsageError(f"{file}: exists already", fix="--force replaces it, or give another name") from None
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}") from None
    if json_output:
        print(json.dumps({"file": str(file), "preset": preset, "text": text}))
    else:
        print(f"wrote {file}. See what it would do: isotype plan {file}")


def _print_schema(markdown: bool) -> None:
    if markdown:
        from ..config.write import reference_markdown

        print(reference_markdown(), end="")
        return
    from ..config.schema import RunConfig

    content = {"$schema": "https://json-schema.org/draft/2020-12/schema", **RunConfig.model_json_schema(), "title": "Isotype run"}
    print(json.dumps(content, indent=1))
