"""`isotype export RUN --to FORMAT`: the result of a run as other programs read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import UsageError

FORMATS = ("comfyui", "gguf", "ollama", "vllm")


def export(
    run: Annotated[Path, typer.Argument(help="The run's folder, an adapter in it (RUN/adapters/step_N), or that of an adapter or model.")],
    to: Annotated[str, typer.Option("--to", help="gguf, ollama or vllm of language models; comfyui of pictures.")],
    out: Annotated[Path | None, typer.Option("--out", help="The file or folder; a new one in RUN by default.")] = None,
    kind: Annotated[
        str | None, typer.Option("--type", help="gguf, ollama: the whole model in F16, BF16 or Q8_0; gguf without it: an adapter alone.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Write the result of a run for llama.cpp, Ollama, vLLM, or ComfyUI, Forge and kohya's tools.

    Examples:

        isotype export runs/qwen --to vllm                 # the adapter, and the line that serves it

        isotype export runs/qwen --to gguf                 # the adapter as one file for llama-server --lora

        isotype export runs/qwen --to gguf --type Q8_0     # merged into its base, the whole model as one file

        isotype export runs/qwen --to ollama               # a folder with a Modelfile: ollama create NAME -f Modelfile

        isotype export runs/dog/adapters/step_1500 --to comfyui --out ComfyUI/models/loras/dog.safetensors
    """
    from ..config.kind import DIFFUSION
    from ..runs.folder import kind_of_run, require_run, run_and_result, without_run
    from ..training.quiet import quiet_libraries

    if to not in FORMATS:
        raise UsageError(f"--to {to}: expected {', '.join(FORMATS)}")
    if kind is not None and to not in ("gguf", "ollama"):
        raise UsageError(f"--type has no effect with --to {to}")
    folder, on_the_way = run_and_result(run)
    pictures = without_run(folder) is None and kind_of_run(require_run(folder)) == DIFFUSION
    if pictures != (to == "comfyui"):
        what = "a run on pictures: --to comfyui" if pictures else f"not a run on pictures: --to {', '.join(FORMATS[1:])}"
        raise UsageError(f"{run}: {what}")
    name = folder.absolute().name + (f"-{on_the_way.name}" if on_the_way else "")
    suffix = {"comfyui": ".safetensors", "gguf": f"-{(kind or 'lora').lower()}.gguf"}.get(to, f"-{to}")
    out = out or folder / f"{name}{suffix}"
    if out.is_file() or (out.exists() and (to not in ("vllm", "ollama") or any(out.iterdir()))):
        raise UsageError(f"{out}: is there already", fix="--out another place")
    if not out.absolute().parent.is_dir():
        raise UsageError(f"{out}: no folder {out.parent}")
    quiet_libraries()
    if to == "comfyui":
        from ..inference.diffusion import export_comfyui

        modules = export_comfyui(folder, on_the_way, out)
        written: dict[str, Any] = {"file": str(out), "modules": modules}
        lines = [f"exported  {modules} modules to {out}"]
    else:
        from ..inference.export import export_language

        written, lines = export_language(run, out, to=to, kind=kind, name=name)
    print(json.dumps(written) if json_output else "\n".join(lines))
