"""Generates sample pictures during training. It uses the model's diffusers pipeline and the run's
precision. Sampling does not change the training.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...config.schema import RunConfig
from ...config.sources import unknown_key
from ...distributed.world import ALONE, World
from ...dtypes import to_torch
from ...errors import UsageError
from ...precision.apply import inner_model, use_generate_dtype
from ...precision.precision import Precision
from ...training.task import eval_mode, preserve_random_state
from ...wording import pluralise
from .batches import row_generator
from .denoiser import load_for_samples
from .encode import Encoder, TextInput, free_memory
from .families import Family, SampleSettings
from .picture_files import FileContent
from .picture_sizes import Size, Window, have_same_shape, reference_window
from .pipeline import PipelineFolder
from .pixels import (
    BadPicture,
    displayed_size,
    encode_png,
    encode_webp,
    open_displayed,
    read_pixels,
    thumbnail_url,
)


@dataclass(frozen=True)
class Sample:
    """A sample. It is a picture, or a video.

    settings  its size, steps, guidance, seed and frames
    content   the content of its file. A picture is a PNG file, and a video is an animated WebP file
    """

    prompt: str
    settings: SampleSettings
    content: bytes

    @property
    def file(self) -> tuple[str, bytes]:
        return ".png" if self.settings.frames == 1 else ".webp", self.content

    def to_dict(self) -> dict[str, Any]:
        return {
            "prompt": self.prompt,
            "answer": self.description,
            "reference": None,
        }

    def lines(self) -> tuple[str, str]:
        return self.prompt, self.description

    @property
    def description(self) -> str:
        """The settings with which the picture was drawn, width before height."""
        settings = self.settings
        frames = "" if settings.frames == 1 else f"{settings.frames} frames of "
        return (
            f"{frames}{settings.size.width} x {settings.size.height} pixels,"
            f" {pluralise(settings.steps, 'step')}, guidance {settings.guidance:g},"
            f" seed {settings.seed}"
        )


@dataclass(frozen=True)
class Prompt:
    """One entry of `run.samples`.

    negative   the negative text, which says what the picture should not show
    overrides  the fields of `SampleSettings` that this prompt sets itself. If it sets a seed, the
               noise of its picture depends only on this seed.
    controls   the files of the pictures before the edit
    """

    text: str
    negative: str = ""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    controls: tuple[Path, ...] = ()

    @classmethod
    def parse(cls, entry: str | Mapping[str, Any], setting: str = "run.samples") -> Prompt:
        """Parses an entry of `run.samples`. Raises UsageError if a key is unknown or a value is not
        valid.
        """
        if isinstance(entry, str):
            return cls(entry)
        for key in entry:
            if key not in _VALUE_TYPES:
                raise unknown_key(setting, str(key), list(_VALUE_TYPES))
        if "prompt" not in entry:
            raise UsageError(
                f"{setting}: {dict(entry)}: prompt is missing",
                fix="{prompt: a photo of a dog, seed: 7}",
            )
        for key, value in entry.items():
            if key == "size":
                if Size.parse(value) is None:
                    raise UsageError(
                        f"{setting}: size: {value!r}: expected a side or WIDTHxHEIGHT in pixels",
                        fix="size: 832x1216",
                    )
            elif key == "control":
                if not all(isinstance(file, str) and file for file in _list_files(value)):
                    raise UsageError(
                        f"{setting}: control: {value!r}: expected a file or a list of files"
                    )
            elif (
                not isinstance(value, _VALUE_TYPES[key])
                or isinstance(value, bool)
                or (key in ("steps", "frames") and value < 1)
            ):
                raise UsageError(
                    f"{setting}: {key}: {value!r}: expected"
                    f" {'text' if _VALUE_TYPES[key] is str else 'a number'}"
                )
        overrides = {key: entry[key] for key in _OVERRIDES if key in entry}
        if "size" in entry:
            overrides["size"] = Size.parse(entry["size"])
        controls = tuple(Path(file).expanduser() for file in _list_files(entry.get("control", [])))
        return cls(entry["prompt"], entry.get("negative", ""), overrides, controls)

    @property
    def label(self) -> str:
        if not self.controls:
            return self.text
        return f"{self.text} ({', '.join(control.name for control in self.controls)})"

    def settings(self, defaults: SampleSettings) -> SampleSettings:
        return replace(defaults, **self.overrides)


def _list_files(value: Any) -> list[Any]:
    """Returns the files of the key `control`, which is one file or a list of files."""
    return value if isinstance(value, list) else [value]


# key of an entry of `run.samples` -> the type of its value
_VALUE_TYPES: dict[str, Any] = {
    "prompt": str,
    "control": (str, list),
    "negative": str,
    "size": (int, str),
    "steps": int,
    "frames": int,
    "guidance": (int, float),
    "seed": int,
}
# keys of an entry that replace a setting of the samples
_OVERRIDES = ("steps", "frames", "guidance", "seed")


def sample(
    model: nn.Module,
    folder: PipelineFolder,
    config: RunConfig,
    precision: Precision,
    prompts: Sequence[tuple[Prompt, dict[str, Tensor], dict[str, Tensor]]],
    settings: SampleSettings,
    device: torch.device,
    *,
    world: World = ALONE,
) -> Iterator[Sample]:
    """Generates one picture or video for each prompt, and yields it when it is complete. Its noise
    depends only on the seed and on the position of its prompt. If the pipeline has a second
    denoiser, it is loaded first and freed at the end.

    prompts  the prompts, each with the embeddings of its text and of its negative text
    world    the processes that share the model and call this together; all generate the same
             pictures
    """
    dtype = to_torch(precision.latents)
    with ExitStack() as stack:
        stack.enter_context(preserve_random_state())
        stack.enter_context(eval_mode(model))
        stack.enter_context(use_generate_dtype(model))
        vae = folder.vae(to_torch(precision.vae)).to(device).eval()
        denoiser: Any = inner_model(model)
        other = None
        if (other_folder := folder.for_other_expert()) is not None:
            other = load_for_samples(other_folder, config, precision, device).eval()
            stack.enter_context(use_generate_dtype(other))
        pipe = folder.pipeline_for_sampling(denoiser, vae, other_denoiser=other)
        for i, (prompt, text, negative) in enumerate(prompts):
            texts = [
                {name: tensor[None].to(device) for name, tensor in tensors.items()}
                for tensors in (text, negative)
            ]
            if "ids" in text:
                texts = [inner_model(model)(None, None, tensors) for tensors in texts]
            # the pipeline gives its latents the dtype of the text embeddings
            prompt_text, negative_text = (
                {name: tensor.to(dtype) for name, tensor in tensors.items()} for tensors in texts
            )
            prompt_settings = prompt.settings(settings)
            generator = row_generator(
                "sample", prompt_settings.seed, 0 if "seed" in prompt.overrides else i
            )
            controls = []
            for file in prompt.controls:
                window = _control_window(file, folder, prompt_settings.size)
                x_1CHW = read_pixels(file.read_bytes(), window)[None].to(device, vae.dtype)
                controls.append(folder.family.latents.encode(vae, x_1CHW)[0].to(dtype))
            latents = folder.family.sample(
                pipe, prompt_text, negative_text, prompt_settings, generator, tuple(controls)
            )
            picture = folder.family.latents.decode(vae, latents)[0].float()
            if prompt_settings.frames == 1:
                content = encode_png(picture)
            else:
                content = encode_webp(picture, prompt_settings.frame_rate)
            yield Sample(prompt.label, prompt_settings, content)
        del pipe, vae, other
    free_memory(device)


def _control_window(file: Path, folder: PipelineFolder, size: Size) -> Window:
    """Returns the window of a picture before the edit, for a sample of this size. It is the window
    of the sample. If the picture has another aspect ratio, and the model was trained on such
    pictures, the window has the aspect ratio of the picture.
    """
    family = folder.family
    control_size = displayed_size(file.read_bytes())
    is_like_sample = have_same_shape((size.width, size.height), control_size)
    if is_like_sample or not family.takes_several_controls:
        return Window(size)
    multiple = family.latents.downscale(folder.config("vae")) * family.latent_side_multiple
    return reference_window(*control_size, side=math.isqrt(size.area), multiple=multiple)


def prompt_text_inputs(prompts: Sequence[Prompt], encoder: Encoder) -> list[TextInput]:
    """Returns the inputs of the text encoder for these prompts. These are the text and the negative
    text of each prompt.
    """
    inputs = []
    for prompt in prompts:
        controls = tuple(map(FileContent, prompt.controls))
        inputs += [encoder.text_input(text, controls) for text in (prompt.text, prompt.negative)]
    return inputs


def refuse_prompts(prompts: Sequence[Prompt], family: Family) -> None:
    """Checks the pictures of prompts. If the model edits pictures, raises UsageError for a prompt
    without a readable picture. If it does not, raises UsageError for a prompt with a picture.
    """
    for prompt in prompts:
        if not prompt.controls and family.edits_pictures:
            raise UsageError(
                f"run.samples: {prompt.text!r}: {family.pipeline} edits a picture, and control is"
                " missing",
                fix=(
                    "{prompt: make it red, control: before.png}; isotype sample: --control"
                    " before.png"
                ),
            )
        if prompt.controls and not family.edits_pictures:
            raise UsageError(
                f"run.samples: control: has no effect: {family.pipeline} draws from captions here"
            )
        if len(prompt.controls) > 1 and not family.takes_several_controls:
            raise UsageError(
                f"run.samples: {prompt.text!r}: {family.pipeline} edits one picture, and control"
                f" has {len(prompt.controls)}"
            )
        for control in prompt.controls:
            try:
                open_displayed(control.read_bytes())
            except (OSError, BadPicture) as error:
                reason = error.strerror if isinstance(error, OSError) else error
                raise UsageError(f"run.samples: control: {control}: {reason}") from None


def control_thumbnails(prompts: Sequence[Prompt]) -> dict[str, list[str]]:
    """Returns a mapping from each prompt's label in the report to thumbnails of the pictures that
    the prompt edits.
    """
    return {
        prompt.label: [thumbnail_url(control.read_bytes()) for control in prompt.controls]
        for prompt in prompts
        if prompt.controls
    }
