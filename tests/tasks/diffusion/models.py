"""Tiny pipelines of each family from configurations, saved as folders, and drawn pictures with
captions. Random weights.
"""

import json
from pathlib import Path

import diffusers
import pytest
import torch
import transformers
from benchmarks.diffusion_matrix import sd3 as sd3_transformer
from benchmarks.diffusion_matrix import sdxl as sdxl_unet
from PIL import Image, ImageDraw
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from isotype.errors import UsageError
from isotype.tasks.choose import choose_task
from tests.api import prepare_data, refuse_incomplete, save_lora

SHAPES, COLOURS = ("circle", "square"), {"red": (220, 40, 40), "green": (40, 180, 60)}
SIDE = 32
WORDS = ("<pad>", "</s>", "<unk>", "a", "on", "white", *SHAPES, *COLOURS)
WIDTH = 16


def tokenizer(length: int) -> transformers.PreTrainedTokenizerFast:
    inner = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = Whitespace()
    inner.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=length,
    )


def clip(*, projection: bool) -> torch.nn.Module:
    config = transformers.CLIPTextConfig(
        vocab_size=len(WORDS), hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=8, projection_dim=WIDTH, eos_token_id=1, bos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return (transformers.CLIPTextModelWithProjection if projection else transformers.CLIPTextModel)(
        config
    )


def t5() -> transformers.T5EncoderModel:
    return transformers.T5EncoderModel(
        transformers.T5Config(
            vocab_size=len(WORDS), d_model=2 * WIDTH, d_kv=8, d_ff=24, num_layers=1, num_heads=2
        )
    )


def vae(channels: int, *, stages: int = 3) -> diffusers.AutoencoderKL:
    return diffusers.AutoencoderKL(
        in_channels=3, out_channels=3, latent_channels=channels, block_out_channels=(8,) * stages, layers_per_block=1, norm_num_groups=4,
        down_block_types=("DownEncoderBlock2D",) * stages, up_block_types=("UpDecoderBlock2D",) * stages, sample_size=SIDE,
        use_quant_conv=False, use_post_quant_conv=False, scaling_factor=1.5, shift_factor=0.1,
    )  # fmt: skip


def flux_transformer(*, guidance: bool = False) -> diffusers.FluxTransformer2DModel:
    return diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=2 * WIDTH, pooled_projection_dim=WIDTH, guidance_embeds=guidance, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip


def sd3(folder: Path) -> Path:
    torch.manual_seed(0)
    diffusers.StableDiffusion3Pipeline(
        transformer=sd3_transformer(), scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0), vae=vae(4),
        text_encoder=clip(projection=True), tokenizer=tokenizer(8), text_encoder_2=clip(projection=True), tokenizer_2=tokenizer(8),
        text_encoder_3=t5(), tokenizer_3=tokenizer(8),
    ).save_pretrained(folder)  # fmt: skip
    return folder


def flux(folder: Path) -> Path:
    torch.manual_seed(0)
    diffusers.FluxPipeline(
        transformer=flux_transformer(), vae=vae(4),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15),
        text_encoder=clip(projection=False), tokenizer=tokenizer(8), text_encoder_2=t5(), tokenizer_2=tokenizer(8),
    ).save_pretrained(folder)  # fmt: skip
    return folder


def pixart_transformer() -> diffusers.PixArtTransformer2DModel:
    """With 128 latent pixels in its configuration PixArt is told the picture's size."""
    return diffusers.PixArtTransformer2DModel(
        num_attention_heads=3, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=2, cross_attention_dim=24, sample_size=128,
        caption_channels=2 * WIDTH,
    )  # fmt: skip


def pixart(folder: Path) -> Path:
    torch.manual_seed(0)
    diffusers.PixArtAlphaPipeline(
        transformer=pixart_transformer(), vae=vae(4), text_encoder=t5(), tokenizer=tokenizer(8),
        scheduler=diffusers.DPMSolverMultistepScheduler(beta_start=0.0001, beta_end=0.02, beta_schedule="linear"),
    ).save_pretrained(folder)  # fmt: skip
    return folder


def sdxl(folder: Path, *, prediction: str = "epsilon") -> Path:
    torch.manual_seed(0)
    settings = {
        "beta_start": 0.00085,
        "beta_end": 0.012,
        "beta_schedule": "scaled_linear",
        "prediction_type": prediction,
    }
    diffusers.StableDiffusionXLPipeline(
        unet=sdxl_unet(), vae=vae(4), scheduler=diffusers.EulerDiscreteScheduler(**settings),
        text_encoder=clip(projection=False), tokenizer=tokenizer(8), text_encoder_2=clip(projection=True), tokenizer_2=tokenizer(8),
        force_zeros_for_empty_prompt=True, add_watermarker=False,
    ).save_pretrained(folder)  # fmt: skip
    return folder


def sdxl_v(folder: Path) -> Path:
    return sdxl(folder, prediction="v_prediction")


def draw(shape: str, colour: str, shift: int = 0) -> Image.Image:
    picture = Image.new("RGB", (SIDE, SIDE), "white")
    box = (6 + shift, 6, 26 + shift, 26)
    canvas = ImageDraw.Draw(picture)
    (canvas.ellipse if shape == "circle" else canvas.rectangle)(box, fill=COLOURS[colour])
    return picture


def pictures(folder: Path) -> Path:
    """A picture with its .txt for every shape, colour and shift."""
    folder.mkdir(parents=True, exist_ok=True)
    for shape in SHAPES:
        for colour in COLOURS:
            for shift in range(3):
                draw(shape, colour, shift).save(folder / f"{colour}_{shape}_{shift}.png")
                (folder / f"{colour}_{shape}_{shift}.txt").write_text(
                    f"a {colour} {shape} on white\n"
                )
    return folder


def pairs(folder: Path) -> Path:
    """`after`: pictures with an instruction each; `before`: those that they were made from;
    `rows.jsonl` names both.
    """
    rows = []
    for part in ("after", "before"):
        (folder / part).mkdir(parents=True)
    for shape in SHAPES:
        for shift in range(4):
            name = f"{shape}_{shift}"
            draw(shape, "red", shift).save(folder / f"before/{name}.png")
            draw(shape, "green", shift).save(folder / f"after/{name}.png")
            (folder / f"after/{name}.txt").write_text("green on white\n")
            rows.append(
                {
                    "source": f"before/{name}.png",
                    "edited_image": f"after/{name}.png",
                    "instruction": "green on white",
                }
            )
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def references(folder: Path) -> Path:
    """Pairs with a second picture before the edit, in `style`, which is wider than the others;
    `rows.jsonl` names all of them.
    """
    pairs(folder)
    (folder / "style").mkdir()
    rows = []
    for row in map(json.loads, (folder / "rows.jsonl").read_text().splitlines()):
        name = Path(row["source"]).name
        draw("circle", "red", 1).resize((64, 32)).save(folder / "style" / name)
        rows.append(row | {"source": [row["source"], f"style/{name}"]})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def refused(loaded) -> str:
    """The message of what a run cannot begin with."""
    try:
        refuse_incomplete(loaded)
        prepare_data(choose_task(loaded.config), loaded.sources)
    except UsageError as error:
        return error.message
    pytest.fail("it was not refused")


def encoded(loaded):
    """The task of a configuration, its pictures and captions encoded."""
    task = choose_task(loaded.config)
    task.encode(prepare_data(task, loaded.sources).device)
    return task


def built(loaded, folder: Path):
    """The same, and its model."""
    task = encoded(loaded)
    return task, task.build_model(task.run.precision, torch.device("cpu"), folder)[0]


def with_adapter(loaded, folder: Path, *, rows: int):
    """The task of a configuration, its model in training with random numbers in its adapter, which
    is saved in `folder`, and a batch.
    """
    task, model = built(loaded, folder)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
    model.train()
    save_lora(model, folder, task.run.precision, task.run.folder)
    return task, model, task.collate(task.feed().take(rows))
