"""Contains the model families that learn a velocity with flow matching. They differ in what a token
contains and in how texts are encoded.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from ....instance_method import InstanceMethod
from ..picture_sizes import Size
from .family import (
    MASK_ARGUMENTS,
    POOLED_ARGUMENTS,
    Conditioning,
    Config,
    DeepCompressionLatents,
    Denoiser,
    Family,
    PatchedLatents,
    Text,
    VideoLatents,
    denoiser_config,
    latents_to_tokens,
    tokens_to_latents,
)


def pack_latents(latents_NCHW: Tensor) -> Tensor:
    """Packs latents into tokens of 2 x 2 latent pixels, F[N C H W] -> F[N HW/4 4C]. The values of a
    token are sorted by their channel.
    """
    n, c, h, w = latents_NCHW.shape
    return (
        latents_NCHW.reshape(n, c, h // 2, 2, w // 2, 2)
        .permute(0, 2, 4, 1, 3, 5)
        .reshape(n, h * w // 4, 4 * c)
    )


def unpack_latents(tokens_NTC: Tensor, height: int, width: int) -> Tensor:
    """The inverse of `pack_latents`. Returns latents of `height` x `width`."""
    n, _, c = tokens_NTC.shape
    return (
        tokens_NTC.reshape(n, height // 2, width // 2, c // 4, 2, 2)
        .permute(0, 3, 1, 4, 2, 5)
        .reshape(n, c // 4, height, width)
    )


class PackedTokens(Family):
    """A family whose tokens are 2 x 2 latent pixels. If there are pictures before the edit, their
    tokens come after the noisy tokens.
    """

    def pack_tokens(self, noisy_NCHW: Tensor, conditioning: Conditioning) -> Tensor:
        return torch.cat([pack_latents(x) for x in (noisy_NCHW, *conditioning.controls)], 1)

    def output_latents(self, pipe: Any, output: Tensor, size: Size) -> Tensor:
        factor = pipe.vae_scale_factor
        return unpack_latents(output, size.height // factor, size.width // factor)


class Flux(PackedTokens):
    """Flux.1. The denoiser's inputs are CLIP's pooled text embedding, T5's sequence of embeddings,
    and the guidance as a number.
    """

    pipeline = "FluxPipeline"
    exact_time_scale = 1000.0
    max_text_length = 512
    encoder_parts: ClassVar[tuple[str, ...]] = (
        "text_encoder",
        "tokenizer",
        "text_encoder_2",
        "tokenizer_2",
    )
    text_output_indices = {"text": 0, "pooled": 1}
    text_arguments = POOLED_ARGUMENTS
    takes_negative_prompt = False

    def extra_inputs(
        self,
        model: Denoiser,
        tokens_NTC: Tensor,
        time_N: Tensor,
        text: Text,
        conditioning: Conditioning,
    ) -> dict[str, Any]:
        """Returns the other inputs of the denoiser, in addition to the tokens, the time and the
        text sequence.
        """
        return {
            "guidance": guidance_input(model, time_N, conditioning),
            "pooled_projections": text["pooled"],
        }

    def predict(
        self,
        model: Denoiser,
        noisy_NCHW: Tensor,
        time_N: Tensor,
        text: Text,
        conditioning: Conditioning,
    ) -> Tensor:
        height, width = noisy_NCHW.shape[-2:]
        tokens_NTC = self.pack_tokens(noisy_NCHW, conditioning)
        ids_T3 = position_ids(height // 2, width // 2, noisy_NCHW.device)
        if conditioning.controls:
            ids_T3 = torch.cat([ids_T3, ids_T3 + ids_T3.new_tensor([1, 0, 0])])
        output_NTC = model(
            hidden_states=tokens_NTC,
            timestep=time_N,
            encoder_hidden_states=text["text"],
            img_ids=ids_T3,
            txt_ids=torch.zeros(text["text"].shape[1], 3, device=noisy_NCHW.device),
            return_dict=False,
            **self.extra_inputs(model, tokens_NTC, time_N, text, conditioning),
        )[0]
        return unpack_latents(output_NTC[:, : height * width // 4], height, width)


def guidance_input(model: Any, time_N: Tensor, conditioning: Conditioning) -> Tensor | None:
    """Returns the guidance scale F[N] if the model has such an input, as Flux.1-dev has. Returns
    None if the model has no such input, as for Flux.1-schnell.
    """
    if denoiser_config(model).guidance_embeds:
        return torch.full_like(time_N, conditioning.guidance)
    return None


def position_ids(rows: int, columns: int, device: torch.device, axes: int = 3) -> Tensor:
    """Returns the position ids of each token, fp32[rows*columns axes]. The ids of a token are 0,
    its row, its column, and 0 for each further axis.
    """
    ids = torch.zeros(rows, columns, axes, device=device)
    ids[..., 1] = torch.arange(rows, device=device)[:, None]
    ids[..., 2] = torch.arange(columns, device=device)[None]
    return ids.reshape(-1, axes)


class Chroma(Flux):
    """The family Chroma, which is like Flux but has no CLIP encoder. All text tokens after the
    first padding token are masked. The negative text for the guidance is empty.
    """

    pipeline = "ChromaPipeline"
    encoder_parts = ("text_encoder", "tokenizer")
    unneeded_parts = ("image_encoder", "feature_extractor")
    text_output_indices = {"text": 0, "mask": 2}
    text_arguments = MASK_ARGUMENTS
    takes_negative_prompt = True

    def extra_inputs(
        self,
        model: Denoiser,
        tokens_NTC: Tensor,
        time_N: Tensor,
        text: Text,
        conditioning: Conditioning,
    ) -> dict[str, Any]:
        # a floating-point mask, which attention adds to its scores, as in the pipeline
        mask_NS = text["mask"].to(tokens_NTC.dtype)
        return {"attention_mask": torch.cat((mask_NS, mask_NS.new_ones(tokens_NTC.shape[:2])), 1)}


class Flux2(Family):
    """Flux.2. A token is one pixel of `PatchedLatents`, with four position ids. The text embeddings
    are the outputs of three layers of a language model.
    """

    pipeline = "Flux2Pipeline"
    exact_time_scale = 1000.0
    latent_side_multiple = 1
    max_text_length = 512
    latents = PatchedLatents()
    takes_negative_prompt = False

    def predict(
        self,
        model: Denoiser,
        noisy_NCHW: Tensor,
        time_N: Tensor,
        text: Text,
        conditioning: Conditioning,
    ) -> Tensor:
        height, width = noisy_NCHW.shape[-2:]
        text_ids_S4 = torch.zeros(text["text"].shape[1], 4, device=noisy_NCHW.device)
        text_ids_S4[:, 3] = torch.arange(len(text_ids_S4), device=noisy_NCHW.device)
        tokens_NTC = latents_to_tokens(noisy_NCHW)
        ids_T4 = position_ids(height, width, noisy_NCHW.device, 4)
        if conditioning.controls:
            control_NTC, control_ids_T4 = flux2_control_tokens(conditioning.controls)
            tokens_NTC = torch.cat([tokens_NTC, control_NTC], 1)
            ids_T4 = torch.cat([ids_T4, control_ids_T4])
        output_NTC = model(
            hidden_states=tokens_NTC,
            timestep=time_N,
            guidance=guidance_input(model, time_N, conditioning),
            encoder_hidden_states=text["text"],
            txt_ids=text_ids_S4,
            img_ids=ids_T4,
            return_dict=False,
        )[0]
        return tokens_to_latents(output_NTC[:, : height * width], height, width)

    def output_latents(self, pipe: Any, output: Tensor, size: Size) -> Tensor:
        """Converts the pipeline's output to latents. The output consists of the denoiser's tokens."""
        factor = self.latents.downscale(pipe.vae.config)
        return tokens_to_latents(output, size.height // factor, size.width // factor)


def flux2_control_tokens(controls: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Returns the tokens F[N T C] of the pictures before the edit, and their position ids
    fp32[T 4]. The first id is 10 for the tokens of the first picture, 20 for those of the second
    picture, and so on, as in the pipeline.
    """
    tokens = [latents_to_tokens(control_NCHW) for control_NCHW in controls]
    ids = []
    for number, control_NCHW in enumerate(controls, start=1):
        height, width = control_NCHW.shape[-2:]
        ids_T4 = position_ids(height, width, control_NCHW.device, 4)
        ids_T4[:, 0] = 10 * number
        ids.append(ids_T4)
    return torch.cat(tokens, 1), torch.cat(ids)


class Flux2Klein(Flux2):
    """Flux.2 Klein. It uses an empty negative text for the guidance, whereas Flux.2 gets the
    guidance as a number.
    """

    pipeline = "Flux2KleinPipeline"
    takes_negative_prompt = True

    def output_latents(self, pipe: Any, output: Tensor, size: Size) -> Tensor:
        """Converts the pipeline's output to the latents of the denoiser. The output consists of
        latents with the VAE's own scale.
        """
        return self.latents.normalise(pipe.vae, self.latents.patchify(output))


class QwenImage(PackedTokens):
    """Qwen-Image. The denoiser gets the text embeddings of a vision-language model. The negative
    text for the guidance is empty.
    """

    pipeline = "QwenImagePipeline"
    exact_time_scale = 1.0  # 1, because the denoiser's own embedding multiplies by 1000
    max_text_length: ClassVar[int | None] = 1024
    latents = VideoLatents()
    keeps_text_lengths = True
    text_arguments = {"prompt_embeds": "text", "prompt_embeds_mask": "mask"}
    guidance_argument = "true_cfg_scale"

    def unused_layers(self, denoiser: Any) -> tuple[str, ...]:
        """Returns the layers of the last block that compute only outputs for the text tokens. The
        model does not use these outputs.
        """
        last = f"transformer_blocks.{len(denoiser.transformer_blocks) - 1}"
        return (f"{last}.attn.add_q_proj", f"{last}.attn.to_add_out", f"{last}.txt_mlp")

    def encode_text(
        self, pipe: Any, captions: list[str], *, max_length: int, **options: Any
    ) -> Mapping[str, list[Tensor]]:
        text_NSD, mask_NS = pipe.encode_prompt(captions, max_sequence_length=max_length)
        return {
            "text": [
                text if mask_NS is None else text[mask_NS[i].bool()]
                for i, text in enumerate(text_NSD)
            ]
        }

    def predict(
        self,
        model: Denoiser,
        noisy_NCHW: Tensor,
        time_N: Tensor,
        text: Text,
        conditioning: Conditioning,
    ) -> Tensor:
        height, width = noisy_NCHW.shape[-2:]
        shapes = [
            (1, x.shape[-2] // 2, x.shape[-1] // 2) for x in (noisy_NCHW, *conditioning.controls)
        ]
        output_NTC = model(
            hidden_states=self.pack_tokens(noisy_NCHW, conditioning),
            timestep=time_N,
            encoder_hidden_states=text["text"],
            encoder_hidden_states_mask=text["mask"].bool(),
            img_shapes=[shapes] * len(noisy_NCHW),
            return_dict=False,
        )[0]
        return unpack_latents(output_NTC[:, : height * width // 4], height, width)


class ZImage(Family):
    """Z-Image. Each picture and each caption is a separate sequence with its own length. The
    velocity points from noise to the latent.
    """

    pipeline = "ZImagePipeline"
    max_text_length = 512
    keeps_text_lengths = True
    text_width_key = "cap_feat_dim"

    def encode_text(
        self, pipe: Any, captions: list[str], *, max_length: int, **options: Any
    ) -> Mapping[str, list[Tensor]]:
        # the pipeline changes the list of captions that it receives
        texts = super().encode_text(pipe, list(captions), max_length=max_length)
        return {"text": list(texts["text"])}

    def predict(
        self,
        model: Denoiser,
        noisy_NCHW: Tensor,
        time_N: Tensor,
        text: Text,
        conditioning: Conditioning,
    ) -> Tensor:
        texts = [sequence[:length] for sequence, length in zip(text["text"], conditioning.lengths)]
        outputs = model(
            list(noisy_NCHW[:, :, None].unbind(0)), 1 - time_N, texts, return_dict=False
        )[0]
        return -torch.stack([sequence[:, 0] for sequence in outputs])

    def text_inputs(self, text: Text, empty: Text) -> dict[str, Any]:
        return {name: list(values) for name, values in super().text_inputs(text, empty).items()}


class SD3(Family):
    """Stable Diffusion 3 and 3.5. The denoiser gets the latents as a picture, not as tokens. It
    also gets one sequence with the embeddings of two CLIP encoders and T5. It uses classifier-free
    guidance.
    """

    pipeline = "StableDiffusion3Pipeline"
    max_text_length = 256
    encoder_parts = (
        "text_encoder",
        "tokenizer",
        "text_encoder_2",
        "tokenizer_2",
        "text_encoder_3",
        "tokenizer_3",
    )
    text_output_indices = {"text": 0, "pooled": 2}
    text_arguments = POOLED_ARGUMENTS

    def unused_layers(self, denoiser: Any) -> tuple[str, ...]:
        """Returns the layers of the last block that compute the queries of the text tokens. The
        model does not use the output of the last block for the text tokens.
        """
        return tuple(
            f"transformer_blocks.{i}.attn.add_q_proj"
            for i, block in enumerate(denoiser.transformer_blocks)
            if block.context_pre_only
        )

    def count_text_tokens(self, clip_length: int, max_length: int) -> int:
        return clip_length + max_length

    def encode_text(
        self, pipe: Any, captions: list[str], *, max_length: int, **options: Any
    ) -> Mapping[str, Any]:
        return super().encode_text(
            pipe, captions, max_length=max_length, prompt_2=None, prompt_3=None
        )

    def predict(
        self,
        model: Denoiser,
        noisy_NCHW: Tensor,
        time_N: Tensor,
        text: Text,
        conditioning: Conditioning,
    ) -> Tensor:
        return model(
            hidden_states=noisy_NCHW,
            timestep=time_N * 1000,
            encoder_hidden_states=text["text"],
            pooled_projections=text["pooled"],
            return_dict=False,
        )[0]


class AuraFlow(Family):
    """AuraFlow. The denoiser gets the latents as a picture, not as tokens. It also gets the
    embeddings of one T5 encoder. The embeddings of padding tokens are 0.
    """

    pipeline = "AuraFlowPipeline"
    max_text_length = 256
    text_arguments = MASK_ARGUMENTS  # the pipeline only checks the shape of the mask
    adapted_block_classes = ("AuraFlowJointTransformerBlock", "AuraFlowSingleTransformerBlock")

    def predict(
        self,
        model: Denoiser,
        noisy_NCHW: Tensor,
        time_N: Tensor,
        text: Text,
        conditioning: Conditioning,
    ) -> Tensor:
        return model(
            noisy_NCHW, encoder_hidden_states=text["text"], timestep=time_N, return_dict=False
        )[0]


class Sana(Family):
    """Sana. The denoiser gets the latents as a picture, with 32 x 32 pixels per latent pixel. It
    also gets the embeddings of a language model with their mask. Its attention is linear.
    """

    pipeline = "SanaPipeline"
    latent_side_multiple = 1
    max_text_length = 300
    latents = DeepCompressionLatents()
    text_output_indices = {"text": 0, "mask": 1}
    text_width_key = "caption_channels"
    text_arguments = MASK_ARGUMENTS
    comfyui_blocker = "ComfyUI does not support Sana"
    adapted_block_classes = ("SanaTransformerBlock",)

    def encode_text(
        self, pipe: Any, captions: list[str], *, max_length: int, **options: Any
    ) -> Mapping[str, Tensor]:
        """Puts the pipeline's instruction for generating pictures before each caption and encodes
        both. The empty caption, which is the negative text, is encoded without the instruction.
        """
        instruction = (
            inspect.signature(type(pipe).__call__).parameters["complex_human_instruction"].default
        )
        encode = super().encode_text
        texts = [
            encode(
                pipe,
                [item],
                max_length=max_length,
                complex_human_instruction=instruction if item else None,
            )
            for item in captions
        ]
        return {
            text_name: torch.cat([item[text_name] for item in texts])
            for text_name in self.text_output_indices
        }

    def predict(
        self,
        model: Denoiser,
        noisy_NCHW: Tensor,
        time_N: Tensor,
        text: Text,
        conditioning: Conditioning,
    ) -> Tensor:
        return model(
            noisy_NCHW,
            encoder_hidden_states=text["text"],
            encoder_attention_mask=text["mask"],
            timestep=time_N * 1000 * denoiser_config(model).timestep_scale,
            return_dict=False,
        )[0]

    def extra_arguments(
        self, pipe: Any, size: Size, controls: tuple[Tensor, ...]
    ) -> dict[str, Any]:
        return {"negative_prompt": None, "use_resolution_binning": False}


class Lumina2(Family):
    """Lumina 2. A caption comes after the pipeline's system prompt, and is not padded. The velocity
    points from noise to the latent.
    """

    pipeline = "Lumina2Pipeline"
    max_text_length = 256
    keeps_text_lengths = True
    text_width_key = "cap_feat_dim"
    text_arguments = MASK_ARGUMENTS
    comfyui_prefix = "diffusion_model"
    comfyui_names = {
        ".attn.to_out.0": ".attention.out",
        ".attn.qkv": ".attention.qkv",
        ".feed_forward.linear_": ".feed_forward.w",
        ".norm1.linear": ".adaLN_modulation.1",
    }
    comfyui_fused = {".attn.qkv": (".attn.to_q", ".attn.to_k", ".attn.to_v")}
    fuses_unequal_outputs = True

    def prepare(self, denoiser: Any) -> None:
        """Converts the table of positions from complex128 to complex64. With complex128, queries
        and keys would get the dtype fp64.
        """
        rope = denoiser.rope_embedder
        rope.freqs_cis = [table.to(torch.complex64) for table in rope.freqs_cis]

    def encode_text(
        self, pipe: Any, captions: list[str], *, max_length: int, **options: Any
    ) -> Mapping[str, list[Tensor]]:
        """Puts the system prompt before each caption and encodes both. The empty caption, which is
        the negative text, is encoded without the system prompt, as in the pipeline.
        """
        texts = []
        for caption in captions:
            # the pipeline puts the system prompt before `prompt` and not before `negative_prompt`
            text_1SD, mask_1S, empty_1SD, empty_mask_1S = pipe.encode_prompt(
                [caption], max_sequence_length=max_length
            )
            text, mask = (text_1SD, mask_1S) if caption else (empty_1SD, empty_mask_1S)
            texts.append(text[0][mask[0].bool()])
        return {"text": texts}

    def predict(
        self,
        model: Denoiser,
        noisy_NCHW: Tensor,
        time_N: Tensor,
        text: Text,
        conditioning: Conditioning,
    ) -> Tensor:
        return -model(
            noisy_NCHW,
            1 - time_N,
            text["text"],
            _MaskWithLengths(text["mask"], conditioning.lengths),
            return_dict=False,
        )[0]

    def text_inputs(self, text: Text, empty: Text) -> dict[str, Any]:
        """Returns the pipeline's arguments for the texts. The texts are padded to the same length,
        because the pipeline requires this.
        """
        longest = max(texts["text"].shape[1] for texts in (text, empty))

        def pad_to_longest(texts: Text) -> Text:
            padding = longest - texts["text"].shape[1]
            return {
                "text": pad(texts["text"], (0, 0, 0, padding)),
                "mask": pad(texts["text"].new_ones(texts["text"].shape[:2]), (0, padding)).long(),
            }

        return super().text_inputs(pad_to_longest(text), pad_to_longest(empty))


class _MaskWithLengths:
    """A mask [N S] that stores the sums of its rows. The denoiser reads the sums in each pass. If
    the sums were computed in each pass, the process would have to wait for the device each time. In
    a memory plan, the sums could not be computed at all, because the tensors have no data.
    """

    def __init__(self, mask_NS: Tensor, lengths: tuple[int, ...]) -> None:
        self.mask = mask_NS
        self.lengths = lengths
        self.shape = mask_NS.shape

    def sum(self, dim: int) -> _MaskWithLengths:
        return self

    def tolist(self) -> list[int]:
        return list(self.lengths)

    def bool(self) -> Tensor:
        return self.mask.bool()


class HiDream(Family):
    """HiDream. The denoiser gets the outputs of all layers of a language model, T5's sequence of
    embeddings, and CLIP's pooled text embeddings. It is a mixture of experts. The velocity points
    from noise to the latent.
    """

    pipeline = "HiDreamImagePipeline"
    max_text_length = 128
    block_classes = ("HiDreamBlock",)
    encoder_parts = (
        "text_encoder",
        "tokenizer",
        "text_encoder_2",
        "tokenizer_2",
        "text_encoder_3",
        "tokenizer_3",
        "text_encoder_4",
        "tokenizer_4",
    )
    text_output_indices = {"text": 0, "layers": 2, "pooled": 4}
    text_arguments = {
        "prompt_embeds_t5": "text",
        "prompt_embeds_llama3": "layers",
        "pooled_prompt_embeds": "pooled",
    }

    def text_shapes(self, config: Config, length: int) -> dict[str, tuple[int, ...]]:
        t5, language = config["caption_channels"]
        return {
            "text": (length, int(t5)),
            "layers": (1 + max(config["llama_layers"]), length, int(language)),
            "pooled": (int(config["text_emb_dim"]),),
        }

    def encode_text(
        self, pipe: Any, captions: list[str], *, max_length: int, **options: Any
    ) -> Mapping[str, Tensor]:
        texts = super().encode_text(pipe, captions, max_length=max_length)
        layer_count = 1 + max(pipe.transformer.config.llama_layers)
        return {**texts, "layers": texts["layers"][:layer_count].transpose(0, 1)}

    def predict(
        self,
        model: Denoiser,
        noisy_NCHW: Tensor,
        time_N: Tensor,
        text: Text,
        conditioning: Conditioning,
    ) -> Tensor:
        output = model(
            noisy_NCHW,
            timesteps=time_N * 1000,
            encoder_hidden_states_t5=text["text"],
            encoder_hidden_states_llama3=text["layers"].transpose(0, 1),
            pooled_embeds=text["pooled"],
            return_dict=False,
        )[0]
        return -(
            output
            if output.shape == noisy_NCHW.shape
            else _tokens_to_picture(output, noisy_NCHW, denoiser_config(model).patch_size)
        )

    def text_inputs(self, text: Text, empty: Text) -> dict[str, Any]:
        by_layer = (texts | {"layers": texts["layers"].transpose(0, 1)} for texts in (text, empty))
        return super().text_inputs(*by_layer)

    def extra_arguments(
        self, pipe: Any, size: Size, controls: tuple[Tensor, ...]
    ) -> dict[str, Any]:
        # the pipeline scales every size to the area of a square with this side, and rounds down
        side = math.sqrt(size.area) * (1 + 1e-9)
        pipe.default_sample_size = side / pipe.vae_scale_factor
        return {}

    def prepare(self, denoiser: Any) -> None:
        super().prepare(denoiser)
        # in evaluation mode `unpatchify` reads the sizes of pictures from a tensor, which has no
        # data here
        if denoiser.final_layer.linear.weight.is_meta:
            InstanceMethod(_unpatchify, denoiser, "unpatchify").install()
        for module in denoiser.modules():
            if type(module).__name__ == "MOEFeedForwardSwiGLU" and module.gate.weight.is_meta:
                InstanceMethod(_split_evenly_over_experts, module).install()


def _unpatchify(denoiser: Any, x_NTP: Tensor, sizes: Any, is_training: bool) -> Tensor:
    output: Tensor = type(denoiser).unpatchify(denoiser, x_NTP, sizes, True)
    return output


def _tokens_to_picture(tokens_NCTP: Tensor, like_NCHW: Tensor, side: int) -> Tensor:
    """In training mode, the denoiser returns tokens F[N C T side*side]. This function arranges them
    as latents F[N C H W]. The tokens that come after the picture's tokens are padding.
    """
    height, width = (length // side for length in like_NCHW.shape[-2:])
    tokens: Tensor = (
        tokens_NCTP[:, :, : height * width].unflatten(2, (height, width)).unflatten(4, (side, side))
    )
    return tokens.transpose(3, 4).flatten(4).flatten(2, 3)


def _split_evenly_over_experts(moe: Any, x_NSD: Tensor) -> Tensor:
    """Replaces the forward of a layer of experts in a memory plan. In a memory plan the tensors
    have no values, so each expert gets the same number of tokens. The shapes are the same as in the
    original forward.
    """
    tokens_TD = x_NSD.flatten(0, 1).repeat_interleave(moe.num_activated_experts, 0)
    parts = zip(tokens_TD.tensor_split(len(moe.experts)), moe.experts)
    output_TD = torch.cat([expert(part) for part, expert in parts])
    output: Tensor = output_TD.unflatten(0, (-1, moe.num_activated_experts)).sum(1).view_as(
        x_NSD
    ) + moe.shared_experts(x_NSD)
    return output
