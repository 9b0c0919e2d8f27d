"""`isotype quickstart --diffusion`: a small Flux from random weights, then a LoRA that teaches it a shape it never saw; no network.

The folder holds all that is needed to do it again by hand: the pictures, the pipeline, and two files, `full.yaml` and `lora.yaml`, that
`isotype train` takes. Both stages are ordinary runs. A finished stage is not repeated and an interrupted one is resumed.
"""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..entry.stage import quoted, run_stage
from ..entry.stage_time import StageTime, take_fewer_threads_where_faster, timed
from ..errors import UsageError
from .shapes import COLOURS, SHAPES, SIDE, write_pictures

BEFORE, NEW = SHAPES[:3], SHAPES[3]
ASKED = ("a red circle", "a green square", "a blue triangle", "a yellow cross")
FULL, LORA, PIPELINE, BASE, PICTURES, SHEET = "full.yaml", "lora.yaml", "flux", "base", "pictures", "drawn.png"
MOST_SECONDS = 265.0  # as counted here; with 300 the whole command took 5 min 23 s beside two busy loops
TRAIN_SECONDS = 180.0  # of the steps of both runs
LEAST = 0.1  # of the steps, by plan
_LEAST_STEPS = {"full": 100, "lora": 50}  # done in any case
_AFTER = 0.7  # seconds of drawing and judging, for each that pictures and pipeline took
_PROBED = 8  # steps that are timed before the training
_DRAWN_STEPS = 16
_TEXT_TOKENS = 6
_REPEATS = 4  # of the new shape's pictures: four of seven that LoRA sees


@dataclass(frozen=True, kw_only=True)
class Size:
    """How long things train. `each`: pictures of a shape in a colour; `draws`: pictures drawn of each prompt at the end."""

    vae_steps: int = 300
    full_steps: int = 2000
    lora_steps: int = 900
    batch: int = 16
    each: int = 32
    draws: int = 10

    def shortened(self, step_seconds: float) -> Size:
        """Fewer steps where both runs would take more than TRAIN_SECONDS at so many seconds for a step."""
        share = min(1.0, TRAIN_SECONDS / (step_seconds * (self.full_steps + self.lora_steps))) if step_seconds else 1.0
        share = max(LEAST, share)
        return replace(self, full_steps=round(share * self.full_steps), lora_steps=round(share * self.lora_steps))


def quickstart_pictures(folder: Path, *, size: Size | None = None, preset: str = "auto", json_output: bool = False) -> int:
    """Runs both stages, draws what was asked for and judges it. Returns the exit status: 0, or 130 when interrupted and saved."""
    from ..tasks.diffusion.pipeline import require_diffusers

    require_diffusers()
    asked, size = size, size or Size()
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr if json_output else sys.stdout, flush=True)  # noqa: E731
    time = StageTime(MOST_SECONDS, share=size.full_steps / (size.full_steps + size.lora_steps), least=_LEAST_STEPS, after=_AFTER)
    if asked is None:
        take_fewer_threads_where_faster(say)
    _prepare(folder, size, preset, say, shorten=asked is None)
    results = {}
    for stage, file, what in (
        ("full", FULL, f"1/2  every weight, on pictures of {', '.join(BEFORE)}"),
        ("lora", LORA, f"2/2  LoRA on pictures of a {NEW}, which that model never saw; the others keep it from forgetting"),
    ):
        say(f"\n{what}  ({folder / file})")
        if stage == "lora":
            _make_base(folder)
        time.begin(stage)
        if (status := run_stage(folder / stage, folder / file, json_output=json_output, callbacks=[time] if asked is None else [])) != 0:
            say(f"go on with: isotype quickstart --diffusion --folder {folder}")
            return status
        time.end()
        if time.stopped_at:
            say(f"speed     ended at step {time.stopped_at}, since the command is to take five minutes: other programs use the cores")
        results[stage] = json.loads((folder / stage / "result.json").read_text(encoding="utf-8"))
    say("\ndrawing and judging, by the pixels alone")
    summary = judge_runs(folder, draws=size.draws)
    if json_output:
        print(json.dumps({"folder": str(folder), **results, **summary}))
    else:
        _show(folder, summary, say)
    return 0


def judge_runs(folder: Path, *, draws: int) -> dict[str, Any]:
    """What each run drew when asked for each shape: `right` of `draws` pictures by prompt, before and after LoRA; writes the sheet."""
    made = {stage: _judged(folder / stage, draws) for stage in ("full", "lora")}
    _sheet([[png for _, png in made[stage][prompt]] for stage in ("full", "lora") for prompt in ASKED]).save(folder / SHEET)
    right = {stage: {prompt: sum(is_right for is_right, _ in drawn) for prompt, drawn in by.items()} for stage, by in made.items()}
    return {
        "before": right["full"],
        "after": right["lora"],
        "draws": draws,
        "share": sum(right["lora"].values()) / (draws * len(ASKED)),
        "sheet": str(folder / SHEET),
        "report": str(folder / "lora" / "report.html"),
    }


def _judged(run: Path, draws: int) -> dict[str, list[tuple[bool, bytes]]]:
    import numpy as np
    from PIL import Image

    from ..inference.diffusion import draw_with
    from .judge import judged

    _, pictures = draw_with(run, [prompt for prompt in ASKED for _ in range(draws)])
    found: dict[str, list[tuple[bool, bytes]]] = {prompt: [] for prompt in ASKED}
    for picture in pictures:
        seen = judged(np.array(Image.open(io.BytesIO(picture.png)).convert("RGB")))
        found[picture.prompt].append((str(seen) == picture.prompt, picture.png))
    return found


def _sheet(rows: Sequence[Sequence[bytes]]) -> Any:
    """One picture of all drawn pictures: a row per prompt, the first half before LoRA, the second after."""
    from PIL import Image

    gap = 2
    sheet = Image.new("RGB", ((SIDE + gap) * max(map(len, rows)), (SIDE + gap) * len(rows)), (200, 200, 200))
    for i, row in enumerate(rows):
        for j, png in enumerate(row):
            sheet.paste(Image.open(io.BytesIO(png)), ((SIDE + gap) * j, (SIDE + gap) * i))
    return sheet.resize((2 * sheet.width, 2 * sheet.height), Image.Resampling.NEAREST)


def _prepare(folder: Path, size: Size, preset: str, say: Callable[[str], None], *, shorten: bool) -> None:
    """Writes what both stages read; `lora.yaml` comes last: with it the folder is complete.

    shorten  to the speed of this machine
    """
    if (folder / LORA).is_file():
        return
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder}: is a file", fix="isotype quickstart --diffusion --folder OTHER")
    if folder.is_dir() and any(path.name not in (FULL, PIPELINE, PICTURES) for path in folder.iterdir()):
        raise UsageError(f"{folder}: holds other files", fix="isotype quickstart --diffusion --folder OTHER")
    from .parts import pipeline

    count = write_pictures(folder / PICTURES / "before", BEFORE, each=size.each, seed=1)
    count += write_pictures(folder / PICTURES / "new", (NEW,), each=size.each, seed=2)
    say(f"pictures  {count} of {len(SHAPES)} shapes in {len(COLOURS)} colours, {SIDE} x {SIDE} pixels, each with a caption")
    error = pipeline(folder / PIPELINE, vae_steps=size.vae_steps)
    say(f"pipeline  a Flux with random weights; its VAE trained on such shapes: pixels off by {error / 2:.1%}")
    if shorten:
        seconds = step_seconds(folder / PIPELINE / "transformer", rows=size.batch)
        whole, size = size, size.shortened(seconds)
        if size != whole:
            share = size.full_steps / whole.full_steps
            say(f"speed     {1000 * seconds:.0f} ms a step: both stages are shortened to {share:.0%} of their steps, to take five minutes")
    (folder / FULL).write_text(_full_yaml(folder, size, preset), encoding="utf-8")
    (folder / LORA).write_text(_lora_yaml(folder, size, preset), encoding="utf-8")


def step_seconds(transformer: Path, *, rows: int) -> float:
    """Seconds of one training step: the lower quartile of measured steps; 0 with a GPU, which is always fast enough."""
    import torch
    from diffusers import FluxTransformer2DModel

    from ..environment.hardware import detect
    from ..tasks.diffusion.families import Asked
    from ..tasks.diffusion.families.flux import Flux

    hardware = detect()
    if hardware.kind != "cpu":
        return 0.0
    model: Any = FluxTransformer2DModel.from_pretrained(transformer)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=hardware.bf16 == "native"):
            made = Flux().predict(model, latents_NCHW, times_N, text, Asked())
        made.float().square().mean().backward()

    with torch.random.fork_rng(devices=[]):
        latents_NCHW, times_N = torch.randn(rows, model.config.in_channels // 4, SIDE // 4, SIDE // 4), torch.rand(rows)
        text = {name: torch.randn(rows, *shape) for name, shape in Flux().text_shapes(model.config, _TEXT_TOKENS).items()}
        return timed(step, _PROBED)


def _make_base(folder: Path) -> None:
    """The pipeline with the trained transformer in place of the random one."""
    aside = folder / f".{BASE}"
    if (folder / BASE).is_dir():
        return
    shutil.rmtree(aside, ignore_errors=True)
    shutil.copytree(folder / PIPELINE, aside, ignore=shutil.ignore_patterns("transformer"))
    (aside / "transformer").mkdir()
    for file in (folder / "full" / "model").iterdir():
        if file.name in ("config.json", "diffusion_pytorch_model.safetensors"):
            shutil.copy(file, aside / "transformer" / file.name)
    aside.rename(folder / BASE)


def _show(folder: Path, summary: dict[str, Any], say: Callable[[str], None]) -> None:
    say(f"\nright of {summary['draws']} pictures      before LoRA  after")
    for prompt in ASKED:
        say(f"  {prompt:<20}  {summary['before'][prompt]:>11}  {summary['after'][prompt]:>5}")
    say(f"\nall together {summary['share']:.0%} after LoRA")
    say(f"pictures  {summary['sheet']}  (a row per prompt: the upper half before LoRA, the lower after)")
    say(f"report    {summary['report']}")
    say(f"adapter   {folder / 'lora' / 'adapter' / 'pytorch_lora_weights.safetensors'}  on  {folder / BASE}")
    say(f'draw      isotype sample {folder / "lora"} "a blue {NEW}"')
    say(f"again     isotype train {folder / LORA} run.folder=runs/mine images.train=YOUR_PICTURES")


def _full_yaml(folder: Path, size: Size, preset: str) -> str:
    return _yaml(
        "Every weight of a small Flux, from random ones.",
        folder, "full", PIPELINE, f"train: {quoted(folder / PICTURES / 'before')}", "kind: none", preset,
        steps=size.full_steps, batch=size.batch, learning_rate=2e-3,
    )  # fmt: skip


def _lora_yaml(folder: Path, size: Size, preset: str) -> str:
    images = f"""\
train: [{{name: {quoted(folder / PICTURES / "new")}, repeats: {_REPEATS}}}]
  regularisation: {quoted(folder / PICTURES / "before")}"""
    return _yaml(
        "An adapter on the model that full.yaml makes; put your own pictures into images.train to teach it something else.",
        folder, "lora", BASE, images, "kind: lora\n  r: 64\n  alpha: 64", {"bf16-mixed": "bf16-lora"}.get(preset, preset),
        steps=size.lora_steps, batch=size.batch, learning_rate=3e-3,
    )  # fmt: skip


def _yaml(
    title: str, folder: Path, run: str, model: str, images: str, adapter: str, preset: str, *, steps: int, batch: int, learning_rate: float
) -> str:
    """The file of one stage. `model` and `run` are folders in `folder`; `images` and `adapter` are lines of their sections."""
    quarter = max(1, steps // 4)
    return f"""\
# {title}
model:
  name: {quoted(folder / model)}
images:
  {images}
  resolution: {SIDE}
  cache: {quoted(folder / "cache")}
diffusion:
  max_text_length: {_TEXT_TOKENS}
adapter:
  {adapter}
precision:
  preset: {preset}
train:
  steps: {steps}
  batch_size: {batch}
  learning_rate: {learning_rate}
  beta2: 0.99
  eval_every: {quarter}
run:
  folder: {quoted(folder / run)}
  samples: [{", ".join(ASKED)}]
  sample_every: {quarter}
  sample_steps: {_DRAWN_STEPS}
  log_every: 10
  keep: 1
"""
