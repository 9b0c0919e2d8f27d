"""A Flux pipeline for two CPU cores: a VAE trained on drawn shapes, text encoders and a transformer with random weights."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from .shapes import COLOURS, SHAPES, SIDE, at_random

WORDS = ("<pad>", "</s>", "<unk>", "a", *SHAPES, *COLOURS)
TEXT_LENGTH = 6  # tokens of a caption, padded
CLIP_WIDTH, T5_WIDTH = 32, 64


def pipeline(folder: Path, *, heads: int = 4, joint: int = 2, single: int = 2, vae_steps: int = 600, seed: int = 0) -> float:
    """Saves the pipeline; returns the VAE's last error, the mean absolute difference of pixels in [-1, 1]."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        vae, error = trained_vae(vae_steps, seed=seed)
        transformer = FluxTransformer2DModel(
            patch_size=1, in_channels=4 * vae.config.latent_channels, num_layers=joint, num_single_layers=single, attention_head_dim=32,
            num_attention_heads=heads, joint_attention_dim=T5_WIDTH, pooled_projection_dim=CLIP_WIDTH, guidance_embeds=False,
            axes_dims_rope=(8, 12, 12),
        )  # fmt: skip
        made: Any = FluxPipeline(
            transformer=transformer, vae=vae, scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0), text_encoder=_clip(),
            tokenizer=_tokenizer(), text_encoder_2=_t5(), tokenizer_2=_tokenizer(),
        )  # fmt: skip
        made.save_pretrained(folder)
    return error


def trained_vae(steps: int, *, seed: int) -> tuple[Any, float]:
    """An AutoencoderKL whose latents of shapes have mean 0 and deviation 1 after its own shift and scale, and its last error."""
    from diffusers import AutoencoderKL

    vae: Any = AutoencoderKL(
        in_channels=3, out_channels=3, latent_channels=4, block_out_channels=(16, 32, 32), layers_per_block=1, norm_num_groups=8,
        down_block_types=("DownEncoderBlock2D",) * 3, up_block_types=("UpDecoderBlock2D",) * 3, sample_size=SIDE,
        use_quant_conv=False, use_post_quant_conv=False, mid_block_add_attention=False,
    )  # fmt: skip
    draw = random.Random(seed)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=2e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    error = 0.0
    for _ in range(steps):
        x_NCHW = _shapes(16, draw)
        posterior = vae.encode(x_NCHW).latent_dist
        made = vae.decode(posterior.sample()).sample
        difference = (made - x_NCHW).abs().mean()
        (difference + 1e-3 * posterior.kl().mean() / posterior.mean[0].numel()).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        error = float(difference.detach())
    vae.requires_grad_(False)
    latents = vae.encode(_shapes(128, draw)).latent_dist.mean
    vae.register_to_config(scaling_factor=float(1 / latents.std()), shift_factor=float(latents.mean()))
    return vae, error


def _shapes(count: int, draw: random.Random) -> torch.Tensor:
    """fp32[count 3 SIDE SIDE] in [-1, 1]."""
    import numpy as np

    images = [at_random(draw.choice(SHAPES), draw.choice(list(COLOURS)), draw).image() for _ in range(count)]
    return torch.from_numpy(np.stack([np.array(image) for image in images])).permute(0, 3, 1, 2).float() / 127.5 - 1


def _tokenizer() -> Any:
    """Each word is one token."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = Whitespace()
    inner.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=TEXT_LENGTH
    )


def _clip() -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel

    return CLIPTextModel(CLIPTextConfig(
        vocab_size=len(WORDS), hidden_size=CLIP_WIDTH, intermediate_size=2 * CLIP_WIDTH, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=TEXT_LENGTH, projection_dim=CLIP_WIDTH, eos_token_id=1, bos_token_id=0, pad_token_id=0,
    ))  # fmt: skip


def _t5() -> Any:
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(T5Config(vocab_size=len(WORDS), d_model=T5_WIDTH, d_kv=16, d_ff=T5_WIDTH, num_layers=1, num_heads=4))
