"""`isotype merge RUN` merges the adapter into its base model. `isotype export RUN` writes the
result in the formats of other programs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import UsageError
from ..runs.checkpoint.atomic_folder import SEAL
from ..wording import pluralise
from .verify import KeepOption, RowsOption, VerifyOption, refuse_idle_options, verify_written

if TYPE_CHECKING:
    from ..inference.loaded import LoadedRun
    from ..inference.merge import MergeResult
    from ..inference.verify.result import Verification

MAX_NOISE = 0.05  # a share of the adapter's effect; above it a wider dtype is suggested


def merge(
    run: Annotated[Path, typer.Argument(help="The run's folder, or a PEFT adapter's.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="Where the model goes; RUN/merged by default.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="fp32, bf16 or fp16; by default the base's dtype in the run."),
    ] = None,
    verify: VerifyOption = False,
    verify_rows: RowsOption = None,
    keep: KeepOption = None,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Merge an adapter into its base model, as an ordinary Hugging Face folder that other engines
    load. For a diffusion run, the folder holds a diffusers pipeline.

    A 4-bit base is dequantised. The sum of base and adapter is computed in fp32 and cast once. The
    command prints how much of the adapter's effect the cast loses, and compares the loss of the
    merged model with the loss of the model with the adapter. With `--verify` the folder is read
    back, and the command prints how much of the run's improvement the merged model keeps. If this
    share is below `--keep`, the exit status is 1.

    Examples:

        isotype merge runs/qwen

        isotype merge runs/qwen --dtype fp32 --out merged --verify

        isotype merge someones-adapter --out merged      # a PEFT folder, which names its base
    """
    from ..dtypes import parse
    from ..errors import UsageError

    if dtype is not None:
        try:
            dtype = parse(dtype)
        except ValueError as error:
            raise UsageError(f"--dtype: {error}") from None
        if dtype not in ("fp32", "bf16", "fp16"):
            raise UsageError(f"--dtype {dtype}: expected fp32, bf16 or fp16")
    refuse_idle_options(verify, verify_rows, keep)
    if verify:
        _refuse_pictures(run)
    out = out or run / "merged"
    try:
        load = _loader(is_shared=verify)
        merged = _merge_run(run, out, dtype, load)
    except KeyboardInterrupt:
        if (out / SEAL).is_file():
            outcome = "was written"
        else:
            outcome = "was not written, and the same command starts again"
        print(f"interrupted: {out} {outcome}", file=sys.stderr)
        raise
    facts: dict[str, Any] = {**asdict(merged), "folder": str(merged.folder)}
    advice = "; --dtype fp32 keeps all of it" if merged.noise > MAX_NOISE else ""
    lines = [
        f"merged    {pluralise(merged.weights, 'weight')} into {merged.folder}, {merged.dtype}:"
        f" {merged.why}",
        f"noise     rounding to {merged.dtype} is {merged.noise:.1%} of the adapter's effect on the"
        f" weights{advice}",
        f"checked   loss {merged.merged_loss:.4f}, with the adapter not merged"
        f" {merged.adapter_loss:.4f}, on {pluralise(merged.rows, 'row')}",
    ]
    verifier = partial(verify_written, run, merged.folder, verify_rows, keep, load=load)
    _finish(facts, lines, verifier if verify else None, json_output=json_output)


def _loader(*, is_shared: bool) -> Callable[[Path], LoadedRun]:
    """Returns the function that loads a run. For `--verify` the loaded run is kept, so that the
    comparison uses it again.
    """
    from ..inference.loaded import load_run

    load = partial(load_run, as_served=False)
    return cache(load) if is_shared else load


def _finish(
    facts: dict[str, Any],
    lines: list[str],
    verify: Callable[[], Verification] | None,
    *,
    json_output: bool,
) -> None:
    """Prints the result of a command.

    verify  compares the written file with the run, if `--verify` was given
    """
    if not json_output:
        print("\n".join(lines))
    verification = None if verify is None else verify()
    if verification is not None:
        facts = facts | {"verify": verification.to_json()}
        if not json_output:
            print("\n".join(verification.lines()))
    if json_output:
        print(json.dumps(facts))
    if verification is not None and not verification.is_same:
        raise typer.Exit(1)


def _refuse_pictures(run: Path) -> None:
    """Raises UsageError for a diffusion run, whose files are not compared."""
    from ..config.kind import DIFFUSION
    from ..runs.folder import detect_model_folder, detect_run_kind

    if detect_model_folder(run) is None and detect_run_kind(run) == DIFFUSION:
        raise UsageError(f"{run}: --verify compares language models; this run is on pictures")


def _merge_run(
    run: Path, out: Path, dtype: str | None, load: Callable[[Path], LoadedRun]
) -> MergeResult:
    from ..training.console import quiet_libraries

    quiet_libraries()
    from ..config.kind import DIFFUSION
    from ..runs.folder import detect_run_kind, refuse_non_empty

    refuse_non_empty(out)  # checked before loading the model, which may take minutes
    if detect_run_kind(run) == DIFFUSION:
        from ..inference.diffusion import merge_denoiser

        return merge_denoiser(run, out, dtype=dtype)
    from ..inference.merge import merge as merge_run

    return merge_run(load(run), out, dtype=dtype)


FORMATS = ("comfyui", "compressed-tensors", "gguf", "ollama", "vllm")


def export(
    run: Annotated[
        Path,
        typer.Argument(
            help=(
                "The run's folder, an adapter in it (RUN/adapters/step_N), or that of an adapter or"
                " model."
            )
        ),
    ],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            help="gguf, ollama, vllm or compressed-tensors of language models; comfyui of pictures.",
        ),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", help="The file or folder; a new one in RUN by default.")
    ] = None,
    kind: Annotated[
        str | None,
        typer.Option(
            "--type",
            help=(
                "gguf, ollama: the whole model in F16, BF16, Q8_0, Q5_0 or Q4_0, in the types of the"
                " base's GGUF file (base), or in a type that llama-quantize writes (Q4_K_M, Q5_K_M,"
                " Q6_K). gguf without it: an adapter alone. compressed-tensors: fp8, int8, int4,"
                " nvfp4 or mxfp4; by default the format of the base."
            ),
        ),
    ] = None,
    verify: VerifyOption = False,
    verify_rows: RowsOption = None,
    keep: KeepOption = None,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Write the result of a run for llama.cpp, Ollama, vLLM, or ComfyUI, Forge and kohya's tools.

    Examples:

        isotype export runs/qwen --to vllm                 # the adapter, and the line to serve it

        isotype export runs/qwen --to gguf                 # one file for llama-server --lora

        isotype export runs/qwen --to gguf --type Q8_0     # merged: the whole model in one file

        isotype export runs/qwen --to gguf --type Q4_K_M --verify     # with llama-quantize

        isotype export runs/qwen --to compressed-tensors --type fp8   # a folder for vLLM

        isotype export runs/qwen --to ollama --verify      # a folder with a Modelfile, read back

        isotype export runs/dog/adapters/step_1500 --to comfyui --out dog.safetensors
    """
    from ..config.kind import DIFFUSION
    from ..runs.folder import (
        detect_model_folder,
        detect_run_kind,
        require_run,
        split_run_and_adapter,
    )
    from ..training.console import quiet_libraries

    if to not in FORMATS:
        raise UsageError(f"--to {to}: expected {', '.join(FORMATS)}")
    refuse_idle_options(verify, verify_rows, keep)
    if kind is not None and to not in ("compressed-tensors", "gguf", "ollama"):
        raise UsageError(f"--type has no effect with --to {to}")
    folder, intermediate_adapter = split_run_and_adapter(run)
    is_diffusion = (
        detect_model_folder(folder) is None and detect_run_kind(require_run(folder)) == DIFFUSION
    )
    if is_diffusion != (to == "comfyui"):
        if is_diffusion:
            advice = "a run on pictures: --to comfyui"
        else:
            advice = f"not a run on pictures: --to {', '.join(FORMATS[1:])}"
        raise UsageError(f"{run}: {advice}")
    name = folder.absolute().name + (
        f"-{intermediate_adapter.name}" if intermediate_adapter else ""
    )
    has_adapter = (
        intermediate_adapter
        or (folder / "adapter").is_dir()
        or (folder / "adapter_config.json").is_file()
    )
    suffix = {
        "comfyui": ".safetensors",
        "compressed-tensors": f"-{(kind or to).lower()}",
        "gguf": f"-{(kind or ('lora' if has_adapter else 'model')).lower()}.gguf",
    }.get(to, f"-{to}")
    out = out or folder / f"{name}{suffix}"
    if out.is_file() or (out.exists() and (to in ("comfyui", "gguf") or any(out.iterdir()))):
        raise UsageError(f"{out}: is there already", fix="--out another place")
    if not out.absolute().parent.is_dir():
        raise UsageError(f"{out}: no folder {out.parent}")
    quiet_libraries()
    load = _loader(is_shared=verify)
    if to == "comfyui":
        if verify:
            _refuse_pictures(run)
        from ..inference.diffusion import export_comfyui

        modules = export_comfyui(folder, intermediate_adapter, out)
        written: dict[str, Any] = {"file": str(out), "modules": modules}
        lines = [f"exported  {modules} modules to {out}"]
    else:
        from ..inference.export import export_language

        written, lines = export_language(run, out, to=to, kind=kind, name=name, load=load)
    verifier = partial(verify_written, run, out, verify_rows, keep, load=load)
    _finish(written, lines, verifier if verify else None, json_output=json_output)
