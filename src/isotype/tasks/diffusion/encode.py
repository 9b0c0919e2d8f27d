"""Encodes captions and pictures once with the pipeline's encoders, into a store. The encoders are
freed before the denoiser is loaded.

Latents and text embeddings lie each under a key of everything that shaped it, in memory or in a
folder of limited size. A file is written under another name and renamed, so that a killed run
leaves complete entries only, which the next run uses.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from ...data.cache import bound, cache_folder, evict
from ...data.progress import watched
from ...dtypes import name, to_torch
from ...errors import RunError, UsageError
from ...precision.precision import Precision
from .batches import Row
from .picture_files import Content, Picture, fingerprint
from .pictures import BadPictures
from .pipeline import PipelineFolder
from .pixels import (
    BadPicture,
    RunSizes,
    Window,
    bucket_of,
    cut_of,
    mask_pixels,
    of_control,
    open_as_shown,
    pixels,
    refuse_other_shape,
    shown_size,
    windows,
)
from .text_encoders import tokens_of


class Said(NamedTuple):
    """What a text encoder is given: a caption, and the picture before the edit where the family's
    encoder sees it.
    """

    caption: str
    control: Content | None = None


VERSION = 4  # raise it whenever the same picture or caption gives other tensors


def key_of(parts: Any) -> str:
    """The name of an entry: a hash of what shaped it."""
    return hashlib.sha256(
        json.dumps([VERSION, parts], sort_keys=True, default=str).encode()
    ).hexdigest()[:32]


class Store:
    """folder  where entries lie; None: in memory, for this run only"""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._memory: dict[str, dict[str, Tensor]] = {}
        self._used: set[str] = set()

    @classmethod
    def of(cls, setting: str) -> Store:
        """The store of `images.cache`. In `auto` it lies beside the cache of tokens."""
        folder = cache_folder(setting)
        return cls(
            folder.parent / "pictures" if folder is not None and setting == "auto" else folder
        )

    def has(self, key: str) -> bool:
        """Whether there is a whole entry; one that is damaged is removed, so that it is made again."""
        if self.folder is None:
            return key in self._memory
        path = self._path(key)
        try:
            load(path.read_bytes())
            os.utime(path)  # records the last use, since entries are removed by age
        except FileNotFoundError:
            return False
        except (OSError, SafetensorError, ValueError):
            path.unlink(missing_ok=True)
            return False
        self._used.add(key)
        return True

    def put(self, key: str, tensors: Mapping[str, Tensor]) -> None:
        """Raises  UsageError where the disk refuses."""
        stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        if self.folder is None:
            self._memory[key] = stored
            return
        path = self._path(key)
        aside = path.with_name(f".{key}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            aside.write_bytes(save(stored))
            os.replace(aside, path)
        except OSError as error:
            raise UsageError(
                f"images.cache: {self.folder}: {error.strerror or error}",
                fix="free space, images.cache: FOLDER, or images.cache: none",
            ) from None
        finally:
            aside.unlink(missing_ok=True)
        self._used.add(key)

    def get(self, key: str) -> dict[str, Tensor]:
        """Raises  RunError when the entry went while the run was running."""
        if self.folder is None:
            return self._memory[key]
        try:
            return load(self._path(key).read_bytes())
        except (OSError, SafetensorError, ValueError) as error:
            raise RunError(
                f"images.cache: {self._path(key)}: {str(error).splitlines()[0]}",
                fix="resume: what is missing is made again",
            ) from None

    def hold_to_bound(self) -> None:
        """Removes entries of other runs until the folder is within its bound. Raises UsageError
        where this run alone takes more.
        """
        if self.folder is None or not self._used:
            return
        total = sum(self._path(key).stat().st_size for key in self._used)
        if total > bound():
            raise UsageError(
                f"images.cache: {self.folder}: this run's latents and embeddings take"
                f" {total / 1e9:.1f} GB of {bound() / 1e9:.1f}",
                fix=f"ISOTYPE_CACHE_GB={total / 1e9 + 1:.0f}, or a smaller images.resolution",
            )
        evict(self.folder, keep=self._path(next(iter(self._used))))

    def _path(self, key: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{key}.safetensors"


def libraries() -> dict[str, str]:
    """The versions that shape what an encoder gives."""
    import diffusers
    import PIL
    import transformers

    return {
        library.__name__: library.__version__ for library in (torch, diffusers, transformers, PIL)
    }


Key = TypeVar("Key", str, Said)
AT_ONCE = 8  # captions in one pass of the text encoders


class _Todo(NamedTuple):
    picture: Picture
    window: Window
    mirrored: bool


@dataclass
class Encoder:
    """One run's encoding.

    text_length  longest caption in T5 tokens
    tokens       captions are kept as the tokens of encoders that are trained
                 (`text_encoders.tokens_of`)
    observed     (role, tensor) -> dtype, of what ran; `made` and `found` count the entries made now
                 and those found in the store
    """

    folder: PipelineFolder
    precision: Precision
    device: torch.device
    store: Store
    text_length: int
    tokens: bool = False
    observed: dict[tuple[str, str], str] = field(default_factory=dict)
    made: int = 0
    found: int = 0

    def said(self, caption: str, control: Content | None) -> Said:
        """`control`: the picture before the edit; None: of a model that does not edit."""
        return Said(caption, control if self.folder.family.encodes_control else None)

    def captions(self, said: Sequence[Said]) -> dict[Said, str]:
        """The key of the embeddings of each."""
        wanted = [
            part
            for part in self.folder.family.encoder_parts
            if not (self.tokens and part in self.folder.family.trainable_encoders)
        ]
        parts = [part for part in wanted if (self.folder.path / part).is_dir()]
        shaped = {
            "what": "tokens" if self.tokens else "text",
            "pipeline": self.folder.family.pipeline,
            "length": self.text_length,
            "dtype": self.precision.text_encoder,
            "device": self.device.type,
            "parts": {part: fingerprint(self.folder.files(part)) for part in parts},
            **libraries(),
        }
        keys = {
            one: key_of(
                [shaped, one.caption, *([one.control.fingerprint()] if one.control else [])]
            )
            for one in said
        }
        missing = self._missing(keys)
        if missing:
            (self._keep_tokens if self.tokens else self._encode_captions)(missing, keys)
        return keys

    def _keep_tokens(self, missing: Sequence[Said], keys: Mapping[Said, str]) -> None:
        family = self.folder.family
        pipe = self.folder.pipeline(
            torch.float32,
            vae=None,
            **dict.fromkeys((self.folder.denoiser_part, *family.trainable_encoders)),
        )
        for one in missing:
            self.store.put(
                keys[one],
                {
                    what: tensor[0]
                    for what, tensor in tokens_of(pipe, [one.caption], family).items()
                },
            )

    def _encode_captions(self, missing: Sequence[Said], keys: Mapping[Said, str]) -> None:
        family = self.folder.family
        pipe = self.folder.pipeline(
            to_torch(self.precision.text_encoder), vae=None, **{self.folder.denoiser_part: None}
        )
        # a pipeline that lacks an encoder asks the denoiser for its widths
        setattr(pipe, self.folder.denoiser_part, self.folder.denoiser_outline())
        if family.encodes_control:
            pipe.processor = self.folder.processor(pipe.tokenizer)
        for part in family.encoder_parts:
            encoder = getattr(pipe, part, None)
            if isinstance(encoder, torch.nn.Module):
                encoder.to(self.device).requires_grad_(False)
                self._note("text_encoder", f"weights of {part}", next(encoder.parameters()).dtype)
        with torch.no_grad():
            for start in watched(range(0, len(missing), AT_ONCE), "encoding captions"):
                some = list(missing[start : start + AT_ONCE])
                made: Mapping[str, Sequence[Tensor] | Tensor]
                if family.encodes_control:
                    some, pictures = _readable(some)
                    made = family.encode_instructions(pipe, [one.caption for one in some], pictures)
                else:
                    made = family.encode_text(
                        pipe, [one.caption for one in some], max_length=self.text_length
                    )
                for what, tensor in made.items() if some else ():
                    self._note("text_encoder", f"{what} embeddings", tensor[0].dtype)
                for i, one in enumerate(some):
                    self.store.put(keys[one], {what: tensor[i] for what, tensor in made.items()})
        del pipe, encoder
        release(self.device)

    def pictures(
        self,
        pictures: Sequence[Picture],
        text: Mapping[Said, str],
        sizes: RunSizes,
        bad: BadPictures,
        *,
        seed: int,
    ) -> list[list[Row]]:
        """The rows of each picture, one for each repeat; none for a bad one, which is added to
        `bad`.
        """
        shaped = {
            "what": "latents",
            "dtype": self.precision.vae,
            "device": self.device.type,
            "vae": fingerprint(self.folder.files("vae")),
            **libraries(),
        }
        rows: list[list[Row]] = []
        todo = dict[str, _Todo]()
        for picture in watched(pictures, "reading pictures"):
            try:
                windows = self._windows(picture, shaped, sizes, seed)
            except (BadPicture, OSError) as error:
                bad.add(picture.where, _reason(error))
                rows.append([])
                continue
            plain, mirrored = (
                [key for key, one in windows.items() if one.mirrored is side]
                for side in (False, True)
            )
            todo |= windows
            row = Row(
                tuple(plain),
                tuple(mirrored),
                tuple(text[self.said(caption, picture.control)] for caption in picture.captions),
                next(iter(windows.values())).window.size,
                picture.weight,
                text.get(self.said("", picture.control), ""),
            )
            rows.append([row] * picture.repeats)
        missing = self._missing({key: key for key in todo})
        if missing:
            refused = self._encode_pictures({key: todo[key] for key in missing}, bad)
        else:
            refused = set()
        return [
            [row for row in some if refused.isdisjoint(row.latents + row.mirrored)] for some in rows
        ]

    def _windows(
        self, picture: Picture, shaped: Mapping[str, Any], run: RunSizes, seed: int
    ) -> dict[str, _Todo]:
        """Key -> what is stored under it: every window of a picture, and its mirror image. Raises
        BadPicture, OSError.
        """
        content = picture.content.fingerprint()
        mask = picture.mask.fingerprint() if picture.mask is not None else None
        control = []
        if picture.control is not None:
            refuse_other_shape(picture.content.read(), picture.control.read())
            control = [picture.control.fingerprint()]
        images = run.images
        sizes = run.at[next(iter(picture.resolutions), images.resolution)]
        if len(sizes) == 1:
            size = sizes[0]
        else:
            size = bucket_of(*shown_size(picture.content.read()), sizes)
        return {
            key_of([shaped, content, mask, astuple(window), mirrored, *control]): _Todo(
                picture, window, mirrored
            )
            for mirrored in ((False, True) if images.flip else (False,))
            for window in windows(size, images.crop, seed=seed, content=content)
        }

    def _encode_pictures(self, todo: Mapping[str, _Todo], bad: BadPictures) -> set[str]:
        """Returns the keys of those that cannot be used."""
        vae = (
            self.folder.vae(to_torch(self.precision.vae))
            .to(self.device)
            .eval()
            .requires_grad_(False)
        )
        self._note("vae", "weights", next(vae.parameters()).dtype)
        refused = set()
        with torch.no_grad():
            for key, (picture, window, mirrored) in watched(todo.items(), "encoding pictures"):
                try:
                    content = picture.content.read()
                    x_1CHW = pixels(content, window)[None].to(self.device, vae.dtype)
                    cut_4 = cut_of(*shown_size(content), window, mirrored=mirrored)
                    if picture.mask is not None:
                        mask_1HW = mask_pixels(picture.mask.read(), window)
                    else:
                        mask_1HW = None
                    with of_control():
                        if picture.control is not None:
                            before_CHW = pixels(picture.control.read(), window)
                        else:
                            before_CHW = None
                except (BadPicture, OSError) as error:
                    bad.add(picture.where, _reason(error))
                    refused.add(key)
                    continue
                mean_1CHW, std_1CHW = self.folder.family.latents.encode(
                    vae, x_1CHW.flip(-1) if mirrored else x_1CHW
                )
                self._note("vae", "pixels", x_1CHW.dtype)
                entry = {"mean": mean_1CHW[0], "std": std_1CHW[0], "cut": cut_4}
                if before_CHW is not None:
                    before_1CHW = (before_CHW.flip(-1) if mirrored else before_CHW)[None].to(x_1CHW)
                    entry["control"] = self.folder.family.latents.encode(vae, before_1CHW)[0][0]
                if mask_1HW is not None:
                    small_1HW = adaptive_avg_pool2d(
                        mask_1HW, (mean_1CHW.shape[-2], mean_1CHW.shape[-1])
                    )
                    entry["mask"] = small_1HW.flip(-1) if mirrored else small_1HW
                self.store.put(key, entry)
        del vae
        release(self.device)
        return refused

    def _missing(self, keys: Mapping[Key, str]) -> list[Key]:
        missing = [what for what, key in keys.items() if not self.store.has(key)]
        self.made = self.made + len(missing)
        self.found = self.found + len(keys) - len(missing)
        return missing

    def _note(self, role: str, tensor: str, dtype: torch.dtype) -> None:
        self.observed[role, tensor] = name(dtype)


def _readable(some: Sequence[Said]) -> tuple[list[Said], list[Any]]:
    """Captions whose pictures can be opened, and these (PIL). The row of another one is found bad
    when its picture is encoded.
    """
    found = []
    for one in some:
        with suppress(BadPicture, OSError):
            found.append(
                (one, open_as_shown(one.control.read() if one.control is not None else b""))
            )
    return [one for one, _ in found], [picture for _, picture in found]


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"cannot be read: {error.strerror or error}"
    return str(error)


def release(device: torch.device) -> None:
    """Returns freed memory to the system before the denoiser is loaded."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
