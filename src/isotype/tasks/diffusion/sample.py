"""Makes pictures during training, with the model's own pipeline, under the run's precision. They do
not change training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...config.sources import unknown_key
from ...distributed.world import ALONE, World
from ...dtypes import to_torch
from ...errors import UsageError
from ...precision.apply import generating, inner_model
from ...precision.precision import Precision
from ...training.task import eval_mode, preserve_random_state
from .batches import generator_of
from .encode import Encoder, Said, release
from .families import Family, SampleSettings
from .picture_files import InFile
from .pipeline import PipelineFolder
from .pixels import BadPicture, Size, Window, as_png, open_as_shown, pixels, small


@dataclass(frozen=True)
class Sample:
    """png  the picture's file"""

    prompt: str
    size: int
    png: bytes

    @property
    def file(self) -> tuple[str, bytes]:
        return ".png", self.png

    def to_dict(self) -> dict[str, Any]:
        return {
            "prompt": self.prompt,
            "answer": f"a picture of {self.size} x {self.size}",
            "reference": None,
        }

    def lines(self) -> tuple[str, str]:
        return self.prompt, f"a picture of {self.size} x {self.size}"


@dataclass(frozen=True)
class Prompt:
    """One entry of `run.samples`. own: what it sets of `Drawing`. With a seed of its own a
    picture's noise depends on that alone.

    control  file of the picture before the edit
    """

    text: str
    negative: str = ""
    own: Mapping[str, Any] = field(default_factory=dict)
    control: Path | None = None

    @classmethod
    def of(cls, given: str | Mapping[str, Any], where: str = "run.samples") -> Prompt:
        """Raises  UsageError for a mapping with other keys or values"""
        if isinstance(given, str):
            return cls(given)
        for key in given:
            if key not in _KINDS:
                raise unknown_key(where, str(key), list(_KINDS))
        if "prompt" not in given:
            raise UsageError(
                f"{where}: {dict(given)}: prompt is missing",
                fix="{prompt: a photo of a dog, seed: 7}",
            )
        for key, value in given.items():
            if (
                not isinstance(value, _KINDS[key])
                or isinstance(value, bool)
                or (key in ("size", "steps") and value < 1)
            ):
                raise UsageError(
                    f"{where}: {key}: {value!r}: expected"
                    f" {'text' if _KINDS[key] is str else 'a number'}"
                )
        own = {key: given[key] for key in ("size", "steps", "guidance", "seed") if key in given}
        control = Path(given["control"]).expanduser() if "control" in given else None
        return cls(given["prompt"], given.get("negative", ""), own, control)

    @property
    def shown(self) -> str:
        if self.control is None:
            return self.text
        return f"{self.text} ({self.control.name})"

    def drawing(self, how: SampleSettings) -> SampleSettings:
        return replace(how, **self.own)


_KINDS: dict[str, Any] = {
    "prompt": str,
    "control": str,
    "negative": str,
    "size": int,
    "steps": int,
    "guidance": (int, float),
    "seed": int,
}


def sample(
    model: nn.Module,
    folder: PipelineFolder,
    precision: Precision,
    prompts: Sequence[tuple[Prompt, dict[str, Tensor], dict[str, Tensor]]],
    how: SampleSettings,
    device: torch.device,
    *,
    world: World = ALONE,
) -> Iterator[Sample]:
    """A picture a prompt, each as it is drawn. Its noise depends on the seed and the prompt's
    position only.

    prompts  each with its embeddings and those of what it is guided away from
    world    the processes that share the model and call this together: all draw the same pictures
    """
    dtype = to_torch(precision.latents)
    with preserve_random_state(), eval_mode(model), generating(model):
        vae = folder.vae(to_torch(precision.vae)).to(device).eval()
        pipe = folder.pipeline_for_sampling(inner_model(model), vae)
        for i, (prompt, text, negative) in enumerate(prompts):
            words = [
                {name: tensor[None].to(device) for name, tensor in one.items()}
                for one in (text, negative)
            ]
            if "ids" in text:
                words = [inner_model(model)(None, None, one) for one in words]
            # the pipeline takes its latents' dtype from the text's
            given, none = (
                {name: tensor.to(dtype) for name, tensor in one.items()} for one in words
            )
            own = prompt.drawing(how)
            generator = generator_of("sample", own.seed, 0 if "seed" in prompt.own else i)
            before = None
            if prompt.control is not None:
                x_1CHW = pixels(prompt.control.read_bytes(), Window(Size(own.size, own.size)))[
                    None
                ].to(device, vae.dtype)
                before = folder.family.latents.encode(vae, x_1CHW)[0].to(dtype)
            latents_1CHW = folder.family.sample(pipe, given, none, own, generator, before)
            picture_CHW = folder.family.latents.decode(vae, latents_1CHW)[0]
            yield Sample(prompt.shown, picture_CHW.shape[-1], as_png(picture_CHW.float()))
        del pipe, vae
    release(device)


def texts_of(prompts: Sequence[Prompt], encoder: Encoder) -> list[Said]:
    """What is encoded for them: of each its text, and what is guided away from."""
    found = []
    for prompt in prompts:
        control = None if prompt.control is None else InFile(prompt.control)
        found += [encoder.said(text, control) for text in (prompt.text, prompt.negative)]
    return found


def refuse_prompts(prompts: Sequence[Prompt], family: Family) -> None:
    """Raises  UsageError for a prompt of a model that edits without a picture, or with one that
    cannot be read, and for one of another
    """
    for prompt in prompts:
        if prompt.control is None and family.edits_pictures:
            raise UsageError(
                f"run.samples: {prompt.text!r}: {family.pipeline} edits a picture, and control is"
                " missing",
                fix=(
                    "{prompt: make it red, control: before.png}; isotype sample: --control"
                    " before.png"
                ),
            )
        if prompt.control is not None and not family.edits_pictures:
            raise UsageError(
                f"run.samples: control: has no effect: {family.pipeline} draws from captions here"
            )
        if prompt.control is not None:
            try:
                open_as_shown(prompt.control.read_bytes())
            except (OSError, BadPicture) as error:
                reason = error.strerror if isinstance(error, OSError) else error
                raise UsageError(f"run.samples: control: {prompt.control}: {reason}") from None


def before_edits(prompts: Sequence[Prompt]) -> dict[str, str]:
    """Prompt as the report shows it -> the picture that it edits, small."""
    return {
        prompt.shown: small(prompt.control.read_bytes())
        for prompt in prompts
        if prompt.control is not None
    }
