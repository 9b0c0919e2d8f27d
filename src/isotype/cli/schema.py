"""`isotype schema`: the JSON Schema of a run's configuration, for editors."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from .app import ABOUT

HELP = """Print the JSON Schema of a run's configuration, for completion and checks in editors.

Save it beside your configuration and name it in the file's first line:

    isotype schema > isotype.schema.json

    # yaml-language-server: $schema=isotype.schema.json

`isotype schema --markdown` prints the same as a page to read.
"""


def schema(markdown: Annotated[bool, typer.Option("--markdown", help="Every key as a table in Markdown.")] = False) -> None:
    if markdown:
        from ..config.write import reference_markdown

        print(reference_markdown(), end="")
        return
    from ..config.schema import RunConfig

    content = {"$schema": "https://json-schema.org/draft/2020-12/schema", **RunConfig.model_json_schema(), "title": "Isotype run"}
    print(json.dumps(content, indent=1))


def register(app: typer.Typer) -> None:
    app.command(name="schema", rich_help_panel=ABOUT, help=HELP)(schema)
