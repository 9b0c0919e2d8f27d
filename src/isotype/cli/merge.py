"""`isotype merge RUN`: the adapter and its base as one ordinary model."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..runs.checkpoint.atomic_folder import SEAL
from ..wording import counted

if TYPE_CHECKING:
    from ..inference.merge import Merged

NOISY = 0.05  # share of the adapter's effect; above it a wider dtype is advised


def merge(
    run: Annotated[Path, typer.Argument(help="The run's folder, or a PEFT adapter's.")],
    out: Annotated[Path | None, typer.Option("--out", help="Where the model goes; RUN/merged by default.")] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="fp32, bf16 or fp16; by default the base's dtype in the run.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Merge an adapter into its base, as an ordinary Hugging Face folder that other engines load; of a diffusion run, as a pipeline's.

    A 4-bit base is dequantised; the sum is taken in fp32 and cast once. Prints how much of the adapter's effect the cast loses, and
    compares the merged model's loss with the adapter's.

    Examples:

        isotype merge runs/qwen

        isotype merge runs/qwen --dtype fp32 --out merged

        isotype merge someones-adapter --out merged      # a PEFT folder; its adapter_config.json names the base
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
    out = out or run / "merged"
    try:
        merged = _merged(run, out, dtype)
    except KeyboardInterrupt:
        left = "was written" if (out / SEAL).is_file() else "was not written, and the same command starts again"
        print(f"interrupted: {out} {left}", file=sys.stderr)
        raise
    if json_output:
        print(json.dumps({**asdict(merged), "folder": str(merged.folder)}))
        return
    advice = "; --dtype fp32 keeps all of it" if merged.noise > NOISY else ""
    print(f"merged    {counted(merged.weights, 'weight')} into {merged.folder}, {merged.dtype}: {merged.why}")
    print(f"noise     rounding to {merged.dtype} is {merged.noise:.1%} of the adapter's effect on the weights{advice}")
    rows = counted(merged.rows, "row")
    print(f"checked   loss {merged.merged_loss:.4f}, with the adapter not merged {merged.adapter_loss:.4f}, on {rows}")


def _merged(run: Path, out: Path, dtype: str | None) -> Merged:
    from ..training.quiet import quiet_libraries

    quiet_libraries()
    from ..config.kind import DIFFUSION
    from ..runs.folder import kind_of_run, refuse_filled

    refuse_filled(out)  # before a model is loaded, which may take minutes
    if kind_of_run(run) == DIFFUSION:
        from ..inference.diffusion import merge_denoiser

        return merge_denoiser(run, out, dtype=dtype)
    from ..inference.loaded import load_run
    from ..inference.merge import merge as merge_run

    return merge_run(load_run(run), out, dtype=dtype)
