"""Families that learn a velocity by flow matching. What a token holds and how a text is encoded is each family's own."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .family import Asked, Deterministic, Family, OfAVideo, Patched, config_of, masked_prompts, patched, pooled_prompts


class Flux(Family):
    """Flux.1: latents in tokens of 2 x 2, CLIP's pooled text and T5's sequence, guidance as an input number of the model."""

    pipeline = "FluxPipeline"
    time_scale = 1000.0
    max_text_length = 512
    encoders = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")

    def text_shapes(self, config: Mapping[str, Any], length: int) -> dict[str, tuple[int, ...]]:
        return {"text": (length, int(config["joint_attention_dim"])), "pooled": (int(config["pooled_projection_dim"]),)}

    def encode_text(self, pipe: Any, captions: list[str], *, max_length: int) -> dict[str, Tensor]:
        text_NSD, pooled_ND, _ = pipe.encode_prompt(captions, max_sequence_length=max_length)
        return {"text": text_NSD, "pooled": pooled_ND}

    def predict(self, model: nn.Module, noisy_NCHW: Tensor, time_N: Tensor, text: dict[str, Tensor], asked: Asked) -> Tensor:
        height, width = noisy_NCHW.shape[-2:]
        told = torch.full_like(time_N, asked.guidance) if told_guidance(model) else None
        ids_T3 = positions(height // 2, width // 2, noisy_NCHW.device)
        if asked.control is not None:
            ids_T3 = torch.cat([ids_T3, ids_T3 + ids_T3.new_tensor([1, 0, 0])])
        made_NTC = model(
            hidden_states=beside(noisy_NCHW, asked), timestep=time_N, guidance=told, encoder_hidden_states=text["text"],
            pooled_projections=text["pooled"], txt_ids=torch.zeros(text["text"].shape[1], 3, device=noisy_NCHW.device),
            img_ids=ids_T3, return_dict=False,
        )[0]  # fmt: skip
        return unpacked(made_NTC[:, : height * width // 4], height, width)

    def prompts(self, text: dict[str, Tensor], empty: dict[str, Tensor]) -> dict[str, Any]:
        return {"prompt_embeds": text["text"], "pooled_prompt_embeds": text["pooled"]}

    def drawn(self, pipe: Any, made: Tensor, size: int) -> Tensor:
        side = size // pipe.vae_scale_factor
        return unpacked(made, side, side)


def beside(noisy_NCHW: Tensor, asked: Asked) -> Tensor:
    """Tokens of the noisy latents, and after them those of the picture before the edit."""
    return packed(noisy_NCHW) if asked.control is None else torch.cat([packed(noisy_NCHW), packed(asked.control)], 1)


def told_guidance(model: Any) -> bool:
    """Whether this model has an input for the guidance scale (Flux.1-dev), or none (schnell)."""
    return bool(config_of(model).guidance_embeds)


def packed(latents_NCHW: Tensor) -> Tensor:
    """F[N C H W] -> F[N HW/4 4C]: each token holds 2 x 2 latent pixels, channel first."""
    n, c, h, w = latents_NCHW.shape
    return latents_NCHW.reshape(n, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(n, h * w // 4, 4 * c)


def unpacked(tokens_NTC: Tensor, height: int, width: int) -> Tensor:
    """The inverse of `packed`, to latents of `height` x `width`."""
    n, _, c = tokens_NTC.shape
    return tokens_NTC.reshape(n, height // 2, width // 2, c // 4, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(n, c // 4, height, width)


def positions(rows: int, columns: int, device: torch.device, axes: int = 3) -> Tensor:
    """fp32[rows*columns axes]: 0, row and column of each token, then 0."""
    ids = torch.zeros(rows, columns, axes, device=device)
    ids[..., 1] = torch.arange(rows, device=device)[:, None]
    ids[..., 2] = torch.arange(columns, device=device)[None]
    return ids.reshape(-1, axes)


class Flux2(Family):
    """Flux.2 and Klein: latents of 2 x 2 in one as tokens, three layers of a language model as text, four positions a token."""

    pipeline = "Flux2Pipeline"
    time_scale = 1000.0
    downscale = 1
    max_text_length = 512
    encoders = ("text_encoder", "tokenizer")
    latents = Patched()

    def encode_text(self, pipe: Any, captions: list[str], *, max_length: int) -> dict[str, Tensor]:
        text_NSD, _ = pipe.encode_prompt(captions, max_sequence_length=max_length)
        return {"text": text_NSD}

    def predict(self, model: nn.Module, noisy_NCHW: Tensor, time_N: Tensor, text: dict[str, Tensor], asked: Asked) -> Tensor:
        height, width = noisy_NCHW.shape[-2:]
        told = torch.full_like(time_N, asked.guidance) if told_guidance(model) else None
        words_S4 = torch.zeros(text["text"].shape[1], 4, device=noisy_NCHW.device)
        words_S4[:, 3] = torch.arange(len(words_S4), device=noisy_NCHW.device)
        made_NTC = model(
            hidden_states=noisy_NCHW.flatten(2).transpose(1, 2), timestep=time_N, guidance=told, encoder_hidden_states=text["text"],
            txt_ids=words_S4, img_ids=positions(height, width, noisy_NCHW.device, 4), return_dict=False,
        )[0]  # fmt: skip
        made: Tensor = made_NTC.transpose(1, 2).unflatten(2, (height, width))
        return made

    def prompts(self, text: dict[str, Tensor], empty: dict[str, Tensor]) -> dict[str, Any]:
        return {"prompt_embeds": text["text"]}

    def drawn(self, pipe: Any, made: Tensor, size: int) -> Tensor:
        return self.latents.normalised(pipe.vae, patched(made))


class Flux2Klein(Flux2):
    """Guides away from an empty text, where Flux.2 has the guidance as an input."""

    pipeline = "Flux2KleinPipeline"

    def prompts(self, text: dict[str, Tensor], empty: dict[str, Tensor]) -> dict[str, Any]:
        return {"prompt_embeds": text["text"], "negative_prompt_embeds": empty["text"]}


class Chroma(Family):
    """Chroma: Flux without CLIP, whose text is masked behind its first padding token, and that guides away from an empty text."""

    pipeline = "ChromaPipeline"
    time_scale = 1000.0
    max_text_length = 512
    encoders = ("text_encoder", "tokenizer")
    not_needed = ("image_encoder", "feature_extractor")

    def text_shapes(self, config: Mapping[str, Any], length: int) -> dict[str, tuple[int, ...]]:
        return {"text": (length, int(config["joint_attention_dim"])), "mask": (length,)}

    def encode_text(self, pipe: Any, captions: list[str], *, max_length: int) -> dict[str, Tensor]:
        text_NSD, _, mask_NS, *_ = pipe.encode_prompt(captions, do_classifier_free_guidance=False, max_sequence_length=max_length)
        return {"text": text_NSD, "mask": mask_NS}

    def predict(self, model: nn.Module, noisy_NCHW: Tensor, time_N: Tensor, text: dict[str, Tensor], asked: Asked) -> Tensor:
        height, width = noisy_NCHW.shape[-2:]
        tokens_NTC = packed(noisy_NCHW)
        mask_NS = text["mask"].to(tokens_NTC.dtype)  # of numbers, which attention adds, as in the pipeline
        made_NTC = model(
            hidden_states=tokens_NTC, timestep=time_N, encoder_hidden_states=text["text"],
            txt_ids=torch.zeros(text["text"].shape[1], 3, device=noisy_NCHW.device),
            img_ids=positions(height // 2, width // 2, noisy_NCHW.device),
            attention_mask=torch.cat((mask_NS, mask_NS.new_ones(tokens_NTC.shape[:2])), 1), return_dict=False,
        )[0]  # fmt: skip
        return unpacked(made_NTC, height, width)

    def prompts(self, text: dict[str, Tensor], empty: dict[str, Tensor]) -> dict[str, Any]:
        return masked_prompts(text, empty)

    def drawn(self, pipe: Any, made: Tensor, size: int) -> Tensor:
        side = size // pipe.vae_scale_factor
        return unpacked(made, side, side)


class QwenImage(Family):
    """Qwen-Image: latents in tokens of 2 x 2, the sequence of a vision language model, guidance away from an empty text."""

    pipeline = "QwenImagePipeline"
    time_scale = 1.0  # its sinusoidal embedding multiplies by 1000 itself
    max_text_length: ClassVar[int | None] = 1024
    encoders: ClassVar[tuple[str, ...]] = ("text_encoder", "tokenizer")
    latents = OfAVideo()
    own_lengths = True
    guidance = "true_cfg_scale"

    def unused(self, denoiser: Any) -> tuple[str, ...]:
        """What the last block makes of the text, which is not used."""
        last = f"transformer_blocks.{len(denoiser.transformer_blocks) - 1}"
        return (f"{last}.attn.add_q_proj", f"{last}.attn.to_add_out", f"{last}.txt_mlp")

    def text_shapes(self, config: Mapping[str, Any], length: int) -> dict[str, tuple[int, ...]]:
        return {"text": (length, int(config["joint_attention_dim"])), "mask": (length,)}

    def encode_text(self, pipe: Any, captions: list[str], *, max_length: int) -> dict[str, list[Tensor]]:
        text_NSD, mask_NS = pipe.encode_prompt(captions, max_sequence_length=max_length)
        return {"text": [text if mask_NS is None else text[mask_NS[i].bool()] for i, text in enumerate(text_NSD)]}

    def predict(self, model: nn.Module, noisy_NCHW: Tensor, time_N: Tensor, text: dict[str, Tensor], asked: Asked) -> Tensor:
        height, width = noisy_NCHW.shape[-2:]
        shapes = [(1, height // 2, width // 2)] * (1 if asked.control is None else 2)
        made_NTC = model(
            hidden_states=beside(noisy_NCHW, asked), timestep=time_N, encoder_hidden_states=text["text"],
            encoder_hidden_states_mask=text["mask"].bool(), img_shapes=[shapes] * len(noisy_NCHW), return_dict=False,
        )[0]  # fmt: skip
        return unpacked(made_NTC[:, : height * width // 4], height, width)

    def prompts(self, text: dict[str, Tensor], empty: dict[str, Tensor]) -> dict[str, Any]:
        return {
            "prompt_embeds": text["text"], "prompt_embeds_mask": every(text), "negative_prompt_embeds": empty["text"],
            "negative_prompt_embeds_mask": every(empty),
        }  # fmt: skip

    def drawn(self, pipe: Any, made: Tensor, size: int) -> Tensor:
        side = size // pipe.vae_scale_factor
        return unpacked(made, side, side)


def every(text: dict[str, Tensor]) -> Tensor:
    """bool[N S]: every token counts, of a caption in its own length."""
    return text["text"].new_ones(text["text"].shape[:2]).bool()


class ZImage(Family):
    """Z-Image: each picture and each caption is a sequence of its own length; the velocity points from noise to the latent."""

    pipeline = "ZImagePipeline"
    max_text_length = 512
    encoders = ("text_encoder", "tokenizer")
    own_lengths = True

    def text_shapes(self, config: Mapping[str, Any], length: int) -> dict[str, tuple[int, ...]]:
        return {"text": (length, int(config["cap_feat_dim"])), "mask": (length,)}

    def encode_text(self, pipe: Any, captions: list[str], *, max_length: int) -> dict[str, list[Tensor]]:
        # the pipeline writes into the list that it is given
        texts, _ = pipe.encode_prompt(list(captions), do_classifier_free_guidance=False, max_sequence_length=max_length)
        return {"text": list(texts)}

    def predict(self, model: nn.Module, noisy_NCHW: Tensor, time_N: Tensor, text: dict[str, Tensor], asked: Asked) -> Tensor:
        texts = [one[:length] for one, length in zip(text["text"], asked.lengths)]
        made = model(list(noisy_NCHW[:, :, None].unbind(0)), 1 - time_N, texts, return_dict=False)[0]
        return -torch.stack([one[:, 0] for one in made])

    def prompts(self, text: dict[str, Tensor], empty: dict[str, Tensor]) -> dict[str, Any]:
        return {"prompt_embeds": list(text["text"]), "negative_prompt_embeds": list(empty["text"])}


class SD3(Family):
    """Stable Diffusion 3 and 3.5: latents as pictures, two CLIP encoders and T5 in one sequence, classifier-free guidance."""

    pipeline = "StableDiffusion3Pipeline"
    max_text_length = 256
    encoders = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "text_encoder_3", "tokenizer_3")

    def unused(self, denoiser: Any) -> tuple[str, ...]:
        """The text's queries of the last block, whose text is not used."""
        return tuple(f"transformer_blocks.{i}.attn.add_q_proj" for i, b in enumerate(denoiser.transformer_blocks) if b.context_pre_only)

    def text_tokens(self, clip_length: int, max_length: int) -> int:
        return clip_length + max_length

    def text_shapes(self, config: Mapping[str, Any], length: int) -> dict[str, tuple[int, ...]]:
        return {"text": (length, int(config["joint_attention_dim"])), "pooled": (int(config["pooled_projection_dim"]),)}

    def encode_text(self, pipe: Any, captions: list[str], *, max_length: int) -> dict[str, Tensor]:
        text_NSD, _, pooled_ND, _ = pipe.encode_prompt(
            captions, None, None, do_classifier_free_guidance=False, max_sequence_length=max_length
        )
        return {"text": text_NSD, "pooled": pooled_ND}

    def predict(self, model: nn.Module, noisy_NCHW: Tensor, time_N: Tensor, text: dict[str, Tensor], asked: Asked) -> Tensor:
        made: Tensor = model(
            hidden_states=noisy_NCHW, timestep=time_N * 1000, encoder_hidden_states=text["text"], pooled_projections=text["pooled"],
            return_dict=False,
        )[0]  # fmt: skip
        return made

    def prompts(self, text: dict[str, Tensor], empty: dict[str, Tensor]) -> dict[str, Any]:
        return pooled_prompts(text, empty)


class AuraFlow(Family):
    """AuraFlow: latents as pictures, the sequence of one T5 encoder, zero where it is padded."""

    pipeline = "AuraFlowPipeline"
    max_text_length = 256
    encoders = ("text_encoder", "tokenizer")
    adapted = ("AuraFlowJointTransformerBlock", "AuraFlowSingleTransformerBlock")

    def encode_text(self, pipe: Any, captions: list[str], *, max_length: int) -> dict[str, Tensor]:
        text_NSD, *_ = pipe.encode_prompt(captions, do_classifier_free_guidance=False, max_sequence_length=max_length)
        return {"text": text_NSD}

    def predict(self, model: nn.Module, noisy_NCHW: Tensor, time_N: Tensor, text: dict[str, Tensor], asked: Asked) -> Tensor:
        made: Tensor = model(noisy_NCHW, encoder_hidden_states=text["text"], timestep=time_N, return_dict=False)[0]
        return made

    def prompts(self, text: dict[str, Tensor], empty: dict[str, Tensor]) -> dict[str, Any]:
        every = text["text"].new_ones(text["text"].shape[:2])  # of the mask the pipeline checks the shape
        return masked_prompts(text | {"mask": every}, empty | {"mask": every})


class Sana(Family):
    """Sana: latents of 32 x 32 pixels as pictures, a language model's sequence with its mask, linear attention."""

    pipeline = "SanaPipeline"
    downscale = 1
    max_text_length = 300
    encoders = ("text_encoder", "tokenizer")
    latents = Deterministic()
    not_in_comfyui = "ComfyUI itself has no Sana"
    adapted = ("SanaTransformerBlock",)

    def text_shapes(self, config: Mapping[str, Any], length: int) -> dict[str, tuple[int, ...]]:
        return {"text": (length, int(config["caption_channels"])), "mask": (length,)}

    def encode_text(self, pipe: Any, captions: list[str], *, max_length: int) -> dict[str, Tensor]:
        """A caption is encoded behind the instruction that the pipeline draws with; the empty one, which is guided away from, alone."""
        instruction = inspect.signature(type(pipe).__call__).parameters["complex_human_instruction"].default
        texts, masks = [], []
        for caption in captions:
            text_1SD, mask_1S, _, _ = pipe.encode_prompt(
                [caption], do_classifier_free_guidance=False, max_sequence_length=max_length,
                complex_human_instruction=instruction if caption else None,
            )  # fmt: skip
            texts.append(text_1SD)
            masks.append(mask_1S.to(text_1SD.dtype))
        return {"text": torch.cat(texts), "mask": torch.cat(masks)}

    def predict(self, model: nn.Module, noisy_NCHW: Tensor, time_N: Tensor, text: dict[str, Tensor], asked: Asked) -> Tensor:
        made: Tensor = model(
            noisy_NCHW, encoder_hidden_states=text["text"], encoder_attention_mask=text["mask"],
            timestep=time_N * 1000 * config_of(model).timestep_scale, return_dict=False,
        )[0]  # fmt: skip
        return made

    def prompts(self, text: dict[str, Tensor], empty: dict[str, Tensor]) -> dict[str, Any]:
        return {"negative_prompt": None, **masked_prompts(text, empty), "use_resolution_binning": False}
