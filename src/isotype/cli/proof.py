"""`isotype proof` checks what Isotype computes on a card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def proof(
    out: Annotated[
        Path, typer.Option("--out", help="The folder for proof.json and proof.md.")
    ] = Path("isotype-proof"),
    device: Annotated[str, typer.Option("--device", help="cuda (also ROCm), or cpu.")] = "cuda",
    minutes: Annotated[
        float,
        typer.Option("--minutes", min=0.1, help="Begin only the parts that fit into this time."),
    ] = 10.0,
    part: Annotated[
        list[str] | None,
        typer.Option("--part", help="Only this part; may be given several times."),
    ] = None,
    before: Annotated[
        Path | None,
        typer.Option(
            "--before",
            help="The folder of an earlier call on the same card; what passed there is not repeated.",
            show_default=False,
        ),
    ] = None,
    tiny: Annotated[
        bool, typer.Option("--tiny", help="Sizes of a test; the times then mean nothing.")
    ] = False,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Check a card: every op and LoRA layer beside fp64, six presets, a resumed run, and the speed
    and memory of steps beside PEFT.

    The parts run in the order of their worth, each in a process of its own. The results are written
    after each part, and a second call goes on where the first one stopped. The files name the card
    and the versions, and no person or folder. Nothing is sent. The exit status is 0 if all parts
    passed or miss a package, 1 if one failed, 2 if there is no such device, and 3 if parts are left.

    Examples:

        isotype proof

        isotype proof --minutes 4 --part kernels --part adapters

        isotype proof --device cpu --tiny --out /tmp/proof    # the same code without a GPU
    """
    from ..proof.card import describe_card
    from ..proof.parts import Scale
    from ..proof.runner import run_proof
    from ..proof.summary import card_line, result_lines

    def print_line(line: str) -> None:
        if not json_output:
            print(line, flush=True)

    card = describe_card(device)
    print_line(card_line(card))
    result = run_proof(
        out,
        card=card,
        scale=Scale(device, tiny),
        minutes=minutes,
        names=part or (),
        previous=before,
        print_line=print_line,
    )
    if json_output:
        print(json.dumps(result.to_json()))
    for line in result_lines(result, str(out)):
        print_line(line)
    if result.failed:
        raise typer.Exit(1)
    if result.left:
        raise typer.Exit(3)
