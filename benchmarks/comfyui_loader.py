"""Loads the LoRA files that Isotype writes for ComfyUI with ComfyUI's own loader, for every family.

    python benchmarks/comfyui_loader.py FOLDER_OF_COMFYUI [PIPELINE ...]

For each family, the script adapts a tiny diffusers denoiser with random matrices, writes the file
for ComfyUI, builds ComfyUI's model of the same sizes, and loads the file with ComfyUI's own code
(`model_lora_keys_unet`, `model_lora_keys_clip`, `load_lora`, `calculate_weight`). The changes of the
weights are then translated to diffusers' names, with diffusers' converter of single files, or with
ComfyUI's converter of diffusers' files. ComfyUI must load every tensor of the file, each change must
be the change in PEFT, and no other weight may change. No converter knows the fused queries, keys and
values of Ideogram 4, so the outputs of its two denoisers are compared.

The script runs on a CPU. It needs the packages in ComfyUI's requirements.txt.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import diffusers
import torch
import transformers
from diffusers.loaders import single_file_utils
from peft import LoKrConfig, LoraConfig, PeftConfig, PeftModel, get_peft_model
from safetensors import safe_open
from torch import Tensor, nn

from isotype.tasks.diffusion.families import FAMILIES, Conditioning, Family
from isotype.tasks.diffusion.result import write_comfyui
from isotype.tasks.diffusion.text_encoders import encoder_targets

# packages that ComfyUI imports with its models; loading a LoRA does not need them
UNNEEDED = (
    "torchvision",
    "torchvision.ops",
    "torchvision.transforms",
    "torchvision.transforms.functional",
    "torchaudio",
    "torchaudio.functional",
    "torchaudio.transforms",
)
# ComfyUI's messages about a tensor of a file that has no effect
UNREAD = re.compile("not loaded|ERROR lora|failed", re.IGNORECASE)
RANK = 4
LARGEST_DIFFERENCE = 1e-6
CLIP = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 77,
    "vocab_size": 49408,
    "hidden_act": "quick_gelu",
    "eos_token_id": 49407,
    "projection_dim": 16,
}

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A tiny denoiser of one pipeline in diffusers and in ComfyUI.

    denoiser      the class in diffusers, and its settings
    model         the class in ComfyUI's supported_models.py, and its settings
    to_diffusers  diffusers' function that converts a checkpoint of ComfyUI, or a value of
                  `to_diffusers`; empty if ComfyUI's `convert_diffusers_mmdit` converts a checkpoint
                  of diffusers instead
    encoders      the names of CLIP's text encoders in ComfyUI, by their names in the pipeline
    """

    denoiser: tuple[str, dict[str, Any]]
    model: tuple[str, dict[str, Any]]
    to_diffusers: str = ""
    encoders: Mapping[str, str] = field(default_factory=dict)


FLUX = {
    "in_channels": 4,
    "out_channels": 4,
    "vec_in_dim": 16,
    "context_in_dim": 32,
    "hidden_size": 32,
    "mlp_ratio": 4.0,
    "num_heads": 2,
    "depth": 2,
    "depth_single_blocks": 2,
    "axes_dim": [4, 6, 6],
    "theta": 10000,
    "patch_size": 2,
    "qkv_bias": True,
    "guidance_embed": True,
    "txt_ids_dims": [],
    "image_model": "flux",
}
BLOCKS = {
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
}
FLUX_TRANSFORMER = {
    **BLOCKS,
    "in_channels": 16,
    "joint_attention_dim": 32,
    "pooled_projection_dim": 16,
    "guidance_embeds": True,
    "axes_dims_rope": (4, 6, 6),
}
FLUX2_TRANSFORMER = {
    **BLOCKS,
    "in_channels": 16,
    "joint_attention_dim": 96,
    "axes_dims_rope": (4, 4, 4, 4),
    "timestep_guidance_channels": 256,
}
FLUX2 = {
    **FLUX,
    "image_model": "flux2",
    "in_channels": 16,
    "out_channels": 16,
    "vec_in_dim": None,
    "context_in_dim": 96,
    "mlp_ratio": 3.0,
    "axes_dim": [4, 4, 4, 4],
    "theta": 2000,
    "patch_size": 1,
    "qkv_bias": False,
    "global_modulation": True,
    "mlp_silu_act": True,
    "ops_bias": False,
    "txt_ids_dims": [3],
}
QWEN = (
    "QwenImageTransformer2DModel",
    {
        "in_channels": 16,
        "out_channels": 4,
        "num_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 32,
        "axes_dims_rope": (4, 6, 6),
    },
)
COMFYUI_QWEN = ("QwenImage", {**QWEN[1], "image_model": "qwen_image"})
UNET = {
    "block_out_channels": (64, 128),
    "layers_per_block": 1,
    "in_channels": 4,
    "out_channels": 4,
    "norm_num_groups": 32,
}
COMFYUI_UNET = {
    "in_channels": 4,
    "out_channels": 4,
    "model_channels": 64,
    "num_res_blocks": [1, 1],
    "channel_mult": (1, 2),
    "use_spatial_transformer": True,
    "legacy": False,
    "image_size": 32,
    "use_temporal_attention": False,
    "use_temporal_resblock": False,
}
HIDREAM = {
    **BLOCKS,
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 4,
    "caption_channels": [32, 32],
    "text_emb_dim": 32,
    "num_routed_experts": 2,
    "num_activated_experts": 2,
    "axes_dims_rope": (8, 4, 4),
    "max_resolution": (16, 16),
    "llama_layers": [0, 1],
}
PIXART = {  # the converter knows only this width
    "num_attention_heads": 16,
    "attention_head_dim": 72,
    "in_channels": 4,
    "out_channels": 8,
    "num_layers": 2,
    "cross_attention_dim": 1152,
    "caption_channels": 24,
}
COMFYUI_PIXART = {
    "input_size": 32,
    "patch_size": 2,
    "in_channels": 4,
    "hidden_size": 1152,
    "depth": 2,
    "num_heads": 16,
    "caption_channels": 24,
    "pe_interpolation": 1,
}
LTX2 = {
    "in_channels": 4,
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "cross_attention_dim": 32,
    "caption_channels": 32,
    "audio_in_channels": 8,
    "audio_out_channels": 8,
    "audio_num_attention_heads": 2,
    "audio_attention_head_dim": 8,
    "audio_cross_attention_dim": 16,
}
CASES: dict[str, Case] = {
    "FluxPipeline": Case(("FluxTransformer2DModel", FLUX_TRANSFORMER), ("Flux", FLUX)),
    "FluxKontextPipeline": Case(("FluxTransformer2DModel", FLUX_TRANSFORMER), ("Flux", FLUX)),
    "Flux2Pipeline": Case(
        ("Flux2Transformer2DModel", FLUX2_TRANSFORMER | {"guidance_embeds": True}),
        ("Flux2", FLUX2),
        "convert_flux2_transformer_checkpoint_to_diffusers",
    ),
    "Flux2KleinPipeline": Case(
        ("Flux2Transformer2DModel", FLUX2_TRANSFORMER | {"guidance_embeds": False}),
        ("Flux2", FLUX2 | {"guidance_embed": False}),
        "convert_flux2_transformer_checkpoint_to_diffusers",
    ),
    "QwenImagePipeline": Case(QWEN, COMFYUI_QWEN, "same"),
    "QwenImageEditPipeline": Case(QWEN, COMFYUI_QWEN, "same"),
    "QwenImageEditPlusPipeline": Case(QWEN, COMFYUI_QWEN, "same"),
    "ZImagePipeline": Case(
        (
            "ZImageTransformer2DModel",
            {
                "in_channels": 4,
                "dim": 32,
                "n_layers": 2,
                "n_refiner_layers": 2,
                "n_heads": 2,
                "n_kv_heads": 2,
                "cap_feat_dim": 32,
                "axes_dims": [4, 6, 6],
                "axes_lens": [64, 32, 32],
            },
        ),
        (
            "ZImage",
            {
                "image_model": "lumina2",
                "patch_size": 2,
                "in_channels": 4,
                "dim": 32,
                "cap_feat_dim": 32,
                "n_layers": 2,
                "qk_norm": True,
                "n_refiner_layers": 2,
                "n_heads": 2,
                "n_kv_heads": 2,
                "axes_dims": [4, 6, 6],
                "axes_lens": [64, 32, 32],
                "rope_theta": 256.0,
                "ffn_dim_multiplier": 8.0 / 3.0,
                "z_image_modulation": True,
                "time_scale": 1000.0,
                "pad_tokens_multiple": 32,
                "multiple_of": 1,
            },
        ),
        "convert_z_image_transformer_checkpoint_to_diffusers",
    ),
    "ChromaPipeline": Case(
        (
            "ChromaTransformer2DModel",
            {
                **BLOCKS,
                "in_channels": 16,
                "joint_attention_dim": 32,
                "axes_dims_rope": (4, 6, 6),
                "approximator_num_channels": 8,
                "approximator_hidden_dim": 16,
                "approximator_layers": 1,
            },
        ),
        (
            "Chroma",
            {
                "image_model": "chroma",
                "in_channels": 16,
                "out_channels": 16,
                "context_in_dim": 32,
                "hidden_size": 32,
                "mlp_ratio": 4.0,
                "num_heads": 2,
                "depth": 2,
                "depth_single_blocks": 2,
                "axes_dim": [4, 6, 6],
                "theta": 10000,
                "patch_size": 2,
                "qkv_bias": True,
                "in_dim": 8,
                "out_dim": 32,
                "hidden_dim": 16,
                "n_layers": 1,
                "txt_ids_dims": [],
                "vec_in_dim": None,
            },
        ),
    ),
    "StableDiffusion3Pipeline": Case(
        (
            "SD3Transformer2DModel",
            {
                "sample_size": 8,
                "patch_size": 2,
                "in_channels": 4,
                "out_channels": 4,
                "num_layers": 2,
                "attention_head_dim": 64,
                "num_attention_heads": 2,
                "joint_attention_dim": 32,
                "caption_projection_dim": 128,
                "pooled_projection_dim": 32,
                "pos_embed_max_size": 8,
                "qk_norm": "rms_norm",
            },
        ),
        (
            "SD3",
            {
                "in_channels": 4,
                "patch_size": 2,
                "out_channels": 4,
                "depth": 2,
                "num_blocks": 2,
                "input_size": None,
                "adm_in_channels": 32,
                "context_embedder_config": {
                    "target": "torch.nn.Linear",
                    "params": {"in_features": 32, "out_features": 128},
                },
                "num_patches": 64,
                "pos_embed_max_size": 8,
                "qk_norm": "rms",
                "pos_embed_scaling_factor": None,
                "x_block_self_attn_layers": [],
            },
        ),
    ),
    "StableDiffusionXLPipeline": Case(
        (
            "UNet2DConditionModel",
            {
                **UNET,
                "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
                "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
                "attention_head_dim": (1, 2),
                "use_linear_projection": True,
                "addition_embed_type": "text_time",
                "addition_time_embed_dim": 8,
                "transformer_layers_per_block": (1, 2),
                "projection_class_embeddings_input_dim": 6 * 8 + 16,
                "cross_attention_dim": 32,
            },
        ),
        (
            "SDXL",
            {
                **COMFYUI_UNET,
                "num_classes": "sequential",
                "adm_in_channels": 6 * 8 + 16,
                "transformer_depth": [0, 2],
                "transformer_depth_output": [0, 0, 2, 2],
                "transformer_depth_middle": 2,
                "use_linear_in_transformer": True,
                "context_dim": 32,
                "num_head_channels": 64,
            },
        ),
        "unet",
        {"text_encoder": "clip_l", "text_encoder_2": "clip_g"},
    ),
    "StableDiffusionPipeline": Case(
        (
            "UNet2DConditionModel",
            {
                **UNET,
                "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
                "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
                "attention_head_dim": 4,
                "cross_attention_dim": 16,
            },
        ),
        (
            "SD15",
            {
                **COMFYUI_UNET,
                "adm_in_channels": None,
                "transformer_depth": [1, 0],
                "transformer_depth_output": [1, 1, 0, 0],
                "transformer_depth_middle": 1,
                "use_linear_in_transformer": False,
                "context_dim": 16,
                "num_heads": 4,
            },
        ),
        "unet",
        {"text_encoder": "clip_l"},
    ),
    "AuraFlowPipeline": Case(
        (
            "AuraFlowTransformer2DModel",
            {
                "sample_size": 8,
                "patch_size": 2,
                "in_channels": 4,
                "num_mmdit_layers": 2,
                "num_single_dit_layers": 2,
                "attention_head_dim": 8,
                "num_attention_heads": 4,
                "caption_projection_dim": 32,
                "joint_attention_dim": 32,
                "pos_embed_max_size": 64,
            },
        ),
        (
            "AuraFlow",
            {
                "in_channels": 4,
                "out_channels": 4,
                "dim": 32,
                "n_layers": 4,
                "n_double_layers": 2,
                "n_heads": 4,
                "global_conddim": 32,
                "cond_seq_dim": 32,
                "max_seq": 64,
            },
        ),
        "convert_auraflow_transformer_checkpoint_to_diffusers",
    ),
    "Lumina2Pipeline": Case(  # the converter knows only these sizes
        (
            "Lumina2Transformer2DModel",
            {
                "in_channels": 4,
                "hidden_size": 2304,
                "num_layers": 1,
                "num_refiner_layers": 1,
                "num_attention_heads": 24,
                "num_kv_heads": 8,
                "axes_dim_rope": (32, 32, 32),
                "axes_lens": (128, 32, 32),
                "cap_feat_dim": 32,
                "multiple_of": 32,
                "ffn_dim_multiplier": 0.25,
            },
        ),
        (
            "Lumina2",
            {
                "image_model": "lumina2",
                "patch_size": 2,
                "in_channels": 4,
                "dim": 2304,
                "cap_feat_dim": 32,
                "n_layers": 1,
                "n_refiner_layers": 1,
                "qk_norm": True,
                "n_heads": 24,
                "n_kv_heads": 8,
                "axes_dims": [32, 32, 32],
                "axes_lens": [128, 32, 32],
                "multiple_of": 32,
                "ffn_dim_multiplier": 1.0,
            },
        ),
        "convert_lumina2_to_diffusers",
    ),
    "HiDreamImagePipeline": Case(
        (
            "HiDreamImageTransformer2DModel",
            HIDREAM,
        ),
        (
            "HiDream",
            HIDREAM | {"image_model": "hidream"},
        ),
        "convert_hidream_transformer_to_diffusers",
    ),
    "PixArtAlphaPipeline": Case(
        ("PixArtTransformer2DModel", PIXART | {"sample_size": 128}),
        ("PixArtAlpha", COMFYUI_PIXART | {"image_model": "pixart_alpha", "micro_condition": False}),
    ),
    "PixArtSigmaPipeline": Case(
        ("PixArtTransformer2DModel", PIXART | {"sample_size": 32}),
        ("PixArtSigma", COMFYUI_PIXART | {"image_model": "pixart_sigma", "micro_condition": False}),
    ),
    "Krea2Pipeline": Case(
        (
            "Krea2Transformer2DModel",
            {
                "in_channels": 16,
                "num_layers": 2,
                "attention_head_dim": 16,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "intermediate_size": 128,
                "timestep_embed_dim": 256,
                "text_hidden_dim": 32,
                "num_text_layers": 2,
                "text_num_attention_heads": 2,
                "text_num_key_value_heads": 2,
                "text_intermediate_size": 128,
                "num_layerwise_text_blocks": 2,
                "num_refiner_text_blocks": 2,
                "axes_dims_rope": (4, 6, 6),
            },
        ),
        (
            "Krea2",
            {
                "image_model": "krea2",
                "features": 32,
                "channels": 4,
                "patch": 2,
                "layers": 2,
                "heads": 2,
                "kvheads": 1,
                "txtlayers": 2,
                "txtdim": 32,
                "txtheads": 2,
                "txtkvheads": 2,
            },
        ),
        "convert_krea2_transformer_checkpoint_to_diffusers",
    ),
    "ErnieImagePipeline": Case(
        (
            "ErnieImageTransformer2DModel",
            {
                "hidden_size": 32,
                "num_attention_heads": 2,
                "num_layers": 2,
                "ffn_hidden_size": 48,
                "in_channels": 16,
                "out_channels": 16,
                "text_in_dim": 24,
                "rope_axes_dim": (4, 6, 6),
            },
        ),
        (
            "ErnieImage",
            {
                "image_model": "ernie",
                "hidden_size": 32,
                "num_attention_heads": 2,
                "num_layers": 2,
                "ffn_hidden_size": 48,
                "in_channels": 16,
                "out_channels": 16,
                "text_in_dim": 24,
                "rope_axes_dim": (4, 6, 6),
            },
        ),
        "convert_ernie_image_transformer_checkpoint_to_diffusers",
    ),
    "Ideogram4Pipeline": Case(
        (
            "Ideogram4Transformer2DModel",
            {
                "in_channels": 16,
                "num_layers": 2,
                "attention_head_dim": 16,
                "num_attention_heads": 2,
                "intermediate_size": 32,
                "adaln_dim": 16,
                "llm_features_dim": 48,
                "mrope_section": (4, 2, 2),
            },
        ),
        (
            "Ideogram4",
            {
                "image_model": "ideogram4",
                "in_channels": 16,
                "num_layers": 2,
                "attention_head_dim": 16,
                "num_attention_heads": 2,
                "intermediate_size": 32,
                "adaln_dim": 16,
                "llm_features_dim": 48,
                "mrope_section": (4, 2, 2),
            },
        ),
        "ideogram4",
    ),
    "LongCatImagePipeline": Case(
        (
            "LongCatImageTransformer2DModel",
            {
                **BLOCKS,
                "in_channels": 16,
                "joint_attention_dim": 32,
                "pooled_projection_dim": 32,
                "axes_dims_rope": [4, 6, 6],
            },
        ),
        (
            "LongCatImage",
            FLUX | {"vec_in_dim": None, "guidance_embed": False, "txt_ids_dims": [1, 2]},
        ),
    ),
    "Kandinsky5T2IPipeline": Case(
        (
            "Kandinsky5Transformer3DModel",
            {
                "in_visual_dim": 4,
                "in_text_dim": 32,
                "in_text_dim2": 16,
                "time_dim": 16,
                "out_visual_dim": 4,
                "model_dim": 32,
                "ff_dim": 48,
                "num_text_blocks": 2,
                "num_visual_blocks": 2,
                "axes_dims": (4, 6, 6),
            },
        ),
        (
            "Kandinsky5Image",
            {
                "image_model": "kandinsky5",
                "in_visual_dim": 4,
                "in_text_dim": 32,
                "in_text_dim2": 16,
                "time_dim": 16,
                "out_visual_dim": 4,
                "model_dim": 32,
                "ff_dim": 48,
                "num_text_blocks": 2,
                "num_visual_blocks": 2,
                "axes_dims": (4, 6, 6),
                "visual_embed_dim": 16,
                "rope_scale_factor": (1.0, 1.0, 1.0),
            },
        ),
        "same",
    ),
    "WanPipeline": Case(
        (
            "WanTransformer3DModel",
            {
                "num_attention_heads": 2,
                "attention_head_dim": 12,
                "in_channels": 4,
                "out_channels": 4,
                "text_dim": 32,
                "freq_dim": 32,
                "ffn_dim": 32,
                "num_layers": 2,
            },
        ),
        (
            "WAN21_T2V",
            {
                "image_model": "wan2.1",
                "model_type": "t2v",
                "dim": 24,
                "in_dim": 4,
                "out_dim": 4,
                "num_heads": 2,
                "ffn_dim": 32,
                "num_layers": 2,
                "text_dim": 32,
                "freq_dim": 32,
            },
        ),
        "convert_wan_transformer_to_diffusers",
    ),
    "LTXPipeline": Case(
        (
            "LTXVideoTransformer3DModel",
            {
                "in_channels": 4,
                "out_channels": 4,
                "num_attention_heads": 2,
                "attention_head_dim": 12,
                "cross_attention_dim": 24,
                "num_layers": 2,
                "caption_channels": 32,
            },
        ),
        (
            "LTXV",
            {
                "image_model": "ltxv",
                "in_channels": 4,
                "cross_attention_dim": 24,
                "attention_head_dim": 12,
                "num_attention_heads": 2,
                "caption_channels": 32,
                "num_layers": 2,
            },
        ),
        "convert_ltx_transformer_checkpoint_to_diffusers",
    ),
    "LTX2Pipeline": Case(
        ("LTX2VideoTransformer3DModel", LTX2),
        ("LTXAV", LTX2 | {"image_model": "ltxav"}),
        "convert_ltx2_transformer_to_diffusers",
    ),
}


def import_comfyui(folder: Path) -> Any:
    """Imports ComfyUI from its folder, for a CPU. Returns its package `comfy`."""
    for name in UNNEEDED:
        sys.modules.setdefault(name, MagicMock())
    sys.path.insert(0, str(folder))
    options = importlib.import_module("comfy.cli_args")
    options.args.cpu = True
    for name in (
        "sd",
        "lora",
        "lora_convert",
        "model_patcher",
        "supported_models",
        "sd1_clip",
        "model_detection",
    ):
        importlib.import_module(f"comfy.{name}")
    return sys.modules["comfy"]


class Encoders(nn.Module):
    """The text encoders of a pipeline."""

    def __init__(self, parts: Iterable[str]) -> None:
        super().__init__()
        config = transformers.CLIPTextConfig(**CLIP)
        for part in parts:
            self.add_module(part, transformers.CLIPTextModel(config))


def adapted_denoiser(case: Case, family: Family, kind: str) -> PeftModel:
    """Returns the denoiser with an adapter of random matrices on every linear layer that gets an
    adapter by default. Ranks and alphas differ between modules.

    kind  `lora`, or `lokr`, which has no text encoders
    """
    torch.manual_seed(0)
    class_name, settings = case.denoiser
    denoiser = getattr(diffusers, class_name)(**settings)
    family.prepare(denoiser)
    if case.encoders and kind == "lora":
        denoiser.add_module("text_encoders", Encoders(case.encoders))
    classes = family.adapted_classes(denoiser)
    targets = [
        f"{block}.{name}"
        for block, module in denoiser.named_modules()
        if type(module).__name__ in classes
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear)
    ]
    targets = [name for name in targets if not any(part in name for part in family.frozen_layers)]
    targets += encoder_targets(denoiser, family)
    common = {
        "r": RANK,
        "target_modules": targets,
        "rank_pattern": {"0.*to_k": 2},
        "alpha_pattern": {"1.*to_q": 3},
    }
    if kind == "lora":
        config: PeftConfig = LoraConfig(lora_alpha=6, use_rslora=True, **common)
    else:
        config = LoKrConfig(alpha=6, **common)
    model = get_peft_model(denoiser, config)
    for name, parameter in model.named_parameters():
        if ".lora_" in name or ".lokr_" in name:
            parameter.data.normal_()
    return model


def peft_changes(model: PeftModel) -> Weights:
    """Returns the change of the weight of each adapted module."""
    return {
        f"{name.removeprefix('base_model.model.')}.weight": module.get_delta_weight(
            "default"
        ).detach()
        for name, module in model.named_modules()
        if hasattr(module, "get_delta_weight")
    }


@dataclass(frozen=True)
class Loaded:
    """What ComfyUI loaded.

    weights  all weights of ComfyUI's models
    changes  the changes of the weights that the file changes
    unread   the messages about tensors that were not loaded
    """

    weights: Weights
    changes: Weights
    unread: list[str]


class Messages(logging.Handler):
    """Collects the messages that ComfyUI logs."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def comfyui_version(folder: Path) -> str:
    """Reads the version of ComfyUI from its folder."""
    text = (folder / "comfyui_version.py").read_text(encoding="utf-8")
    return text.partition('__version__ = "')[2].partition('"')[0]


def build_model(comfy: Any, case: Case) -> Any:
    """Builds ComfyUI's model with random weights in fp32."""
    class_name, settings = case.model
    config = getattr(comfy.supported_models, class_name)(dict(settings))
    config.unet_config.update(settings)  # the class sets some sizes of the published model
    config.set_inference_dtype(torch.float32, None)
    return config.get_model({}, "")


def load_with_comfyui(comfy: Any, case: Case, file: Path) -> Loaded:
    """Loads the file with ComfyUI's loader into ComfyUI's model, as its node LoraLoader does."""
    model = build_model(comfy, case)
    clip = nn.Module()
    for name in case.encoders.values():
        clip.add_module(
            name, comfy.sd1_clip.SDClipModel(textmodel_json_config=dict(CLIP), dtype=torch.float32)
        )
    weights = dict(model.state_dict()) | dict(clip.state_dict())
    messages = Messages()
    logging.getLogger().addHandler(messages)
    key_map = comfy.lora.model_lora_keys_unet(model, {})
    if case.encoders:
        key_map = comfy.lora.model_lora_keys_clip(clip, key_map)
    tensors = comfy.lora_convert.convert_lora(comfy.utils.load_torch_file(str(file)))
    patches = comfy.lora.load_lora(tensors, key_map)
    changes: Weights = {}
    patched: set[Any] = set()
    for part in (model, clip):
        patcher = comfy.model_patcher.ModelPatcher(part, torch.device("cpu"), torch.device("cpu"))
        patched |= set(patcher.add_patches(patches, 1.0))
        for key, entries in patcher.patches.items():
            zeros = torch.zeros_like(weights[key])
            changes[key] = comfy.lora.calculate_weight(entries, zeros, key)
    messages.lines += [f"NOT LOADED {key}" for key in patches if key not in patched]
    logging.getLogger().removeHandler(messages)
    unread = [line for line in messages.lines if UNREAD.search(line)]
    return Loaded(weights, changes, unread)


def largest_difference(
    comfy: Any, case: Case, loaded: Loaded, expected: Weights, denoiser: nn.Module
) -> float:
    """Returns the largest difference between the changes of ComfyUI and of PEFT, relative to the
    largest change. Raises AssertionError if another weight was changed.
    """
    prefix = "diffusion_model."
    checkpoint = {
        key.removeprefix(prefix): loaded.changes.get(key, torch.zeros_like(weight))
        for key, weight in loaded.weights.items()
        if key.startswith(prefix)
    }
    encoder_changes = {
        key: change for key, change in loaded.changes.items() if not key.startswith(prefix)
    }
    in_encoders = {
        name: change for name, change in expected.items() if name.startswith("text_encoders.")
    }
    for name, change in in_encoders.items():
        part, inner = name.removeprefix("text_encoders.").split(".", 1)
        inner = inner.removeprefix("text_model.")
        encoder_changes[f"{case.encoders[part]}.transformer.text_model.{inner}"] -= change
    in_denoiser = {name: change for name, change in expected.items() if name not in in_encoders}
    zeros = {
        name: torch.zeros_like(weight)
        for name, weight in denoiser.state_dict().items()
        if not name.startswith("text_encoders.")
    }
    if case.to_diffusers:
        result = to_diffusers(case.to_diffusers, checkpoint, denoiser)
        missing = set(in_denoiser) - set(result)
        assert not missing, f"not in the converted checkpoint: {sorted(missing)[:3]}"
        reference = {name: in_denoiser.get(name, torch.zeros(())) for name in result}
    else:
        reference = comfy.model_detection.convert_diffusers_mmdit(zeros | in_denoiser)
        missing = (
            set(loaded.changes) - {f"{prefix}{name}" for name in reference} - set(encoder_changes)
        )
        assert not missing, f"not in the converted checkpoint: {sorted(missing)[:3]}"
        result = {name: checkpoint[name] for name in reference if name in checkpoint}
    differences = [(result[name] - reference[name]).abs().max() for name in result]
    differences += [difference.abs().max() for difference in encoder_changes.values()]
    largest = max(change.abs().max() for change in expected.values())
    return float(torch.stack(differences).max() / largest)


def to_diffusers(converter: str, checkpoint: Weights, denoiser: nn.Module) -> Weights:
    """Converts a checkpoint of ComfyUI to the names of diffusers."""
    if converter == "same":
        return checkpoint
    if converter == "unet":
        return single_file_utils.convert_ldm_unet_checkpoint(
            {f"model.diffusion_model.{name}": weight for name, weight in checkpoint.items()},
            dict(denoiser.config),
        )
    if converter == "ideogram4":
        return split_ideogram4(checkpoint)
    return getattr(single_file_utils, converter)(checkpoint)


def split_ideogram4(checkpoint: Weights) -> Weights:
    """Splits ComfyUI's fused queries, keys and values. diffusers has no converter for this family;
    the comparison of the outputs shows that this order is right.
    """
    result = {}
    for name, weight in checkpoint.items():
        if name.endswith(".qkv.weight"):
            for part, rows in zip(("to_q", "to_k", "to_v"), weight.chunk(3), strict=True):
                result[name.replace(".qkv.", f".{part}.")] = rows
        else:
            result[name.replace(".attention.o.", ".attention.to_out.0.")] = weight
    return result


def check_adapter(comfy: Any, pipeline: str, kind: str) -> tuple[int, int, float]:
    """Returns the number of modules, the number of tensors in the file, and the largest difference
    between the changes of the weights. Raises AssertionError if a tensor was not loaded.
    """
    case, family = CASES[pipeline], FAMILIES[pipeline]()
    model = adapted_denoiser(case, family, kind)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        file = Path(folder, "comfyui.safetensors")
        modules = write_comfyui(Path(folder), file, family)
        with safe_open(file, "pt") as opened:
            tensors = len(list(opened.keys()))
        loaded = load_with_comfyui(comfy, case, file)
    assert not loaded.unread, loaded.unread[:3]
    changes = peft_changes(model)
    denoiser = model.unload()
    with torch.no_grad():
        difference = largest_difference(comfy, case, loaded, changes, denoiser)
    return modules, tensors, difference


@torch.no_grad()
def compare_ideogram4(comfy: Any) -> float:
    """Returns the relative difference between the outputs of ComfyUI's Ideogram 4 and of diffusers'
    with the same random weights. The channels of a latent pixel are sorted in another way.
    """
    torch.manual_seed(0)
    case, family = CASES["Ideogram4Pipeline"], FAMILIES["Ideogram4Pipeline"]()
    class_name, settings = case.denoiser
    denoiser = getattr(diffusers, class_name)(**settings)
    other = build_model(comfy, case).diffusion_model
    for parameter in other.parameters():
        parameter.normal_(std=0.3)
    denoiser.load_state_dict(split_ideogram4(other.state_dict()))
    noisy, time = torch.randn(1, 16, 4, 6), torch.tensor([0.37])
    text = torch.randn(1, 5, 48)

    def sort_channels(x: Tensor) -> Tensor:
        return x.unflatten(1, (4, 2, 2)).permute(0, 2, 3, 1, 4, 5).flatten(1, 3)

    expected = sort_channels(other(noisy, time, context=text))
    conditioning = Conditioning(lengths=(5,))
    output = family.predict(denoiser, sort_channels(noisy), time, {"text": text}, conditioning)
    return float((output - expected).abs().max() / expected.abs().max())


def check_family(comfy: Any, pipeline: str) -> tuple[str, bool]:
    """Returns the row of one pipeline, and whether every difference is a rounding error."""
    family = FAMILIES[pipeline]()
    modules, tensors, difference = check_adapter(comfy, pipeline, "lora")
    cells = [f"`{pipeline}`", str(modules), str(tensors), f"{difference:.1e}"]
    differences = [difference]
    if family.comfyui_fused:
        cells.append("")
    else:
        _, _, difference = check_adapter(comfy, pipeline, "lokr")
        differences.append(difference)
        cells.append(f"{difference:.1e}")
    return f"| {' | '.join(cells)} |", max(differences) <= LARGEST_DIFFERENCE


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="a checkout of ComfyUI")
    parser.add_argument("pipelines", nargs="*", help="the pipelines to check; by default all")
    arguments = parser.parse_args()
    comfy = import_comfyui(arguments.folder)
    print(f"ComfyUI {comfyui_version(arguments.folder)}, diffusers {diffusers.__version__}\n")
    print("| pipeline | modules | tensors | difference, LoRA | difference, LoKr |")
    print("|---|---|---|---|---|")
    is_exact = True
    for pipeline in arguments.pipelines or CASES:
        row, is_equal = check_family(comfy, pipeline)
        is_exact &= is_equal
        print(row, flush=True)
    difference = compare_ideogram4(comfy)
    print(f"\nIdeogram 4: relative difference of the outputs of the two denoisers {difference:.1e}")
    if not is_exact or difference > LARGEST_DIFFERENCE:
        sys.exit(f"a difference is above {LARGEST_DIFFERENCE:g}")


if __name__ == "__main__":
    main()
