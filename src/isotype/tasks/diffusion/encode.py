"""Captions and pictures through the pipeline's own encoders, once, into the store. Both are gone before the denoiser is loaded."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...data.progress import Meter, watched
from ...dtypes import name, to_torch
from ...errors import UsageError
from ...precision.precision import Precision
from .batches import Row
from .pictures import SHOWN, Picture
from .pipeline_folder import PipelineFolder
from .pixels import BadPicture, pixels
from .store import Store, fingerprint, key_of, libraries

AT_ONCE = 8  # captions in one pass of the text encoders


@dataclass
class Encoder:
    """One run's encoding.

    text_length  longest caption in T5 tokens
    observed     (role, tensor) -> dtype, of what ran; `made` and `kept` count entries made now and found
    """

    folder: PipelineFolder
    precision: Precision
    device: torch.device
    store: Store
    text_length: int
    resolution: int
    observed: dict[tuple[str, str], str] = field(default_factory=dict)
    made: int = 0
    kept: int = 0

    def captions(self, captions: Sequence[str]) -> dict[str, str]:
        """caption -> key of its embeddings."""
        parts = [part for part in self.folder.family.encoders if (self.folder.path / part).is_dir()]
        shaped = {
            "what": "text", "pipeline": self.folder.family.pipeline, "length": self.text_length, "dtype": self.precision.text_encoder,
            "device": self.device.type, "parts": {part: fingerprint(self.folder.files(part)) for part in parts}, **libraries(),
        }  # fmt: skip
        keys = {caption: key_of([shaped, caption]) for caption in captions}
        missing = self._missing(keys)
        if missing:
            self._encode_captions(missing, keys)
        return keys

    def _encode_captions(self, missing: Sequence[str], keys: Mapping[str, str]) -> None:
        pipe = self.folder.pipeline(to_torch(self.precision.text_encoder), vae=None, **{self.folder.denoiser_part: None})
        # a pipeline that lacks an encoder asks the denoiser for its widths
        setattr(pipe, self.folder.denoiser_part, self.folder.denoiser_outline())
        for part in self.folder.family.encoders:
            encoder = getattr(pipe, part, None)
            if isinstance(encoder, torch.nn.Module):
                encoder.to(self.device).requires_grad_(False)
                self._note("text_encoder", f"weights of {part}", next(encoder.parameters()).dtype)
        meter = Meter(total=len(missing))
        with torch.no_grad():
            for start in watched(range(0, len(missing), AT_ONCE), "encoding captions", meter):
                some = list(missing[start : start + AT_ONCE])
                made = self.folder.family.encode_text(pipe, some, max_length=self.text_length)
                for what, tensor in made.items():
                    self._note("text_encoder", f"{what} embeddings", tensor.dtype)
                for i, caption in enumerate(some):
                    self.store.put(keys[caption], {what: tensor[i] for what, tensor in made.items()})
                meter.done += len(some)
        del pipe, encoder
        release(self.device)

    def pictures(self, pictures: Sequence[Picture], text: Mapping[str, str], *, flip: bool) -> list[Row]:
        """The rows of pictures. Raises UsageError naming every one that cannot be read; the others are kept for the next run."""
        shaped = {
            "what": "latents", "resolution": self.resolution, "dtype": self.precision.vae, "device": self.device.type,
            "vae": fingerprint(self.folder.files("vae")), **libraries(),
        }  # fmt: skip
        content = {picture.path: fingerprint([picture.path]) for picture in pictures}
        rows, todo = [], dict[str, tuple[Picture, bool]]()
        for picture in pictures:
            keys = [key_of([shaped, content[picture.path], mirrored]) for mirrored in ((False, True) if flip else (False,))]
            todo |= {key: (picture, mirrored) for mirrored, key in zip((False, True), keys)}
            rows.append(Row(keys[0], keys[1] if flip else None, text[picture.caption]))
        missing = self._missing({key: key for key in todo})
        if missing:
            self._encode_pictures({key: todo[key] for key in missing})
        return rows

    def _encode_pictures(self, todo: Mapping[str, tuple[Picture, bool]]) -> None:
        vae = self.folder.vae(to_torch(self.precision.vae)).to(self.device).eval().requires_grad_(False)
        self._note("vae", "weights", next(vae.parameters()).dtype)
        bad: dict[str, str] = {}
        meter = Meter(total=len(todo))
        with torch.no_grad():
            for key, (picture, mirrored) in watched(todo.items(), "encoding pictures", meter):
                meter.done += 1
                try:
                    x_1CHW = pixels(picture.path.read_bytes(), resolution=self.resolution)[None].to(self.device, vae.dtype)
                except (BadPicture, OSError) as error:
                    bad[picture.where] = f"images: {picture.where}: {error}"
                    continue
                found: Any = vae.encode(x_1CHW.flip(-1) if mirrored else x_1CHW).latent_dist
                self._note("vae", "posterior", found.mean.dtype)
                self.store.put(key, {"mean": found.mean[0], "std": found.std[0]})
        del vae
        release(self.device)
        if bad:
            more = [f"and {len(bad) - SHOWN} more"] if len(bad) > SHOWN else []
            raise UsageError(
                "\n".join([*list(bad.values())[:SHOWN], *more]), fix="replace or remove these files; the others are encoded already"
            )

    def _missing(self, keys: Mapping[str, str]) -> list[str]:
        missing = [what for what, key in keys.items() if not self.store.has(key)]
        self.made, self.kept = self.made + len(missing), self.kept + len(keys) - len(missing)
        return missing

    def _note(self, role: str, tensor: str, dtype: torch.dtype) -> None:
        self.observed[role, tensor] = name(dtype)


def release(device: torch.device) -> None:
    """Gives the memory of what was let go back before the denoiser takes its own."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def latent(entry: Mapping[str, Tensor], config: Mapping[str, Any], *, eps: Tensor | None) -> Tensor:
    """A latent as the denoiser sees it, fp32[C H W]: the posterior's mean, plus `eps` standard deviations, shifted and scaled by the VAE's
    configuration."""
    z = entry["mean"].float()
    if eps is not None:
        z = z + entry["std"].float() * eps
    return (z - float(config.get("shift_factor") or 0.0)) * float(config.get("scaling_factor", 1.0))
