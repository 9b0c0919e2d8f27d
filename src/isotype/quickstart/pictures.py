"""`isotype quickstart --diffusion`: a small Flux learns to draw shapes, then LoRA teaches it one that it never saw; no network.

The folder holds all that is needed to do it again by hand: the pictures, the pipeline, and two files, `full.yaml` and `lora.yaml`, that
`isotype train` takes.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from .stages import Stage, run_stages, write_folder

BEFORE, NEW = ("circle", "square", "triangle"), "cross"
ASKED = ("a red circle", "a green square", "a blue triangle", "a yellow cross")
PIPELINE, BASE, PICTURES, SHEET = "flux", "base", "pictures", "drawn.png"
STAGES = (
    Stage("full", f"every weight, on pictures of {', '.join(BEFORE)}", 2000, seconds=140, least=100),
    Stage("lora", f"LoRA on pictures of a {NEW}, new to that model; the others keep it from forgetting", 900, seconds=70, least=50),
)


def quickstart_pictures(folder: Path, *, share: float = 1.0, vae_steps: int = 300, draws: int = 10, json_output: bool = False) -> int:
    """Runs both stages, draws what was asked for and judges it. Returns the exit status: 0, or 130 when interrupted and saved.

    share   of the steps that are done
    draws   pictures of each prompt at the end
    """
    from ..tasks.diffusion.pipeline import require_diffusers

    require_diffusers()
    with contextlib.redirect_stdout(sys.stderr) if json_output else contextlib.nullcontext():
        write_folder(folder, "isotype quickstart --diffusion", STAGES, (PIPELINE, PICTURES), lambda: _write(folder, vae_steps))
        done = run_stages(folder, STAGES, share=share, between=lambda: _make_base(folder))
        if not done:
            print(f"go on with: isotype quickstart --diffusion --folder {folder}")
            return 130
        print("\ndrawing and judging, by the pixels alone")
        summary = judge_runs(folder, draws=draws)
    if json_output:
        results = {stage.name: json.loads((folder / stage.name / "result.json").read_text(encoding="utf-8")) for stage in STAGES}
        print(json.dumps({"folder": str(folder), **results, **summary}))
    else:
        _show(folder, summary)
    return 0


def judge_runs(folder: Path, *, draws: int) -> dict[str, Any]:
    """What each run drew when asked for each shape: `right` of `draws` pictures by prompt, before and after LoRA; writes the sheet."""
    import numpy as np
    from PIL import Image

    from ..inference.diffusion import draw_with
    from .shapes import SIDE, judged

    right: dict[str, dict[str, int]] = {}
    step = SIDE + 2
    sheet = Image.new("RGB", (step * draws, step * 2 * len(ASKED)), (200, 200, 200))
    for i, stage in enumerate(STAGES):
        _, pictures = draw_with(folder / stage.name, [prompt for prompt in ASKED for _ in range(draws)])
        right[stage.name] = dict.fromkeys(ASKED, 0)
        for j, picture in enumerate(pictures):
            image = Image.open(io.BytesIO(picture.png)).convert("RGB")
            right[stage.name][picture.prompt] += judged(np.array(image)) == picture.prompt
            sheet.paste(image, (step * (j % draws), step * (i * len(ASKED) + j // draws)))
    sheet.resize((2 * sheet.width, 2 * sheet.height), Image.Resampling.NEAREST).save(folder / SHEET)
    return {
        "before": right["full"],
        "after": right["lora"],
        "draws": draws,
        "share": sum(right["lora"].values()) / (draws * len(ASKED)),
        "sheet": str(folder / SHEET),
        "report": str(folder / "lora" / "report.html"),
    }


def _write(folder: Path, vae_steps: int) -> None:
    from .shapes import COLOURS, SIDE, write_pictures, write_pipeline

    count = write_pictures(folder / PICTURES / "before", BEFORE, each=32, seed=1)
    count += write_pictures(folder / PICTURES / "new", (NEW,), each=32, seed=2)
    print(f"pictures  {count} of {len(BEFORE) + 1} shapes in {len(COLOURS)} colours, {SIDE} x {SIDE} pixels, each with a caption")
    error = write_pipeline(folder / PIPELINE, vae_steps=vae_steps)
    print(f"pipeline  a Flux with random weights; its VAE trained on such shapes: pixels off by {error / 2:.1%}")


def _make_base(folder: Path) -> None:
    """The pipeline with the trained transformer in place of the random one."""
    aside = folder / f".{BASE}"
    if (folder / BASE).is_dir():
        return
    shutil.rmtree(aside, ignore_errors=True)
    shutil.copytree(folder / PIPELINE, aside, ignore=shutil.ignore_patterns("transformer"))
    (aside / "transformer").mkdir()
    for name in ("config.json", "diffusion_pytorch_model.safetensors"):
        shutil.copy(folder / "full" / "model" / name, aside / "transformer" / name)
    aside.rename(folder / BASE)


def _show(folder: Path, summary: dict[str, Any]) -> None:
    print(f"\nright of {summary['draws']} pictures      before LoRA  after")
    for prompt in ASKED:
        print(f"  {prompt:<20}  {summary['before'][prompt]:>11}  {summary['after'][prompt]:>5}")
    print(f"\nall together {summary['share']:.0%} after LoRA")
    print(f"pictures  {summary['sheet']}  (a row per prompt: the upper half before LoRA, the lower after)")
    print(f"report    {summary['report']}")
    print(f"adapter   {folder / 'lora' / 'adapter' / 'pytorch_lora_weights.safetensors'}  on  {folder / BASE}")
    print(f'draw      isotype sample {folder / "lora"} "a blue {NEW}"')
    print(f"again     isotype train {folder / 'lora.yaml'} run.folder=runs/mine images.train=YOUR_PICTURES")
