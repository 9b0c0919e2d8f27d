"""Tiny pipelines of the families beside those in models.py; random weights. Each function saves one
as a folder.
"""

import json
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from benchmarks.diffusion_matrix import qwen_image as qwen_transformer
from benchmarks.diffusion_matrix import sana as sana_transformer
from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors

from tests import vlms
from tests.vlms import tiny_vlm

from .models import WIDTH, WORDS, clip, flux_transformer, pixart, t5, tokenizer, vae

TEMPLATE = "{% for m in messages %}a {{ m.content }} on{% endfor %}"
TEXT = {
    "vocab_size": len(WORDS), "hidden_size": 2 * WIDTH, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "max_position_embeddings": 512,
}  # fmt: skip


def chatting(length: int):
    made = tokenizer(length)
    made.chat_template = TEMPLATE
    return made


def of_text(kind: type, layers: int):
    return kind(kind.config_class(**TEXT, num_hidden_layers=layers))


def dynamic() -> diffusers.FlowMatchEulerDiscreteScheduler:
    return diffusers.FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15
    )


def qwen(folder: Path) -> None:
    text = {
        **TEXT,
        "num_hidden_layers": 1,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    }
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 2 * WIDTH,
        "patch_size": 4,
    }
    diffusers.QwenImagePipeline(
        transformer=qwen_transformer(), scheduler=dynamic(), tokenizer=tokenizer(256),
        text_encoder=transformers.Qwen2_5_VLForConditionalGeneration(transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision)),
        vae=diffusers.AutoencoderKLQwenImage(
            base_dim=4, z_dim=4, dim_mult=[1, 2, 2], num_res_blocks=1, temperal_downsample=[False, True],
            latents_mean=[0.1, -0.2, 0.3, 0.0], latents_std=[1.5, 0.5, 2.0, 1.0],
        ),
    ).save_pretrained(folder)  # fmt: skip


def kontext(folder: Path) -> None:
    diffusers.FluxKontextPipeline(
        transformer=flux_transformer(guidance=True), vae=vae(4), scheduler=dynamic(),
        text_encoder=clip(projection=False), tokenizer=tokenizer(8), text_encoder_2=t5(), tokenizer_2=tokenizer(8),
    ).save_pretrained(folder)  # fmt: skip


def qwen_edit(
    folder: Path,
    kind: type = diffusers.QwenImageEditPipeline,
    *,
    stages: int = 2,
    **transformer: Any,
) -> None:
    """`stages`: 2 ** stages pixels are a latent pixel in each direction."""
    encoder = tiny_vlm("qwen2_5_vl")
    denoiser = qwen_transformer()
    settings = {
        **denoiser.config,
        "joint_attention_dim": encoder.config.text_config.hidden_size,
        **transformer,
    }
    kind(
        transformer=diffusers.QwenImageTransformer2DModel.from_config(settings), scheduler=dynamic(), tokenizer=vlms.tokenizer(),
        text_encoder=encoder, processor=None,
        vae=diffusers.AutoencoderKLQwenImage(
            base_dim=4, z_dim=4, dim_mult=[1] * stages + [2], num_res_blocks=1, temperal_downsample=[False] + [True] * (stages - 1),
            latents_mean=[0.1, -0.2, 0.3, 0.0], latents_std=[1.5, 0.5, 2.0, 1.0],
        ),
    ).save_pretrained(folder)  # fmt: skip
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(
        json.dumps({**index, "processor": ["transformers", "Qwen2_5_VLProcessor"]})
    )
    made = vlms.PROCESSORS["qwen2_5_vl"]
    (folder / "processor").mkdir()
    (folder / "processor/preprocessor_config.json").write_text(
        json.dumps({**made["images"], "processor_class": made["processor_class"]})
    )


def qwen_edit_plus(folder: Path) -> None:
    """As the one of November 2025, whose picture before the edit has the noise level 0."""
    qwen_edit(folder, diffusers.QwenImageEditPlusPipeline, zero_cond_t=True)


def qwen_edit_1024(folder: Path) -> None:
    """Its pictures of 1024 x 1024 pixels are 64 x 64 latent pixels."""
    qwen_edit(folder, stages=4)


def z_image(folder: Path) -> None:
    diffusers.ZImagePipeline(
        transformer=diffusers.ZImageTransformer2DModel(
            in_channels=4, dim=32, n_layers=2, n_refiner_layers=1, n_heads=2, n_kv_heads=2, cap_feat_dim=2 * WIDTH, axes_dims=[4, 6, 6],
            axes_lens=[64, 32, 32],
        ),
        vae=vae(4), text_encoder=of_text(transformers.Qwen3ForCausalLM, 2), tokenizer=chatting(64),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
    ).save_pretrained(folder)  # fmt: skip


def flux2_vae() -> diffusers.AutoencoderKLFlux2:
    made = diffusers.AutoencoderKLFlux2(
        block_out_channels=(8, 8, 8), down_block_types=("DownEncoderBlock2D",) * 3, up_block_types=("UpDecoderBlock2D",) * 3,
        layers_per_block=1, latent_channels=4, norm_num_groups=4, use_quant_conv=False, use_post_quant_conv=False,
    )  # fmt: skip
    made.bn.running_mean.normal_(std=0.2)
    made.bn.running_var.uniform_(0.5, 2.0)
    return made


def klein(folder: Path) -> None:
    diffusers.Flux2KleinPipeline(
        transformer=diffusers.Flux2Transformer2DModel(
            in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
            joint_attention_dim=3 * 2 * WIDTH, axes_dims_rope=(4, 4, 4, 4), guidance_embeds=False, timestep_guidance_channels=32,
        ),
        vae=flux2_vae(), text_encoder=of_text(transformers.Qwen3ForCausalLM, 27), tokenizer=chatting(64),
        scheduler=dynamic(),
    ).save_pretrained(folder)  # fmt: skip


FLUX2_TEMPLATE = """{% for m in messages %}{% for part in m.content %}{% if part.type == "text" %} {{ part.text }}
{%- endif %}{% endfor %}{% endfor %}"""


def flux2(folder: Path) -> None:
    """Its text is the 10th, 20th and 30th layer of a Mistral 3. The published one's tokenizer lies
    in a processor of Pixtral's, which needs torchvision.
    """
    words = tokenizer(512)
    words.add_special_tokens({"additional_special_tokens": ["[IMG]", "[IMG_BREAK]", "[IMG_END]"]})
    words.chat_template = FLUX2_TEMPLATE
    eye = {
        "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    text = {**TEXT, "vocab_size": len(words), "num_hidden_layers": 30}
    config = transformers.Mistral3Config(
        text_config={"model_type": "mistral", **text},
        vision_config={"model_type": "pixtral", **eye},
        image_token_index=words.convert_tokens_to_ids("[IMG]"),
    )
    diffusers.Flux2Pipeline(
        transformer=diffusers.Flux2Transformer2DModel(
            in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
            joint_attention_dim=3 * 2 * WIDTH, axes_dims_rope=(4, 4, 4, 4), guidance_embeds=True, timestep_guidance_channels=32,
        ),
        vae=flux2_vae(), text_encoder=transformers.Mistral3ForConditionalGeneration(config), tokenizer=words, scheduler=dynamic(),
    ).save_pretrained(folder)  # fmt: skip


def chroma(folder: Path) -> None:
    diffusers.ChromaPipeline(
        transformer=diffusers.ChromaTransformer2DModel(
            in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=2 * WIDTH,
            axes_dims_rope=(4, 6, 6), approximator_num_channels=8, approximator_hidden_dim=16, approximator_layers=1,
        ),
        vae=vae(4), text_encoder=t5(), tokenizer=tokenizer(8), scheduler=dynamic(),
    ).save_pretrained(folder)  # fmt: skip


def sd1(folder: Path) -> None:
    diffusers.StableDiffusionPipeline(
        unet=diffusers.UNet2DConditionModel(
            block_out_channels=(8, 16), layers_per_block=1, sample_size=8, in_channels=4, out_channels=4, norm_num_groups=4,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            attention_head_dim=4, cross_attention_dim=WIDTH,
        ),
        vae=vae(4), text_encoder=clip(projection=False), tokenizer=tokenizer(8), safety_checker=None, feature_extractor=None,
        scheduler=diffusers.DDIMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear"), requires_safety_checker=False,
    ).save_pretrained(folder)  # fmt: skip


def sana(folder: Path) -> None:
    diffusers.SanaPipeline(
        transformer=sana_transformer(), text_encoder=of_text(transformers.Gemma2Model, 1), tokenizer=tokenizer(400),
        vae=diffusers.AutoencoderDC(
            latent_channels=4, attention_head_dim=4, encoder_block_out_channels=(8, 8, 8), decoder_block_out_channels=(8, 8, 8),
            encoder_layers_per_block=(1, 1, 1), decoder_layers_per_block=(1, 1, 1), encoder_qkv_multiscales=((), (), ()),
            decoder_qkv_multiscales=((), (), ()), scaling_factor=0.41,
        ),
        scheduler=diffusers.DPMSolverMultistepScheduler(prediction_type="flow_prediction", flow_shift=3.0, use_flow_sigmas=True),
    ).save_pretrained(folder)  # fmt: skip


def auraflow(folder: Path) -> None:
    diffusers.AuraFlowPipeline(
        transformer=diffusers.AuraFlowTransformer2DModel(
            sample_size=8, patch_size=2, in_channels=4, num_mmdit_layers=1, num_single_dit_layers=1, attention_head_dim=8,
            num_attention_heads=4, caption_projection_dim=32, joint_attention_dim=2 * WIDTH, pos_embed_max_size=64,
        ),
        vae=vae(4), text_encoder=t5(), tokenizer=tokenizer(8), scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=1.73),
    ).save_pretrained(folder)  # fmt: skip


def lumina2(folder: Path) -> None:
    diffusers.Lumina2Pipeline(
        transformer=diffusers.Lumina2Transformer2DModel(
            sample_size=8, in_channels=4, hidden_size=24, num_layers=1, num_refiner_layers=1, num_attention_heads=2, num_kv_heads=1,
            multiple_of=16, axes_dim_rope=(4, 4, 4), axes_lens=(128, 32, 32), cap_feat_dim=2 * WIDTH,
        ),
        vae=vae(4, stages=4), text_encoder=of_text(transformers.Gemma2Model, 2), tokenizer=tokenizer(256),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=6.0),
    ).save_pretrained(folder)  # fmt: skip


def hidream(folder: Path) -> None:
    denoiser = diffusers.HiDreamImageTransformer2DModel(
        patch_size=2, in_channels=4, out_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        caption_channels=[2 * WIDTH, 2 * WIDTH], text_emb_dim=2 * WIDTH, num_routed_experts=2, num_activated_experts=2,
        axes_dims_rope=(8, 4, 4), max_resolution=(16, 16), llama_layers=[0, 1],
    )  # fmt: skip
    for name, p in denoiser.named_parameters():  # its gates are left uninitialised
        if name.endswith("gate.weight"):
            torch.nn.init.normal_(p)
    diffusers.HiDreamImagePipeline(
        transformer=denoiser, scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0), vae=vae(4), tokenizer=tokenizer(8),
        text_encoder=clip(projection=True), text_encoder_2=clip(projection=True), tokenizer_2=tokenizer(8), text_encoder_3=t5(),
        tokenizer_3=tokenizer(8), tokenizer_4=tokenizer(8),
        text_encoder_4=transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT, num_hidden_layers=2, attn_implementation="eager")),
    ).save_pretrained(folder)  # fmt: skip


def wan(folder: Path) -> Path:
    text = transformers.UMT5Config(
        vocab_size=len(WORDS), d_model=2 * WIDTH, d_kv=8, d_ff=24, num_layers=1, num_heads=2
    )
    diffusers.WanPipeline(
        transformer=diffusers.WanTransformer3DModel(
            num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=2 * WIDTH, freq_dim=32, ffn_dim=32,
            num_layers=2,
        ),
        vae=diffusers.AutoencoderKLWan(
            base_dim=4, z_dim=4, dim_mult=[1, 2, 2], num_res_blocks=1, temperal_downsample=[False, True], scale_factor_spatial=4,
            scale_factor_temporal=2,
            latents_mean=[0.1, -0.2, 0.3, 0.0], latents_std=[1.5, 0.5, 2.0, 1.0],
        ),
        text_encoder=transformers.UMT5EncoderModel(text), tokenizer=tokenizer(8),
        scheduler=diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
    ).save_pretrained(folder)  # fmt: skip
    return folder


def wan_experts(folder: Path) -> None:
    """Wan 2.2: a denoiser for high noise levels, and another one for low noise levels."""
    parts = diffusers.WanPipeline.from_pretrained(wan(folder)).components
    torch.manual_seed(1)
    second = diffusers.WanTransformer3DModel.from_config(parts["transformer"].config)
    diffusers.WanPipeline(
        **{**parts, "transformer_2": second}, boundary_ratio=0.75
    ).save_pretrained(folder)


def ltx(folder: Path) -> None:
    coder = diffusers.AutoencoderKLLTXVideo(
        latent_channels=4, block_out_channels=(8, 8), decoder_block_out_channels=(8, 8), layers_per_block=(1, 1, 1),
        decoder_layers_per_block=(1, 1, 1), spatio_temporal_scaling=(True, False), decoder_spatio_temporal_scaling=(True, False),
        down_block_types=("LTXVideoDownBlock3D",) * 2, decoder_inject_noise=(False,) * 3, downsample_type=("conv",) * 2,
        upsample_residual=(False,) * 2, upsample_factor=(1, 1), patch_size=2, scaling_factor=1.5,
    )  # fmt: skip
    coder.latents_mean.normal_(std=0.2)
    coder.latents_std.uniform_(0.5, 2.0)
    diffusers.LTXPipeline(
        transformer=diffusers.LTXVideoTransformer3DModel(
            in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=12, cross_attention_dim=24, num_layers=2,
            caption_channels=2 * WIDTH,
        ),
        vae=coder, text_encoder=t5(), tokenizer=tokenizer(8), scheduler=dynamic(),
    ).save_pretrained(folder)  # fmt: skip


def ltx2(folder: Path) -> None:
    """Without the VAE and the vocoder of its sound, which are never loaded."""
    coder = diffusers.AutoencoderKLLTX2Video(
        latent_channels=4, block_out_channels=(8,), decoder_block_out_channels=(8,), layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1), spatio_temporal_scaling=(True,), decoder_spatio_temporal_scaling=(True,),
        down_block_types=("LTX2VideoDownBlock3D",), decoder_inject_noise=(False,) * 2, downsample_type=("spatiotemporal",),
        upsample_type=("spatiotemporal",), upsample_residual=(False,), upsample_factor=(1,), patch_size=2, scaling_factor=1.5,
    )  # fmt: skip
    coder.latents_mean.normal_(std=0.2)
    coder.latents_std.uniform_(0.5, 2.0)
    words = tokenizer(8)
    eye = {
        "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    text = {**TEXT, "num_hidden_layers": 2}
    encoder = transformers.Gemma3ForConditionalGeneration(
        transformers.Gemma3Config(text_config=text, vision_config=eye, mm_tokens_per_image=4)
    )
    heads = {
        "video_connector_num_attention_heads": 2, "video_connector_attention_head_dim": 16, "audio_connector_num_attention_heads": 2,
        "audio_connector_attention_head_dim": 16, "video_connector_num_layers": 1, "audio_connector_num_layers": 1,
    }  # fmt: skip
    diffusers.LTX2Pipeline(
        transformer=diffusers.LTX2VideoTransformer3DModel(
            in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=12, cross_attention_dim=24, num_layers=2,
            caption_channels=2 * WIDTH, audio_in_channels=8, audio_out_channels=8, audio_num_attention_heads=2, audio_attention_head_dim=8,
            audio_cross_attention_dim=16, vae_scale_factors=(2, 4, 4),
        ),
        vae=coder, audio_vae=None, vocoder=None, text_encoder=encoder, tokenizer=words, scheduler=dynamic(),
        connectors=LTX2TextConnectors(
            caption_channels=2 * WIDTH, text_proj_in_factor=3, video_connector_num_learnable_registers=4,
            audio_connector_num_learnable_registers=4, **heads,
        ),
    ).save_pretrained(folder)  # fmt: skip


def qwen3_vl(kind: type, layers: int) -> Any:
    """The text encoder of Krea 2 and Ideogram 4; it never sees a picture."""
    rope = {
        "rope_type": "default",
        "mrope_section": [2, 3, 3],
        "mrope_interleaved": True,
        "rope_theta": 10000.0,
    }
    vision = {
        "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 2 * WIDTH, "patch_size": 4,
        "deepstack_visual_indexes": [0], "num_position_embeddings": 16,
    }  # fmt: skip
    text = {**TEXT, "num_hidden_layers": layers, "rope_scaling": rope}
    return kind(transformers.Qwen3VLConfig(text_config=text, vision_config=vision))


def qwen_vae() -> diffusers.AutoencoderKLQwenImage:
    return diffusers.AutoencoderKLQwenImage(
        base_dim=4, z_dim=4, dim_mult=[1, 2, 2], num_res_blocks=1, temperal_downsample=[False, True],
        latents_mean=[0.1, -0.2, 0.3, 0.0], latents_std=[1.5, 0.5, 2.0, 1.0],
    )  # fmt: skip


def krea2(folder: Path) -> None:
    diffusers.Krea2Pipeline(
        transformer=diffusers.Krea2Transformer2DModel(
            in_channels=16, num_layers=2, attention_head_dim=16, num_attention_heads=2, num_key_value_heads=1, intermediate_size=32,
            timestep_embed_dim=32, text_hidden_dim=2 * WIDTH, num_text_layers=2, text_num_attention_heads=2, text_num_key_value_heads=2,
            text_intermediate_size=32, num_layerwise_text_blocks=1, num_refiner_text_blocks=1, axes_dims_rope=(4, 6, 6),
        ),
        vae=qwen_vae(), text_encoder=qwen3_vl(transformers.Qwen3VLModel, 2), tokenizer=tokenizer(256), scheduler=dynamic(),
        text_encoder_select_layers=(1, 2),
    ).save_pretrained(folder)  # fmt: skip


def ernie_image(folder: Path) -> None:
    denoiser = diffusers.ErnieImageTransformer2DModel(
        hidden_size=32, num_attention_heads=2, num_layers=2, ffn_hidden_size=48, in_channels=16, out_channels=16,
        text_in_dim=2 * WIDTH, rope_axes_dim=(4, 6, 6),
    )  # fmt: skip
    for layer in (denoiser.final_linear, denoiser.adaLN_modulation[-1]):
        torch.nn.init.normal_(layer.weight, std=0.1)  # it begins with zeros
    diffusers.ErnieImagePipeline(
        transformer=denoiser, vae=flux2_vae(), text_encoder=of_text(transformers.MistralModel, 2), tokenizer=tokenizer(64),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
    ).save_pretrained(folder)  # fmt: skip


def ideogram4(folder: Path) -> None:
    settings = {
        "in_channels": 16, "num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2, "intermediate_size": 32, "adaln_dim": 16,
        "llm_features_dim": 13 * 2 * WIDTH, "mrope_section": (4, 2, 2),
    }  # fmt: skip
    text = qwen3_vl(transformers.Qwen3VLModel, 36)
    diffusers.Ideogram4Pipeline(
        transformer=diffusers.Ideogram4Transformer2DModel(**settings), vae=flux2_vae(), text_encoder=text, tokenizer=chatting_in_parts(64),
        unconditional_transformer=diffusers.Ideogram4Transformer2DModel(**settings),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    ).save_pretrained(folder)  # fmt: skip


def chatting_in_parts(length: int):
    made = tokenizer(length)
    made.chat_template = FLUX2_TEMPLATE
    return made


def longcat(folder: Path) -> None:
    vision = {
        "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 2 * WIDTH, "patch_size": 4,
    }  # fmt: skip
    text = {
        **TEXT,
        "num_hidden_layers": 1,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    }
    words = tokenizer(256)
    words.save_pretrained(folder / "tokenizer")
    pipe = diffusers.LongCatImagePipeline(
        transformer=diffusers.LongCatImageTransformer2DModel(
            in_channels=64, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
            joint_attention_dim=2 * WIDTH, pooled_projection_dim=2 * WIDTH, axes_dims_rope=[4, 6, 6],
        ),
        vae=vae(16), scheduler=dynamic(), tokenizer=words, text_processor=None,
        text_encoder=transformers.Qwen2_5_VLForConditionalGeneration(transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision)),
    )  # fmt: skip
    pipe.save_pretrained(folder)


def kandinsky5(folder: Path) -> None:
    """The published one's tokenizer lies in a processor of Qwen2-VL's."""
    vision = {
        "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 2 * WIDTH, "patch_size": 4,
    }  # fmt: skip
    rope = {"type": "mrope", "mrope_section": [2, 3, 3]}
    text = {**TEXT, "num_hidden_layers": 1, "rope_scaling": rope}
    denoiser = diffusers.Kandinsky5Transformer3DModel(
        in_visual_dim=4, in_text_dim=2 * WIDTH, in_text_dim2=WIDTH, time_dim=16, out_visual_dim=4, model_dim=32, ff_dim=48,
        num_text_blocks=1, num_visual_blocks=2, axes_dims=(4, 6, 6),
    )  # fmt: skip
    for name, p in denoiser.named_parameters():  # its modulations begin with zeros
        if "modulation" in name:
            torch.nn.init.normal_(p, std=0.1)
    words = transformers.CLIPTextConfig(
        vocab_size=len(WORDS), hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=77, projection_dim=WIDTH, eos_token_id=1, bos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    encoder = transformers.Qwen2_5_VLForConditionalGeneration(
        transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    )
    diffusers.Kandinsky5T2IPipeline(
        transformer=denoiser, vae=vae(4, stages=4), scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        tokenizer=tokenizer(512), text_encoder=encoder, text_encoder_2=transformers.CLIPTextModel(words), tokenizer_2=tokenizer(77),
    ).save_pretrained(folder)  # fmt: skip


def pixart_sigma(folder: Path) -> None:
    """Unlike alpha at 1024 pixels it is not told a picture's size."""
    parts = diffusers.PixArtAlphaPipeline.from_pretrained(pixart(folder)).components
    settings = {**parts["transformer"].config, "use_additional_conditions": False}
    denoiser = diffusers.PixArtTransformer2DModel.from_config(settings)
    diffusers.PixArtSigmaPipeline(**{**parts, "transformer": denoiser}).save_pretrained(folder)


MAKES = {
    make.__name__: make
    for make in (
        qwen, kontext, qwen_edit, qwen_edit_plus, qwen_edit_1024, z_image, flux2, klein, chroma, sd1, sana, auraflow, lumina2, hidream,
        pixart_sigma, wan, wan_experts, ltx, ltx2, krea2, ernie_image, ideogram4, longcat, kandinsky5,
    )
}  # fmt: skip


def make(name: str, folder: Path) -> None:
    torch.manual_seed(0)
    MAKES[name](folder)
