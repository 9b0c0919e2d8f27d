"""`isotype quickstart --diffusion` trains a small Flux to draw shapes, then trains LoRA on a new
shape. It needs no network.

The folder holds everything that is needed to repeat this by hand: the pictures, the pipeline, and
the files `full.yaml` and `lora.yaml` for `isotype train`.
"""

from __future__ import annotations

import io
import math
import random
import shutil
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .stages import Stage, run_quickstart

SIDE = 32  # pixels
SHAPES = ("circle", "square", "triangle", "cross")
COLOURS = {
    "red": (215, 40, 40),
    "green": (40, 165, 60),
    "blue": (45, 70, 210),
    "yellow": (240, 200, 30),
}
_CROSS_ARM_WIDTH = 0.3  # half the width of an arm, in the coordinates of _OUTLINES
# shape -> polygons with coordinates from -1 to 1; y increases downwards
_OUTLINES: dict[str, list[list[tuple[float, float]]]] = {
    "circle": [[(math.cos(k * math.pi / 32), math.sin(k * math.pi / 32)) for k in range(64)]],
    "square": [[(-1, -1), (1, -1), (1, 1), (-1, 1)]],
    "triangle": [[(0, -1), (1, 1), (-1, 1)]],
    "cross": [
        [
            (-1, -_CROSS_ARM_WIDTH),
            (1, -_CROSS_ARM_WIDTH),
            (1, _CROSS_ARM_WIDTH),
            (-1, _CROSS_ARM_WIDTH),
        ],
        [
            (-_CROSS_ARM_WIDTH, -1),
            (_CROSS_ARM_WIDTH, -1),
            (_CROSS_ARM_WIDTH, 1),
            (-_CROSS_ARM_WIDTH, 1),
        ],
    ],
}
_OVERSAMPLING = 4  # pictures are drawn this much larger and scaled down, for smooth edges
# If a larger share of pixels differs from the template, the picture shows no shape.
MAX_DISTANCE = 0.3
MAX_COLOUR_DIFFERENCE = (
    50  # of 255; the maximum mean difference of the shape's pixels from its colour
)
_SHAPE_THRESHOLD = (
    0.35  # the threshold for a pixel of the shape, between white (0) and the colour (1)
)
VOCABULARY = ("<pad>", "</s>", "<unk>", "a", *SHAPES, *COLOURS)
TEXT_LENGTH = 6  # tokens of a caption, padded
CLIP_WIDTH = 32  # hidden size of the CLIP text encoder
T5_WIDTH = 64  # hidden size of the T5 text encoder


def draw(
    shape: str,
    colour: str,
    middle: tuple[float, float] = (SIDE / 2, SIDE / 2),
    radius: float = 10.0,
) -> Any:
    """Draws a shape as a PIL image in RGB. `radius` is half the side of the shape's bounding box,
    in pixels.
    """
    from PIL import Image, ImageDraw

    canvas = Image.new("RGB", (SIDE * _OVERSAMPLING, SIDE * _OVERSAMPLING), "white")
    for polygon in _OUTLINES[shape]:
        points = [
            tuple((m + radius * c) * _OVERSAMPLING for m, c in zip(middle, point))
            for point in polygon
        ]
        ImageDraw.Draw(canvas).polygon(points, fill=COLOURS[colour])
    return canvas.resize((SIDE, SIDE), Image.Resampling.BOX)


def draw_at_random(shape: str, colour: str, rng: random.Random) -> Any:
    """Draws the shape at a random place and in a random size, so that all of it is visible."""
    radius = rng.uniform(8.5, 11.5)
    max_offset = SIDE / 2 - radius - 1
    x, y = (SIDE / 2 + rng.uniform(-max_offset, max_offset) for _ in range(2))
    return draw(shape, colour, (x, y), radius)


def write_pictures(folder: Path, shapes: Iterable[str], *, count_each: int, seed: int) -> int:
    """Writes `count_each` pictures of every shape in every colour, each with its caption in a .txt file.
    Returns the number of pictures.
    """
    rng = random.Random(seed)
    names = [
        (shape, colour, k) for shape in shapes for colour in COLOURS for k in range(count_each)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    for shape, colour, k in names:
        draw_at_random(shape, colour, rng).save(folder / f"{colour}_{shape}_{k}.png")
        (folder / f"{colour}_{shape}_{k}.txt").write_text(f"a {colour} {shape}\n", encoding="utf-8")
    return len(names)


def classify_picture(picture_HWC: NDArray[np.uint8]) -> str:
    """Returns a description of the shape in a picture, such as `a red circle`, or `no shape`. The
    shape is found by comparing the picture with a template of each shape. The colour is the one
    that is nearest to the mean colour of the shape's pixels.

    picture_HWC  uint8[SIDE SIDE 3]
    """
    pixels = picture_HWC.astype(np.float64)
    distance_from_white = np.abs(255.0 - pixels).max(-1)  # the difference from white
    shape_pixels = pixels[distance_from_white > 128]
    if len(shape_pixels) < 30:
        return "no shape"
    colour = min(
        COLOURS, key=lambda name: float(np.square(shape_pixels.mean(0) - COLOURS[name]).sum())
    )
    if np.abs(shape_pixels - COLOURS[colour]).mean() > MAX_COLOUR_DIFFERENCE:
        return "no shape"
    shape_mask = (
        np.clip(distance_from_white / np.abs(255.0 - np.array(COLOURS[colour])).max(), 0, 1)
        > _SHAPE_THRESHOLD
    )
    rows, columns = np.nonzero(shape_mask)
    middle = ((columns.min() + columns.max() + 1) / 2, (rows.min() + rows.max() + 1) / 2)
    radius = max(np.ptp(columns) + 1, np.ptp(rows) + 1) / 2
    # smooth edges enlarge the bounding box of the shape a little
    templates = {
        (shape, growth): _template(shape, middle, radius + growth)
        for shape in SHAPES
        for growth in (-1.0, -0.5, 0.0)
    }
    # 1 - intersection over union
    distance, shape = min(
        (1.0 - float((shape_mask & template).sum()) / float((shape_mask | template).sum()), shape)
        for (shape, _), template in templates.items()
    )
    if distance <= MAX_DISTANCE:
        return f"a {colour} {shape}"
    return "no shape"


@cache
def _template(shape: str, middle: tuple[float, float], radius: float) -> NDArray[np.bool_]:
    grey_values = np.asarray(
        draw(shape, "red", middle, max(1.0, radius)).convert("L"), dtype=np.float64
    )
    return np.asarray(grey_values < 255 - _SHAPE_THRESHOLD * (255 - grey_values.min()))


def write_pipeline(folder: Path, *, vae_steps: int, seed: int = 0) -> float:
    """Saves a Flux pipeline with random weights and a VAE that is trained on shapes. Returns the
    mean error of the VAE over pixels in [-1, 1].
    """
    import torch
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        vae, error = _train_vae(vae_steps, random.Random(seed))
        transformer = FluxTransformer2DModel(
            patch_size=1,
            in_channels=4 * vae.config.latent_channels,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=32,
            num_attention_heads=4,
            joint_attention_dim=T5_WIDTH,
            pooled_projection_dim=CLIP_WIDTH,
            guidance_embeds=False,
            axes_dims_rope=(8, 12, 12),
        )
        clip = CLIPTextConfig(
            vocab_size=len(VOCABULARY),
            hidden_size=CLIP_WIDTH,
            intermediate_size=2 * CLIP_WIDTH,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=TEXT_LENGTH,
            projection_dim=CLIP_WIDTH,
            eos_token_id=1,
            bos_token_id=0,
            pad_token_id=0,
        )
        t5 = T5Config(
            vocab_size=len(VOCABULARY),
            d_model=T5_WIDTH,
            d_kv=16,
            d_ff=T5_WIDTH,
            num_layers=1,
            num_heads=4,
        )
        pipeline: Any = FluxPipeline(
            transformer=transformer,
            vae=vae,
            scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
            text_encoder=CLIPTextModel(clip),
            tokenizer=_build_tokenizer(),
            text_encoder_2=T5EncoderModel(t5),
            tokenizer_2=_build_tokenizer(),
        )
        pipeline.save_pretrained(folder)
    return error


def _train_vae(steps: int, rng: random.Random) -> tuple[Any, float]:
    """Trains an AutoencoderKL on shapes. Its shift and scale factors are set so that the latents
    have mean 0 and standard deviation 1. Returns the VAE and its last error.
    """
    import torch
    from diffusers import AutoencoderKL

    vae: Any = AutoencoderKL(
        in_channels=3,
        out_channels=3,
        latent_channels=4,
        block_out_channels=(16, 32, 32),
        layers_per_block=1,
        norm_num_groups=8,
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        sample_size=SIDE,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
    )

    def draw_random_shapes(count: int) -> torch.Tensor:
        """Draws random shapes as fp32[count 3 SIDE SIDE] in [-1, 1]."""
        images = [
            np.array(draw_at_random(rng.choice(SHAPES), rng.choice(list(COLOURS)), rng))
            for _ in range(count)
        ]
        return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 127.5 - 1

    optimizer = torch.optim.AdamW(vae.parameters(), lr=2e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    error = 0.0
    for _ in range(steps):
        x_NCHW = draw_random_shapes(16)
        posterior = vae.encode(x_NCHW).latent_dist
        difference = (vae.decode(posterior.sample()).sample - x_NCHW).abs().mean()
        (difference + 1e-3 * posterior.kl().mean() / posterior.mean[0].numel()).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        error = float(difference.detach())
    vae.requires_grad_(False)
    latents = vae.encode(draw_random_shapes(128)).latent_dist.mean
    vae.register_to_config(
        scaling_factor=float(1 / latents.std()), shift_factor=float(latents.mean())
    )
    return vae, error


def _build_tokenizer() -> Any:
    """Builds a tokenizer in which each word is one token."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(WordLevel({text: i for i, text in enumerate(VOCABULARY)}, unk_token="<unk>"))
    inner.pre_tokenizer = Whitespace()
    inner.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    special_tokens = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, model_max_length=TEXT_LENGTH, **special_tokens
    )


PRETRAINED_SHAPES = ("circle", "square", "triangle")
NEW_SHAPE = "cross"
SAMPLE_PROMPTS = ("a red circle", "a green square", "a blue triangle", "a yellow cross")
PIPELINE = "flux"
BASE = "base"
PICTURES = "pictures"
OVERVIEW_FILE = "drawn.png"
STAGES = (
    Stage(
        "full",
        f"every weight, on pictures of {', '.join(PRETRAINED_SHAPES)}",
        2000,
        seconds=140,
        min_steps=100,
    ),
    Stage(
        "lora",
        f"LoRA on pictures of a {NEW_SHAPE}, new to that model; the others keep it from forgetting",
        900,
        seconds=70,
        min_steps=50,
    ),
)


def quickstart_pictures(
    folder: Path,
    *,
    step_share: float = 1.0,
    vae_steps: int = 300,
    draws: int = 10,
    json_output: bool = False,
) -> int:
    """Calls `run_quickstart`. At the end it draws pictures for the prompts and checks them.

    draws  the number of pictures per prompt at the end
    """
    from ..tasks.diffusion.pipeline import require_diffusers
    from ..training.console import quiet_libraries

    require_diffusers()
    # transformers names packages that no model of the quickstart needs
    quiet_libraries()
    return run_quickstart(
        folder,
        "isotype quickstart --diffusion",
        STAGES,
        (PIPELINE, PICTURES),
        write_inputs=lambda: _write_inputs(folder, vae_steps),
        step_share=step_share,
        json_output=json_output,
        prepare_second_stage=lambda: _make_base(folder),
        summarise=lambda: judge_runs(folder, draws=draws),
        print_summary=lambda summary: _print_summary(folder, summary),
    )


def judge_runs(folder: Path, *, draws: int) -> dict[str, Any]:
    """Draws `draws` pictures per prompt with each run. Returns the numbers of correct pictures by
    prompt, before and after LoRA, and writes one image that shows all pictures.
    """
    from PIL import Image

    from ..inference.diffusion import draw_pictures

    print("\ndrawing and judging, by the pixels alone")
    correct_counts: dict[str, dict[str, int]] = {}
    cell_size = SIDE + 2
    overview = Image.new(
        "RGB", (cell_size * draws, cell_size * 2 * len(SAMPLE_PROMPTS)), (200, 200, 200)
    )
    for i, stage in enumerate(STAGES):
        _, pictures = draw_pictures(
            folder / stage.name, [prompt for prompt in SAMPLE_PROMPTS for _ in range(draws)]
        )
        correct_counts[stage.name] = dict.fromkeys(SAMPLE_PROMPTS, 0)
        for j, picture in enumerate(pictures):
            image = Image.open(io.BytesIO(picture.content)).convert("RGB")
            correct_counts[stage.name][picture.prompt] += (
                classify_picture(np.array(image)) == picture.prompt
            )
            overview.paste(
                image, (cell_size * (j % draws), cell_size * (i * len(SAMPLE_PROMPTS) + j // draws))
            )
    overview.resize((2 * overview.width, 2 * overview.height), Image.Resampling.NEAREST).save(
        folder / OVERVIEW_FILE
    )
    return {
        "before": correct_counts["full"],
        "after": correct_counts["lora"],
        "draws": draws,
        "share": sum(correct_counts["lora"].values()) / (draws * len(SAMPLE_PROMPTS)),
        "sheet": str(folder / OVERVIEW_FILE),
        "report": str(folder / "lora" / "report.html"),
    }


def _write_inputs(folder: Path, vae_steps: int) -> None:
    count = write_pictures(folder / PICTURES / "before", PRETRAINED_SHAPES, count_each=32, seed=1)
    count += write_pictures(folder / PICTURES / "new", (NEW_SHAPE,), count_each=32, seed=2)
    print(
        f"pictures  {count} of {len(PRETRAINED_SHAPES) + 1} shapes in {len(COLOURS)} colours, {SIDE} x {SIDE}"
        " pixels, each with a caption"
    )
    error = write_pipeline(folder / PIPELINE, vae_steps=vae_steps)
    print(
        "pipeline  a Flux with random weights; its VAE trained on such shapes: pixels off by"
        f" {error / 2:.1%}"
    )


def _make_base(folder: Path) -> None:
    """Copies the pipeline with the trained transformer instead of the random one."""
    temporary = folder / f".{BASE}"
    if (folder / BASE).is_dir():
        return
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(folder / PIPELINE, temporary, ignore=shutil.ignore_patterns("transformer"))
    (temporary / "transformer").mkdir()
    for name in ("config.json", "diffusion_pytorch_model.safetensors"):
        shutil.copy(folder / "full" / "model" / name, temporary / "transformer" / name)
    temporary.rename(folder / BASE)


def _print_summary(folder: Path, summary: dict[str, Any]) -> None:
    print(f"\nright of {summary['draws']} pictures      before LoRA  after")
    for prompt in SAMPLE_PROMPTS:
        print(f"  {prompt:<20}  {summary['before'][prompt]:>11}  {summary['after'][prompt]:>5}")
    print(f"\nall together {summary['share']:.0%} after LoRA")
    print(
        f"pictures  {summary['sheet']}  (a row per prompt: the upper half before LoRA, the lower"
        " after)"
    )
    print(f"report    {summary['report']}")
    print(
        f"adapter   {folder / 'lora' / 'adapter' / 'pytorch_lora_weights.safetensors'}  on "
        f" {folder / BASE}"
    )
    print(f'draw      isotype sample {folder / "lora"} "a blue {NEW_SHAPE}"')
    print(
        f"again     isotype train {folder / 'lora.yaml'} run.folder=runs/mine"
        " images.train=YOUR_PICTURES"
    )
