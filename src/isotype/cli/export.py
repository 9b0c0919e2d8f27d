"""`isotype export RUN --to comfyui`: the adapter of a diffusion run as one file for other programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ..errors import UsageError


def export(
    run: Annotated[Path, typer.Argument(help="A diffusion run's folder, or an adapter in it (RUN/adapters/step_N).")],
    to: Annotated[str, typer.Option("--to", help="comfyui: kohya's and ComfyUI's names, with .alpha tensors.")],
    out: Annotated[Path | None, typer.Option("--out", help="The file; RUN/NAME.safetensors by default.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help='Print `{"file": PATH, "modules": N}`.')] = False,
) -> None:
    """Write an adapter as the one file that ComfyUI, Forge and kohya's tools read, at the strength that it was trained with.

    Examples:

        isotype export runs/dog --to comfyui

        isotype export runs/dog/adapters/step_1500 --to comfyui --out ComfyUI/models/loras/dog.safetensors
    """
    from ..config.kind import DIFFUSION
    from ..runs.folder import kind_of_run, require_run, run_and_result

    if to != "comfyui":
        raise UsageError(f"--to {to}: expected comfyui", fix="diffusers reads RUN/adapter as it is; isotype merge writes a whole pipeline")
    folder, on_the_way = run_and_result(run)
    if kind_of_run(require_run(folder)) != DIFFUSION:
        raise UsageError(f"{run}: not a run on pictures: its adapter is a PEFT folder, which vLLM, llama.cpp and PEFT read as it is")
    name = folder.absolute().name + (f"-{on_the_way.name}" if on_the_way else "")
    out = out or folder / f"{name}.safetensors"
    if out.exists():
        raise UsageError(f"{out}: is there already", fix="--out another file")
    if not out.parent.is_dir():
        raise UsageError(f"{out}: no folder {out.parent}")
    from ..inference.diffusion import export_comfyui
    from ..training.quiet import quiet_libraries

    quiet_libraries()
    modules = export_comfyui(folder, on_the_way, out)
    print(json.dumps({"file": str(out), "modules": modules}) if json_output else f"exported  {modules} modules to {out}")
