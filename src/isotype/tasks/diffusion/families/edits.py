"""Contains the model families that edit a picture. The denoiser gets the tokens of the noisy
latents, followed by the tokens of the pictures before the edit. Its predictions for the tokens of
the pictures before the edit are not used.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from ..picture_sizes import Size
from .family import Conditioning, SampleSettings, Text, full_mask
from .flow import (
    Flux,
    Flux2,
    Flux2Klein,
    QwenImage,
    flux2_control_tokens,
    pack_latents,
    unpack_latents,
)


class FluxKontext(Flux):
    """Flux.1 Kontext. The tokens of the picture before the edit come after the noisy tokens. They
    have the same row and column ids as the noisy tokens, but their first id is 1.
    """

    pipeline = "FluxKontextPipeline"
    unneeded_parts = ("image_encoder", "feature_extractor")
    edits_pictures = True

    def extra_arguments(
        self, pipe: Any, size: Size, controls: tuple[Tensor, ...]
    ) -> dict[str, Any]:
        return {"image": controls[0], "max_area": size.area}


class Flux2Edit(Flux2):
    """Flux.2 in a run on pairs of pictures. The tokens of the pictures before the edit come after
    the noisy tokens. The first position id differs for each picture.
    """

    edits_pictures = True
    takes_several_controls = True

    def extra_arguments(
        self, pipe: Any, size: Size, controls: tuple[Tensor, ...]
    ) -> dict[str, Any]:
        """Makes the pipeline use the latents of the pictures before the edit. If the pipeline got
        these pictures, it would scale them to other sizes and encode them again. So the pipeline
        gets an empty picture, and its method that encodes pictures is replaced by a function that
        returns the latents.
        """
        from PIL import Image

        tokens_NTC, ids_T4 = flux2_control_tokens(controls)
        pipe.prepare_image_latents = lambda **_: (tokens_NTC, ids_T4[None])
        return {"image": [Image.new("RGB", (256, 256))]}


class Flux2KleinEdit(Flux2Edit, Flux2Klein):
    """Flux.2 Klein in a run on pairs of pictures."""


class QwenImageEdit(QwenImage):
    """Qwen-Image-Edit. The denoiser gets the latents of the picture before the edit, and the
    language model reads this picture before the instruction.
    """

    pipeline = "QwenImageEditPipeline"
    max_text_length = None
    encoder_parts = ("text_encoder", "tokenizer", "processor")
    unneeded_parts = ("processor",)
    edits_pictures = True
    encodes_control = True
    control_text_tokens: ClassVar[int] = 1369

    def count_text_tokens(self, clip_length: int, max_length: int) -> int:
        """Returns the number of tokens of an instruction for a memory plan. An instruction may be
        longer, because its length has no limit.
        """
        return 256

    def prepare_pictures(self, pipe: Any, pictures: list[Any]) -> Any:
        """Resizes the picture before the edit to about 1024 x 1024 pixels, as the pipeline does for
        its language model.
        """
        (picture,) = pictures
        from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit import calculate_dimensions

        width, height, _ = calculate_dimensions(1024 * 1024, picture.width / picture.height)
        return pipe.image_processor.resize(picture, height, width)

    def encode_instructions(
        self, pipe: Any, captions: list[str], pictures: list[list[Any]]
    ) -> dict[str, list[Tensor]]:
        texts = []
        for caption, caption_pictures in zip(captions, pictures):
            # one caption at a time, so that none is padded
            image = self.prepare_pictures(pipe, caption_pictures)
            text_1SD, _ = pipe.encode_prompt([caption], image=image)
            texts.append(text_1SD[0])
        return {"text": texts}

    def sample(
        self,
        pipe: Any,
        text: Text,
        empty: Text,
        settings: SampleSettings,
        generator: Any,
        controls: tuple[Tensor, ...] = (),
    ) -> Tensor:
        """Generates a picture in the same steps as the pipeline. The pipeline itself is not called,
        because it scales every picture before the edit to about 1024 x 1024 pixels.
        """
        from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit import (
            calculate_shift,
            retrieve_timesteps,
        )

        height, width = settings.size.height, settings.size.width
        factor = pipe.vae_scale_factor
        text_NSD = text["text"]
        scheduler = pipe.scheduler
        tokens_NTC, _ = pipe.prepare_latents(
            None,
            1,
            pipe.latent_channels,
            height,
            width,
            text_NSD.dtype,
            text_NSD.device,
            generator,
        )
        bounds = (
            scheduler.config[name]
            for name in ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
        )
        levels = [1 - i / settings.steps for i in range(settings.steps)]
        mu = calculate_shift(tokens_NTC.shape[1], *bounds)
        timesteps, _ = retrieve_timesteps(
            scheduler, settings.steps, text_NSD.device, sigmas=levels, mu=mu
        )
        scheduler.set_begin_index(0)

        def predict_velocity(time: Tensor, texts: Text) -> Tensor:
            level_N = (time / 1000).expand(1).to(text_NSD.dtype)
            texts = texts | {"mask": full_mask(texts)}
            return pack_latents(
                self.predict(
                    pipe.transformer,
                    unpack_latents(tokens_NTC, height // factor, width // factor),
                    level_N,
                    texts,
                    Conditioning(controls=controls),
                )
            )

        for time in timesteps:
            prediction = predict_velocity(time, text)
            if settings.guidance > 1:
                negative_prediction = predict_velocity(time, empty)
                guided_prediction = negative_prediction + settings.guidance * (
                    prediction - negative_prediction
                )
                prediction = guided_prediction * (
                    prediction.norm(dim=-1, keepdim=True)
                    / guided_prediction.norm(dim=-1, keepdim=True)
                )
            tokens_NTC = scheduler.step(prediction, time, tokens_NTC, return_dict=False)[0]
        return unpack_latents(tokens_NTC, height // factor, width // factor)


class QwenImageEditPlus(QwenImageEdit):
    """The versions of Qwen-Image-Edit since September 2025. An edit may have several pictures
    before it. The language model reads them at a smaller size than in the first version of
    Qwen-Image-Edit.
    """

    pipeline = "QwenImageEditPlusPipeline"
    takes_several_controls = True
    control_text_tokens = 196

    def prepare_pictures(self, pipe: Any, pictures: list[Any]) -> Any:
        from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import (
            CONDITION_IMAGE_SIZE,
            calculate_dimensions,
        )

        resized = []
        for picture in pictures:
            aspect = picture.width / picture.height
            width, height = calculate_dimensions(CONDITION_IMAGE_SIZE, aspect)
            resized.append(pipe.image_processor.resize(picture, height, width))
        return resized
