"""Families that edit a picture: its latents come after the noisy ones as further tokens, and what
they predict is dropped.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from .family import Asked, Drawing, Text, every
from .flow import Flux, QwenImage, packed, unpacked


class FluxKontext(Flux):
    """Flux.1 Kontext: the tokens of the picture before the edit come after the noisy ones, at the
    same places of a second picture.
    """

    pipeline = "FluxKontextPipeline"
    not_needed = ("image_encoder", "feature_extractor")
    pairs = True

    def also(self, pipe: Any, size: int, control: Tensor | None) -> dict[str, Any]:
        return {"image": control, "max_area": size * size}


class QwenImageEdit(QwenImage):
    """Qwen-Image-Edit: the picture before the edit as latents beside the noisy ones, and before the
    instruction in the language model.

    tokens  of that picture in the language model, at most
    """

    pipeline = "QwenImageEditPipeline"
    max_text_length = None
    encoders = ("text_encoder", "tokenizer", "processor")
    not_needed = ("processor",)
    pairs = True
    sees_control = True
    tokens: ClassVar[int] = 1369

    def text_tokens(self, clip_length: int, max_length: int) -> int:
        """Instructions are not cut: a plan takes them to be as long as the picture is, or 256
        tokens.
        """
        return self.tokens + 256

    def seen(self, pipe: Any, picture: Any) -> Any:
        """A picture as the pipeline gives it to its language model: of about so many pixels as it
        draws.
        """
        from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit import calculate_dimensions

        width, height, _ = calculate_dimensions(1024 * 1024, picture.width / picture.height)
        return pipe.image_processor.resize(picture, height, width)

    def encode_instructions(
        self, pipe: Any, captions: list[str], pictures: list[Any]
    ) -> dict[str, list[Tensor]]:
        texts = []
        for caption, picture in zip(captions, pictures):
            # one at a time: without padding
            text_1SD, _ = pipe.encode_prompt([caption], image=self.seen(pipe, picture))
            texts.append(text_1SD[0])
        return {"text": texts}

    def sample(
        self,
        pipe: Any,
        text: Text,
        empty: Text,
        how: Drawing,
        generator: Any,
        control: Tensor | None = None,
    ) -> Tensor:
        """As the pipeline's loop does, which scales every picture before an edit to about 1024 x
        1024 pixels.
        """
        from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit import (
            calculate_shift,
            retrieve_timesteps,
        )

        side = how.size // pipe.vae_scale_factor
        given = text["text"]
        scheduler = pipe.scheduler
        tokens_NTC, _ = pipe.prepare_latents(
            None, 1, pipe.latent_channels, how.size, how.size, given.dtype, given.device, generator
        )
        bounds = (
            scheduler.config[name]
            for name in ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
        )
        levels = [1 - i / how.steps for i in range(how.steps)]
        mu = calculate_shift(tokens_NTC.shape[1], *bounds)
        times, _ = retrieve_timesteps(scheduler, how.steps, given.device, sigmas=levels, mu=mu)
        scheduler.set_begin_index(0)

        def predicted(time: Tensor, words: Text) -> Tensor:
            level_N = (time / 1000).expand(1).to(given.dtype)
            words = words | {"mask": every(words)}
            return packed(
                self.predict(
                    pipe.transformer,
                    unpacked(tokens_NTC, side, side),
                    level_N,
                    words,
                    Asked(control=control),
                )
            )

        for time in times:
            made = predicted(time, text)
            if how.guidance > 1:
                away = predicted(time, empty)
                guided = away + how.guidance * (made - away)
                made = guided * (
                    made.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True)
                )
            tokens_NTC = scheduler.step(made, time, tokens_NTC, return_dict=False)[0]
        return unpacked(tokens_NTC, side, side)


class QwenImageEditPlus(QwenImageEdit):
    """Qwen-Image-Edit of September 2025 and later, with one picture before the edit, which its
    language model sees smaller.
    """

    pipeline = "QwenImageEditPlusPipeline"
    tokens = 196

    def seen(self, pipe: Any, picture: Any) -> Any:
        from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import (
            CONDITION_IMAGE_SIZE,
            calculate_dimensions,
        )

        width, height = calculate_dimensions(CONDITION_IMAGE_SIZE, picture.width / picture.height)
        return [pipe.image_processor.resize(picture, height, width)]
