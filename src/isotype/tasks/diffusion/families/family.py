"""Defines the base class of the model families. A family describes the latents of a diffusers
pipeline, and the inputs and outputs of its denoiser. A table in this module lists the pipelines
that Isotype cannot train, each with the reason.

In shapes, N is the number of pictures, C is the number of channels and H x W is the size of the
denoiser's latents, S is the number of text tokens, and D is the width of a text embedding.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ....instance_method import InstanceMethod
from ..picture_sizes import Size

FLOW_ONLY = ("flow_matching",)


# --- latents: how a family's VAE encodes and decodes, and how its latents are converted to those of
# the denoiser

Config = Mapping[str, Any]  # the content of the config.json of a part of the pipeline


class Latents:
    """The latents of a VAE for pictures (AutoencoderKL), with one factor and one offset for all
    channels.
    """

    vae: ClassVar[str] = "AutoencoderKL"

    def downscale(self, config: Config) -> int:
        """Returns the number of pixels per latent pixel in each direction."""
        return int(2 ** (len(config["block_out_channels"]) - 1))

    def frame_step(self, config: Config) -> int:
        """Returns the number of frames of a video that the VAE combines into one latent frame."""
        return 1

    def channels(self, config: Config) -> int:
        """Returns the number of latent channels C."""
        return int(config["latent_channels"])

    def encode(self, vae: Any, x_N3HW: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the mean and the standard deviation of the posterior, each fp32[N C H W]. They
        have the scale that the denoiser expects.

        x_N3HW  pixels in [-1, 1], in the VAE's dtype
        """
        posterior = vae.encode(x_N3HW).latent_dist
        factor = float(vae.config.scaling_factor)
        mean = (posterior.mean.float() - self.offset(vae)) * factor
        return mean, posterior.std.float() * factor

    def decode(self, vae: Any, latents_NCHW: Tensor) -> Tensor:
        """Decodes latents to pixels F[N 3 H W] in the VAE's dtype. The latents have the scale that
        the denoiser expects.
        """
        return decode_pixels(vae, latents_NCHW / vae.config.scaling_factor + self.offset(vae))

    def offset(self, vae: Any) -> float:
        """Returns the offset of the VAE's latents."""
        return float(vae.config.shift_factor or 0.0)


def decode_pixels(vae: Any, latents: Tensor, *arguments: Tensor) -> Tensor:
    """Decodes latents to pixels in the VAE's dtype. The latents have the VAE's own scale."""
    pixels: Tensor = vae.decode(latents.to(vae.dtype), *arguments, return_dict=False)[0]
    return pixels


class VideoLatents(Latents):
    """The latents of a VAE for videos (Qwen-Image, Wan). A picture is a video with one frame. Each
    channel has its own offset and factor.
    """

    vae = "AutoencoderKLQwenImage"

    def downscale(self, config: Config) -> int:
        return int(2 ** len(config["temperal_downsample"]))

    def channels(self, config: Config) -> int:
        return int(config["z_dim"])

    def statistics(self, vae: Any, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns the mean and the standard deviation of the VAE's latents, each fp32[C 1 1 1]."""
        mean, deviation = (
            torch.tensor(values, device=device)[:, None, None, None]
            for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        return mean, deviation

    def encode(self, vae: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the mean and the standard deviation of the posterior. For pictures F[N 3 H W],
        both are fp32[N C H W]; for clips F[N 3 F H W], both are fp32[N C F H W].
        """
        posterior = vae.encode(as_video(x)).latent_dist
        offset, deviation = self.statistics(vae, x.device)
        return (
            like_input((posterior.mean.float() - offset) / deviation, x),
            like_input(posterior.std.float() / deviation, x),
        )

    def decode(self, vae: Any, latents: Tensor) -> Tensor:
        """Decodes latents F[N C H W] to pixels F[N 3 H W], and latents F[N C F H W] to pixels
        F[N 3 F H W].
        """
        offset, deviation = self.statistics(vae, latents.device)
        # LTX's VAE takes a time
        if vae.config.get("timestep_conditioning"):
            time = [latents.new_zeros(len(latents), dtype=vae.dtype)]
        else:
            time = []
        pixels = decode_pixels(vae, as_video(latents) * deviation + offset, *time)
        return like_input(pixels, latents)


def as_video(x: Tensor) -> Tensor:
    """Returns pictures F[N C H W] as videos F[N C 1 H W]. Videos are returned unchanged."""
    return x[:, :, None] if x.ndim == 4 else x


def like_input(output_NCFHW: Tensor, x: Tensor) -> Tensor:
    """Removes the dimension of the frames from an output if `x` are pictures F[N C H W]."""
    return output_NCFHW[:, :, 0] if x.ndim == 4 else output_NCFHW


class DeepCompressionLatents(Latents):
    """The latents of a deep compression autoencoder (Sana). This autoencoder has no posterior: it
    encodes a picture as one latent and not as a distribution.
    """

    vae = "AutoencoderDC"

    def downscale(self, config: Config) -> int:
        return int(2 ** (len(config["encoder_block_out_channels"]) - 1))

    def encode(self, vae: Any, x_N3HW: Tensor) -> tuple[Tensor, Tensor]:
        mean = vae.encode(x_N3HW).latent.float() * vae.config.scaling_factor
        return mean, torch.zeros_like(mean)

    def decode(self, vae: Any, latents_NCHW: Tensor) -> Tensor:
        return decode_pixels(vae, latents_NCHW / vae.config.scaling_factor)


class PatchedLatents(Latents):
    """Latents in which each pixel combines 2 x 2 pixels of the VAE's latents (Flux.2). They are
    normalised with the VAE's running statistics.
    """

    vae = "AutoencoderKLFlux2"

    def downscale(self, config: Config) -> int:
        return 2 * super().downscale(config)

    def channels(self, config: Config) -> int:
        return 4 * super().channels(config)

    def encode(self, vae: Any, x_N3HW: Tensor) -> tuple[Tensor, Tensor]:
        posterior = vae.encode(x_N3HW).latent_dist
        _, deviation = self.statistics(vae)
        return (
            self.normalise(vae, self.patchify(posterior.mean.float())),
            self.patchify(posterior.std.float()) / deviation,
        )

    def normalise(self, vae: Any, patched_NCHW: Tensor) -> Tensor:
        """Normalises the VAE's patched latents for the denoiser. Returns fp32[N C H W]."""
        offset, deviation = self.statistics(vae)
        return (patched_NCHW - offset) / deviation

    def decode(self, vae: Any, latents_NCHW: Tensor) -> Tensor:
        offset, deviation = self.statistics(vae)
        return decode_pixels(vae, self.unpatchify(latents_NCHW * deviation + offset))

    def statistics(self, vae: Any) -> tuple[Tensor, Tensor]:
        """Returns the running mean and the running standard deviation of the VAE's latents, each
        fp32[C 1 1].
        """
        deviation = (vae.bn.running_var.float() + self.epsilon(vae)).sqrt()
        return vae.bn.running_mean.float()[:, None, None], deviation[:, None, None]

    def epsilon(self, vae: Any) -> float:
        """Returns the constant that is added to the variance."""
        return float(vae.config.batch_norm_eps)

    def patchify(self, x_NCHW: Tensor) -> Tensor:
        """Combines each patch of 2 x 2 pixels into one pixel, F[N C H W] -> F[N 4C H/2 W/2]. The
        new channels are sorted by the old channel, then by the row within the patch, then by the
        column.
        """
        n, c, h, w = x_NCHW.shape
        patches = x_NCHW.reshape(n, c, h // 2, 2, w // 2, 2).permute(0, 1, 3, 5, 2, 4)
        return patches.reshape(n, 4 * c, h // 2, w // 2)

    def unpatchify(self, x_NCHW: Tensor) -> Tensor:
        """The inverse of `patchify`."""
        n, c, h, w = x_NCHW.shape
        patches = x_NCHW.reshape(n, c // 4, 2, 2, h, w).permute(0, 1, 4, 2, 5, 3)
        return patches.reshape(n, c // 4, 2 * h, 2 * w)


# --- families

Text = dict[str, Tensor]  # the outputs of the text encoders for N captions, by name
Denoiser = Callable[..., Sequence[Tensor]]
"""A denoiser, called with `return_dict=False`."""


@dataclass(frozen=True)
class Conditioning:
    """The inputs of a denoiser in addition to the picture, the time and the text.

    guidance   the guidance scale (a number) of a guidance-distilled model
    downscale  the number of pixels per latent pixel in each direction; models that have a picture's
               size as an input need the size in pixels
    lengths    the number of tokens of each caption, for a family with `keeps_text_lengths`
    crop       fp32[N 4]   the result of `picture_sizes.size_and_crop` for each picture; None if the
                           pictures are not cropped and have the size of the latents
    controls   F[N C H W]  latents of the pictures before the edit, one tensor for each picture of
                           a row, for a family with `edits_pictures`
    frame_step  the number of frames of a clip that the VAE combines into one latent frame
    frame_rate  the number of frames of a clip per second
    """

    guidance: float = 1.0
    downscale: int = 8
    lengths: tuple[int, ...] = ()
    crop: Tensor | None = None
    controls: tuple[Tensor, ...] = ()
    frame_step: int = 1
    frame_rate: float = 1.0


@dataclass(frozen=True)
class SampleSettings:
    """The settings of a sample. They are the size of the picture, the number of denoising steps, the
    guidance scale and the seed.

    frames      the number of frames; 1 for a picture
    frame_rate  the number of frames per second of a video
    """

    size: Size
    steps: int
    guidance: float
    seed: int
    frames: int = 1
    frame_rate: float = 1.0


class Family:
    """A model family. It defines how the denoiser is called, and how the pipeline encodes texts and
    generates pictures.

    The latents of a family are the VAE's latents after a shift and a scale. If the denoiser works
    on tokens, `predict` packs the latents into tokens.

    pipeline               the `_class_name` in model_index.json, which is a class of diffusers
    denoiser               the name of the pipeline's attribute that contains the denoiser, and of
                           the denoiser's folder
    denoiser_folder        the denoiser's folder, if it has another name than the attribute
    objectives             the objectives with which models of this family can be trained
    exact_time_scale       the factor by which `keep_time_exact` multiplies the noise level before
                           its sinusoidal embedding. It is set if the denoiser would round the level
                           to the dtype of its hidden states; otherwise it is None, and the denoiser
                           or `predict` multiplies the level
    latent_side_multiple   each side of the latents must be a multiple of this number of latent
                           pixels; if the denoiser works on tokens, it is the side of one token
    max_text_length        the default limit for the length of a caption, in tokens of the text
                           encoder; None if every caption has the length of CLIP's tokenizer or a
                           multiple of it
    max_clip_windows       the largest number of windows in which CLIP encoders read a caption
    keeps_text_lengths     whether captions are stored without padding; in a batch they are padded
                           to the longest caption, and a `mask` is added
    encoder_parts          the folders of text encoders and tokenizers
    unneeded_parts         the parts of the pipeline that are never loaded
    latents                the conversion between pictures, the latents of the VAE and the latents
                           of the denoiser
    text_output_indices    maps each encoded text to its index in the tuple that the pipeline's
                           `encode_prompt` returns; the names are `text` F[N S D], `pooled` F[N D]
                           and `mask` F[N S]
    text_width_key         the key in the denoiser's configuration that contains D
    text_arguments         maps an argument of the pipeline to an encoded text; the arguments for
                           the negative prompt have the prefix `negative_`
    takes_negative_prompt  whether the pipeline uses a second, negative text for the guidance;
                           otherwise the guidance is a number that the denoiser gets as an input
    loads_lora             whether the pipeline has the method `load_lora_weights`; otherwise an
                           adapter is saved only as a PEFT folder
    comfyui_blocker        why ComfyUI cannot read adapters of this family; empty if it can
    comfyui_prefix         the prefix that ComfyUI uses for the modules of a transformer
    comfyui_names          the parts of module names that have other names in ComfyUI
    original_names         the parts of module names that have other names in the original model;
                           trainers write files with these names. Empty if they are `comfyui_names`
    comfyui_fused          maps the end of a module's name in ComfyUI to the ends of the names of the
                           modules whose weights ComfyUI stores in this module, in the order of their
                           rows
    fuses_unequal_outputs  whether the modules in `comfyui_fused` have different numbers of outputs;
                           then each of them must have an adapter. Otherwise modules without an
                           adapter get zeros
    block_classes          the classes of the denoiser's blocks, if the denoiser's
                           `_no_split_modules` does not list them; blocks can be recomputed, split
                           over processes, and get adapters
    adapted_block_classes  the classes of the modules whose linear layers get an adapter; empty if
                           these are the same as the classes of the blocks
    frozen_layers          parts of the names of layers that get no adapter, because the loss does
                           not depend on them; such a family is trained with adapters only
    guidance_argument      the pipeline's argument for the guidance scale
    frame_rate             the number of frames per second for which the pipeline is made; None if it
                           generates pictures and not videos
    other_denoiser         the folder of a second denoiser, which the pipeline needs for samples
    edits_pictures         whether a row has a picture before the edit; the denoiser then gets the
                           latents of this picture in addition to the noisy latents
    takes_several_controls  whether a row may have several pictures before the edit, also with other
                           aspect ratios than the picture after the edit
    encodes_control        whether the text encoder also reads the pictures before the edit
                           (`encode_instructions`)
    control_text_tokens    the largest number of text tokens of one picture before the edit
    trainable_encoders     the text encoders that are trained if `adapter.text_encoders` is set
    unused_last_layers     the text encoders whose last layer is not used
    """

    pipeline: ClassVar[str]
    denoiser: ClassVar[str] = "transformer"
    denoiser_folder: ClassVar[str] = ""
    objectives: ClassVar[tuple[str, ...]] = FLOW_ONLY
    exact_time_scale: ClassVar[float | None] = None
    latent_side_multiple: ClassVar[int] = 2
    max_text_length: ClassVar[int | None]
    max_clip_windows: ClassVar[int] = 1
    encoder_parts: ClassVar[tuple[str, ...]] = ("text_encoder", "tokenizer")
    unneeded_parts: ClassVar[tuple[str, ...]] = ()
    latents: ClassVar[Latents] = Latents()
    keeps_text_lengths: ClassVar[bool] = False
    text_output_indices: ClassVar[Mapping[str, int]] = {"text": 0}
    text_width_key: ClassVar[str] = "joint_attention_dim"
    text_arguments: ClassVar[Mapping[str, str]] = {"prompt_embeds": "text"}
    takes_negative_prompt: ClassVar[bool] = True
    loads_lora: ClassVar[bool] = True
    comfyui_blocker: ClassVar[str] = ""
    comfyui_prefix: ClassVar[str] = "transformer"
    comfyui_names: ClassVar[Mapping[str, str]] = {}
    original_names: ClassVar[Mapping[str, str]] = {}
    comfyui_fused: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    fuses_unequal_outputs: ClassVar[bool] = False
    block_classes: ClassVar[tuple[str, ...]] = ()
    adapted_block_classes: ClassVar[tuple[str, ...]] = ()
    frozen_layers: ClassVar[tuple[str, ...]] = ()
    guidance_argument: ClassVar[str] = "guidance_scale"
    frame_rate: ClassVar[float | None] = None
    other_denoiser: ClassVar[str] = ""
    edits_pictures: ClassVar[bool] = False
    takes_several_controls: ClassVar[bool] = False
    encodes_control: ClassVar[bool] = False
    control_text_tokens: ClassVar[int] = 0
    trainable_encoders: ClassVar[tuple[str, ...]] = ()
    unused_last_layers: ClassVar[tuple[str, ...]] = ()

    def adapted_classes(self, denoiser: Any) -> tuple[str, ...]:
        """Returns the classes of the modules whose linear layers get an adapter. In an nf4 base
        model, these linear layers are also the ones that are quantised.
        """
        return (
            self.adapted_block_classes
            or self.block_classes
            or tuple(denoiser._no_split_modules or ())
        )

    def noise_range(self, index: Mapping[str, Any]) -> tuple[float, float]:
        """Returns the lowest and the highest noise level at which the pipeline uses the denoiser.
        `index` is the content of its model_index.json.
        """
        return 0.0, 1.0

    def prepare(self, denoiser: Any) -> None:
        """Changes a denoiser object so that it can be trained. Some denoisers do not list their
        blocks, some compute in a wider dtype than declared, and some do not run on the meta device.
        """
        if self.block_classes:
            denoiser._no_split_modules = list(self.block_classes)

    def unused_layers(self, denoiser: Any) -> tuple[str, ...]:
        """Returns the names of layers whose result the denoiser does not use, or the beginnings of
        their names. These layers get no gradient.
        """
        return ()

    def clip_windows(self, clip_length: int, max_length: int) -> int:
        """A CLIP encoder reads a long caption in several windows. Returns their number.

        clip_length  the length of a window, including its begin and end token
        max_length   the largest length of a caption, not including begin and end tokens; 0 if it is
                     not set
        """
        if self.max_clip_windows == 1:
            return 1
        return max(1, max_length // (clip_length - 2))

    def count_text_tokens(self, clip_length: int, max_length: int) -> int:
        """Returns the number of text tokens S.

        clip_length  the length of the CLIP tokenizer's sequences
        max_length   the length of the other text encoder's sequences (T5, a language model)
        """
        return max_length

    def text_shapes(self, config: Config, length: int) -> dict[str, tuple[int, ...]]:
        """Returns the shape of each tensor that `encode_text` returns, without the dimension N.

        config  the denoiser's configuration
        length  S
        """
        shapes: dict[str, tuple[int, ...]] = {"text": (length, int(config[self.text_width_key]))}
        if "pooled" in self.text_output_indices:
            shapes["pooled"] = (int(config["pooled_projection_dim"]),)
        if "mask" in self.text_output_indices or self.keeps_text_lengths:
            shapes["mask"] = (length,)
        return shapes

    def encode_text(
        self, pipe: Any, captions: list[str], *, max_length: int, **options: Any
    ) -> Mapping[str, Any]:
        """Encodes captions with the pipeline's text encoders. Returns a tensor for each name in
        `text_output_indices`. If `keeps_text_lengths` is true, `text` is a list of tensors F[S D]
        instead, and there is no mask.

        options  further arguments of the pipeline's `encode_prompt`
        """
        accepted = inspect.signature(pipe.encode_prompt).parameters
        arguments = {"do_classifier_free_guidance": False, "max_sequence_length": max_length}
        outputs = pipe.encode_prompt(
            captions,
            **{name: value for name, value in arguments.items() if name in accepted},
            **options,
        )
        texts = {text_name: outputs[index] for text_name, index in self.text_output_indices.items()}
        return texts | ({"mask": texts["mask"].to(texts["text"].dtype)} if "mask" in texts else {})

    def encode_instructions(
        self, pipe: Any, captions: list[str], pictures: list[list[Any]]
    ) -> Mapping[str, Sequence[Tensor]]:
        """Encodes each caption together with its pictures before the edit, which are PIL images.
        This method is called only for families with `encodes_control`. Returns the same as
        `encode_text`.
        """
        raise NotImplementedError

    def encode_tokens(self, encoders: Mapping[str, nn.Module], ids_NPS: Tensor) -> Text:
        """Encodes tokens, and computes gradients. This method is called only for families with
        `trainable_encoders`. Returns the same as `encode_text`.

        encoders  the P text encoders, with the names in `trainable_encoders`
        """
        raise NotImplementedError

    def predict(
        self,
        model: Denoiser,
        noisy_NCHW: Tensor,
        time_N: Tensor,
        text: Text,
        conditioning: Conditioning,
    ) -> Tensor:
        """Returns the denoiser's prediction F[N C H W] for `noisy_NCHW` at the time `time_N`, which
        is the result of `Objective.time`.
        """
        raise NotImplementedError

    def text_inputs(self, text: Text, empty: Text) -> dict[str, Any]:
        """Returns the pipeline's arguments for the encoded texts and the encoded negative texts."""
        sides = {"": text, "negative_": empty} if self.takes_negative_prompt else {"": text}
        masked_sides = {sign: {"mask": full_mask(texts)} | texts for sign, texts in sides.items()}
        return {
            sign + name: texts[text_name]
            for sign, texts in masked_sides.items()
            for name, text_name in self.text_arguments.items()
        }

    def extra_arguments(
        self, pipe: Any, size: Size, controls: tuple[Tensor, ...]
    ) -> dict[str, Any]:
        """Returns the other arguments of the pipeline, in addition to texts, size, steps, guidance
        and generator.

        size      the size of the picture in pixels
        controls  F[1 C H W]  the latents of each picture before the edit
        """
        return {}

    def video_arguments(self, settings: SampleSettings) -> dict[str, Any]:
        """Returns the pipeline's arguments for the frames of a video. There are none if the pipeline
        generates pictures.
        """
        return {}

    def output_latents(self, pipe: Any, output: Tensor, size: Size) -> Tensor:
        """Converts the pipeline's output for pictures of this size to latents F[N C H W]. The
        latents have the scale that the denoiser expects.
        """
        return output

    def sample(
        self,
        pipe: Any,
        text: Text,
        empty: Text,
        settings: SampleSettings,
        generator: Any,
        controls: tuple[Tensor, ...] = (),
    ) -> Tensor:
        """Generates latents F[N C H W] from noise with the pipeline's denoising loop. The latents
        have the scale that the denoiser expects.

        empty     the encoded negative text
        controls  the latents of each picture before the edit
        """
        arguments = {
            "height": settings.size.height,
            "width": settings.size.width,
            "num_inference_steps": settings.steps,
            self.guidance_argument: settings.guidance,
            "generator": generator,
        }
        arguments |= self.text_inputs(text, empty) | self.extra_arguments(
            pipe, settings.size, controls
        )
        arguments |= self.video_arguments(settings)
        return self.output_latents(
            pipe, pipe(**arguments, output_type="latent", return_dict=False)[0], settings.size
        )


MASK_ARGUMENTS = {"prompt_embeds": "text", "prompt_attention_mask": "mask"}
POOLED_ARGUMENTS = {"prompt_embeds": "text", "pooled_prompt_embeds": "pooled"}


def replace_positions_in_plan(
    table: nn.Module, empty_positions: Callable[..., Any], weight: Tensor
) -> None:
    """In a memory plan, replaces the computation of a table of positions by `empty_positions`. The
    computation of ERNIE-Image and Ideogram 4 switches autocast off for its device, and PyTorch does
    not support this for the meta device.

    weight  a weight of the denoiser; it is on the meta device in a memory plan
    """
    if weight.is_meta:
        InstanceMethod(empty_positions, table).install()


def denoiser_config(model: Any) -> Any:
    """Returns the denoiser's configuration. The denoiser may have an adapter."""
    return (model.get_base_model() if hasattr(model, "get_base_model") else model).config


def full_mask(text: Text) -> Tensor:
    """Returns a mask bool[N S] that includes every token. This is for captions without padding."""
    return text["text"].new_ones(text["text"].shape[:2]).bool()


def latents_to_tokens(latents_NCHW: Tensor) -> Tensor:
    """Arranges latents as tokens F[N T C]. There is one token for each latent pixel."""
    return latents_NCHW.flatten(2).transpose(1, 2)


def tokens_to_latents(tokens_NTC: Tensor, height: int, width: int) -> Tensor:
    """The inverse of `latents_to_tokens`. Returns latents F[N C H W]."""
    count, _, channels = tokens_NTC.shape
    return tokens_NTC.transpose(1, 2).reshape(count, channels, height, width)


# --- pipelines of diffusers that are not trained, with the reason that the error names

_VIDEO = (
    "it makes videos; of the pipelines for videos, WanPipeline, LTXPipeline and"
    " LTX2Pipeline are trained"
)

# class of a diffusers pipeline -> the reason why it cannot be trained
REFUSED: dict[str, str] = {
    "StableDiffusionInstructPix2PixPipeline": (
        "its U-Net gets both pictures as channels; use FluxKontextPipeline, which trains on pairs"
    ),
    "FluxFillPipeline": (
        "it fills masked parts of pictures, which Isotype cannot train; use FluxPipeline"
    ),
    "Flux2KleinInpaintPipeline": (
        "it fills masked parts of pictures, which Isotype cannot train; use Flux2KleinPipeline"
    ),
    "Flux2KleinKVPipeline": (
        "its denoiser keeps the keys and values of the picture before the edit; use"
        " Flux2KleinPipeline, which trains on pairs"
    ),
    "LongCatImageEditPipeline": "diffusers has no loader for its LoRAs; use LongCatImagePipeline",
    "QwenImage21Pipeline": "its denoiser and its VAE are not supported yet; use QwenImagePipeline",
    "FluxControlPipeline": "it needs a second picture (depth, edges) as input; use FluxPipeline",
    "StableDiffusionControlNetPipeline": "Isotype trains the denoiser, but no ControlNet",
    "StableDiffusionXLInpaintPipeline": (
        "it fills masked parts of pictures, which Isotype cannot train; use"
        " StableDiffusionXLPipeline"
    ),
    "StableDiffusionXLImg2ImgPipeline": (
        "the refiner needs a picture as input; use StableDiffusionXLPipeline"
    ),
    "SanaSprintPipeline": ("it is distilled to a few steps with a special loss; use SanaPipeline"),
    "StableCascadePriorPipeline": "it runs two denoisers, one after the other",
    "KolorsPipeline": "its text encoder is not part of transformers",
    "HunyuanDiTPipeline": "its captions have two masks and a style, which Isotype does not support",
    "WanImageToVideoPipeline": "its video continues a picture; use WanPipeline, which trains on clips",
    "LTXImageToVideoPipeline": "its video continues a picture; use LTXPipeline, which trains on clips",
    "LTX2ImageToVideoPipeline": (
        "its video continues a picture; use LTX2Pipeline, which trains on clips"
    ),
    "LTX2ConditionPipeline": (
        "its video continues pictures or clips; use LTX2Pipeline, which trains on clips"
    ),
    "Kandinsky5T2VPipeline": _VIDEO,
    "Kandinsky5I2VPipeline": _VIDEO,
    "HunyuanVideoPipeline": _VIDEO,
    "CogVideoXPipeline": _VIDEO,
    "MochiPipeline": _VIDEO,
}
