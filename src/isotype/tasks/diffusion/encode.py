"""Encodes captions and pictures once with the pipeline's encoders, and saves the results in a
store. The encoders are freed before the denoiser is loaded.

The store is in memory, or in a folder of limited size. The key of an entry is a hash of everything
that its content depends on. A file is written under a temporary name and then renamed. So if a run
is killed, all its entries are complete, and the next run can use them.
"""

from __future__ import annotations

import gc
import hashlib
import json
import math
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from ...data.cache import cache_folder, evict, max_cache_bytes
from ...data.progress import track_progress
from ...dtypes import format_dtype, to_torch
from ...errors import RunError, UsageError
from ...optimize.widened import place_widened
from ...precision.precision import Precision
from ...training.memory.device import memory_limit
from .batches import Row
from .picture_files import Clip, Content, Picture, count_content_frames, fingerprint
from .picture_sizes import (
    RunSizes,
    Window,
    crop_windows,
    have_same_shape,
    nearest_bucket,
    reference_window,
    require_same_shape,
    size_and_crop,
)
from .pictures import UnusablePictures
from .pipeline import PipelineFolder
from .pixels import (
    BadPicture,
    displayed_size,
    label_control_errors,
    open_displayed,
    read_clip_pixels,
    read_mask_pixels,
    read_pixels,
)
from .single_file import read_headers
from .text_encoders import tokenize_captions


class TextInput(NamedTuple):
    """The input of a text encoder. It is a caption. If the text encoder of the model family also
    reads the pictures before the edit, these pictures are included.
    """

    caption: str
    controls: tuple[Content, ...] = ()


VERSION = 4  # must be raised whenever the same picture or caption gives other tensors


def entry_key(parts: Any) -> str:
    """Returns the name of an entry in the store. It is a hash of everything that the entry's
    content depends on.
    """
    return hashlib.sha256(
        json.dumps([VERSION, parts], sort_keys=True, default=str).encode()
    ).hexdigest()[:32]


class Store:
    """Contains the latents and text embeddings of a run. Each entry has a key.

    folder  the folder of the entries; None if they are only in memory
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._memory: dict[str, dict[str, Tensor]] = {}
        self._used: set[str] = set()

    @classmethod
    def open(cls, setting: str) -> Store:
        """Opens the store that the setting `images.cache` names. For `auto`, its folder is next to
        the folder of the cache for tokens.
        """
        folder = cache_folder(setting)
        return cls(
            folder.parent / "pictures" if folder is not None and setting == "auto" else folder
        )

    def has(self, key: str) -> bool:
        """Returns True if the store has an intact entry for this key. A damaged entry is removed,
        so that it is made again.
        """
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

    def write(self, key: str, tensors: Mapping[str, Tensor]) -> None:
        """Stores an entry. Raises UsageError if it cannot be written to the disk."""
        stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        if self.folder is None:
            self._memory[key] = stored
            return
        path = self._path(key)
        temporary = path.with_name(f".{key}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(save(stored))
            os.replace(temporary, path)
        except OSError as error:
            raise UsageError(
                f"images.cache: {self.folder}: {error.strerror or error}",
                fix="free space, images.cache: FOLDER, or images.cache: none",
            ) from None
        finally:
            temporary.unlink(missing_ok=True)
        self._used.add(key)

    def get(self, key: str) -> dict[str, Tensor]:
        """Reads an entry. Raises RunError if it was removed or damaged during the run."""
        if self.folder is None:
            return self._memory[key]
        try:
            return load(self._path(key).read_bytes())
        except (OSError, SafetensorError, ValueError) as error:
            raise RunError(
                f"images.cache: {self._path(key)}: {str(error).splitlines()[0]}",
                fix="resume: missing entries are made again",
            ) from None

    def enforce_bound(self) -> None:
        """Removes entries of other runs until the folder is within its size limit. Raises
        UsageError if the entries of this run alone are larger than the limit.
        """
        if self.folder is None or not self._used:
            return
        total = sum(self._path(key).stat().st_size for key in self._used)
        if total > max_cache_bytes():
            raise UsageError(
                f"images.cache: {self.folder}: this run's latents and embeddings take"
                f" {total / 1e9:.1f} GB of {max_cache_bytes() / 1e9:.1f}",
                fix=f"ISOTYPE_CACHE_GB={total / 1e9 + 1:.0f}, or a smaller images.resolution",
            )
        evict(self.folder, keep=self._path(next(iter(self._used))))

    def _path(self, key: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{key}.safetensors"


def library_versions() -> dict[str, str]:
    """Returns the versions of the libraries on which an encoder's result depends."""
    import diffusers
    import PIL
    import transformers

    return {
        library.__name__: library.__version__ for library in (torch, diffusers, transformers, PIL)
    }


def _plural_noun(pictures: Sequence[Picture]) -> str:
    """Returns `clips` if there is a clip among the pictures, else `pictures`."""
    has_clips = any(isinstance(picture.content, Clip) for picture in pictures)
    return "clips" if has_clips else "pictures"


Key = TypeVar("Key", str, TextInput)
CAPTIONS_PER_PASS = 8  # number of captions in one pass of the text encoders


class _StoredWindow(NamedTuple):
    """A window of a picture (a crop that is used for training), or the mirror image of a window.
    Each of them is one entry of the store.

    control_windows  the window of each picture before the edit
    """

    picture: Picture
    window: Window
    is_mirrored: bool
    control_windows: tuple[Window, ...] = ()


def _control_name(number: int) -> str:
    """Returns the name of the latents of a picture before the edit in an entry of the store.
    `number` is counted from 1.
    """
    return "control" if number == 1 else f"control_{number}"


def entry_controls(entry: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """Returns the latents of the pictures before the edit in an entry of the store."""
    controls: list[Tensor] = []
    while (name := _control_name(len(controls) + 1)) in entry:
        controls.append(entry[name])
    return tuple(controls)


@dataclass
class Encoder:
    """Encodes the pictures and texts of a run and saves them in its store.

    folder           the pipeline with the VAE and the text encoders
    max_text_length  the largest length of a caption, in tokens of the text encoder; 0 for the
                     length of CLIP's tokenizer
    keeps_tokens     whether captions are stored as tokens (`tokenize_captions`), because the run
                     trains the text encoders
    observed         the dtypes of the encoders that ran; it maps a key of `precision` and the name
                     of a tensor to the dtype
    encoded_count    the number of entries that this run made
    cached_count     the number of entries that were already in the store
    """

    folder: PipelineFolder
    precision: Precision
    device: torch.device
    store: Store
    max_text_length: int
    keeps_tokens: bool = False
    observed: dict[tuple[str, str], str] = field(default_factory=dict)
    encoded_count: int = 0
    cached_count: int = 0

    @cached_property
    def text_device(self) -> torch.device:
        """The device on which the text encoders run. This is the CPU if the memory of the GPU is too
        small for them. The size of the GPU decides, and not what is free at the moment, so that
        every run on the same machine stores the same embeddings.
        """
        if self.device.type != "cuda":
            return self.device
        gpu_bytes = torch.cuda.get_device_properties(self.device).total_memory
        itemsize = to_torch(self.precision.text_encoder).itemsize
        encoder_bytes = itemsize * sum(
            count_weights(file for file in self.folder.files(part) if file != self.folder.file)
            for part in self.folder.family.encoder_parts
            if (self.folder.path / part).is_dir()
        )
        if encoder_bytes > memory_limit(gpu_bytes):
            return torch.device("cpu")
        return self.device

    def text_input(self, caption: str, controls: tuple[Content, ...]) -> TextInput:
        """Returns the text encoder's input for a caption. `controls` are the pictures before the
        edit. There are none if the model does not edit pictures.
        """
        return TextInput(caption, controls if self.folder.family.encodes_control else ())

    def encode_captions(self, inputs: Sequence[TextInput]) -> dict[TextInput, str]:
        """Encodes the texts that are not yet in the store. Returns the key of each text's
        embeddings.
        """
        part_names = [
            part
            for part in self.folder.family.encoder_parts
            if not (self.keeps_tokens and part in self.folder.family.trainable_encoders)
        ]
        parts = [part for part in part_names if (self.folder.path / part).is_dir()]
        key_parts = {
            "what": "tokens" if self.keeps_tokens else "text",
            "pipeline": self.folder.family.pipeline,
            "length": self.max_text_length,
            "dtype": self.precision.text_encoder,
            "device": self.text_device.type,
            "parts": {part: fingerprint(self.folder.files(part)) for part in parts},
            **library_versions(),
        }
        keys = {
            item: entry_key(
                [key_parts, item.caption, *(content.fingerprint() for content in item.controls)]
            )
            for item in inputs
        }
        missing = self._find_missing(keys)
        if missing:
            (self._store_tokens if self.keeps_tokens else self._encode_missing_captions)(
                missing, keys
            )
        return keys

    def _store_tokens(self, missing: Sequence[TextInput], keys: Mapping[TextInput, str]) -> None:
        family = self.folder.family
        pipe = self.folder.pipeline(
            torch.float32,
            vae=None,
            **dict.fromkeys((family.denoiser, *family.trainable_encoders)),
        )
        for item in missing:
            self.store.write(
                keys[item],
                {
                    name: tensor[0]
                    for name, tensor in tokenize_captions(
                        pipe, [item.caption], family, self.max_text_length
                    ).items()
                },
            )

    def _encode_missing_captions(
        self, missing: Sequence[TextInput], keys: Mapping[TextInput, str]
    ) -> None:
        family = self.folder.family
        pipe = self.folder.pipeline(
            to_torch(self.precision.text_encoder), vae=None, **{family.denoiser: None}
        )
        # a pipeline that lacks one of its encoders reads sizes from the denoiser's configuration
        setattr(pipe, family.denoiser, self.folder.denoiser_outline())
        if family.encodes_control:
            pipe.processor = self.folder.processor(pipe.tokenizer)
        for part in family.encoder_parts:
            encoder = getattr(pipe, part, None)
            if isinstance(encoder, torch.nn.Module):
                encoder.to(self.text_device).requires_grad_(False)
                if self.text_device.type == "cpu":
                    place_widened(encoder)
                self._record_dtype(
                    "text_encoder", f"weights of {part}", next(encoder.parameters()).dtype
                )
        label = "encoding captions"
        if self.text_device != self.device:
            label += " on the CPU, because the GPU has no room for the text encoders"
        with torch.no_grad():
            for start in track_progress(range(0, len(missing), CAPTIONS_PER_PASS), label):
                chunk = list(missing[start : start + CAPTIONS_PER_PASS])
                texts: Mapping[str, Sequence[Tensor] | Tensor]
                if family.encodes_control:
                    chunk, pictures = _open_controls(chunk)
                    texts = family.encode_instructions(
                        pipe, [item.caption for item in chunk], pictures
                    )
                else:
                    texts = family.encode_text(
                        pipe, [item.caption for item in chunk], max_length=self.max_text_length
                    )
                for text_name, tensor in texts.items() if chunk else ():
                    self._record_dtype("text_encoder", f"{text_name} embeddings", tensor[0].dtype)
                for i, item in enumerate(chunk):
                    self.store.write(
                        keys[item], {text_name: tensor[i] for text_name, tensor in texts.items()}
                    )
        del pipe, encoder
        free_memory(self.device)

    def encode_pictures(
        self,
        pictures: Sequence[Picture],
        text: Mapping[TextInput, str],
        sizes: RunSizes,
        bad_pictures: UnusablePictures,
        *,
        seed: int,
    ) -> list[list[Row]]:
        """Encodes the pictures that are not yet in the store. Returns the rows of each picture, one
        for each repeat. A picture that cannot be used gets no rows, and is added to `bad_pictures`.
        """
        key_parts: dict[str, Any] = {
            "what": "latents",
            "dtype": self.precision.vae,
            "device": self.device.type,
            "vae": fingerprint(self.folder.files("vae")),
            **library_versions(),
        }
        rows: list[list[Row]] = []
        pending = dict[str, _StoredWindow]()
        for picture in track_progress(pictures, f"reading {_plural_noun(pictures)}"):
            try:
                windows = self._list_windows(picture, key_parts, sizes, seed)
            except (BadPicture, OSError) as error:
                bad_pictures.add(picture.origin, _error_reason(error))
                rows.append([])
                continue
            unmirrored_keys, mirrored_keys = (
                [key for key, item in windows.items() if item.is_mirrored is is_mirrored]
                for is_mirrored in (False, True)
            )
            pending |= windows
            first = next(iter(windows.values()))
            row = Row(
                tuple(unmirrored_keys),
                tuple(mirrored_keys),
                tuple(
                    text[self.text_input(caption, picture.controls)] for caption in picture.captions
                ),
                first.window.size,
                picture.weight,
                text.get(self.text_input("", picture.controls), ""),
                tuple(window.size for window in first.control_windows),
                sizes.count_latent_frames(count_content_frames(picture.content)),
            )
            rows.append([row] * picture.repeats)
        missing = self._find_missing({key: key for key in pending})
        if missing:
            refused_keys = self._encode_missing_pictures(
                {key: pending[key] for key in missing}, bad_pictures
            )
        else:
            refused_keys = set()
        return [
            [row for row in picture_rows if refused_keys.isdisjoint(row.latents + row.mirrored)]
            for picture_rows in rows
        ]

    def _list_windows(
        self, picture: Picture, key_parts: Mapping[str, Any], run_sizes: RunSizes, seed: int
    ) -> dict[str, _StoredWindow]:
        """Returns a mapping from keys of the store to the windows of a picture. If `images.flip` is
        set, the mirror images of the windows are included. Raises BadPicture, OSError.
        """
        content = picture.content.fingerprint()
        frames = count_content_frames(picture.content)
        if frames > 1:
            key_parts = {**key_parts, "frames": frames}
        mask = picture.mask.fingerprint() if picture.mask is not None else None
        images = run_sizes.images
        side = next(iter(picture.resolutions), images.resolution)
        references = self._find_reference_windows(picture, side, run_sizes.multiple)
        controls = [control.fingerprint() for control in picture.controls]
        # two pictures of an edit that are cut alike have the key without the windows
        if any(references):
            controls.append(json.dumps([window and astuple(window) for window in references]))
        bucket_sizes = run_sizes.buckets[side]
        if len(bucket_sizes) == 1:
            size = bucket_sizes[0]
        else:
            size = nearest_bucket(*displayed_size(picture.content.read()), bucket_sizes)
        windows = {}
        for is_mirrored in (False, True) if images.flip else (False,):
            for window in crop_windows(size, images.crop, seed=seed, content_hash=content):
                key = entry_key([key_parts, content, mask, astuple(window), is_mirrored, *controls])
                control_windows = tuple(reference or window for reference in references)
                windows[key] = _StoredWindow(picture, window, is_mirrored, control_windows)
        return windows

    def _find_reference_windows(
        self, picture: Picture, side: int, multiple: int
    ) -> list[Window | None]:
        """Returns the window of each picture before the edit. The window is None for a picture with
        the aspect ratio of the edited picture, because it is cropped like the edited picture.
        Raises BadPicture, OSError.
        """
        windows: list[Window | None] = []
        for number, control in enumerate(picture.controls, start=1):
            edited_size = displayed_size(picture.content.read())
            with label_control_errors(number if len(picture.controls) > 1 else 0):
                control_size = displayed_size(control.read())
            if not self.folder.family.takes_several_controls:
                require_same_shape(edited_size, control_size)
            if have_same_shape(edited_size, control_size):
                windows.append(None)
            else:
                windows.append(reference_window(*control_size, side=side, multiple=multiple))
        return windows

    def _encode_missing_pictures(
        self, pending: Mapping[str, _StoredWindow], bad_pictures: UnusablePictures
    ) -> set[str]:
        """Encodes and stores the windows in `pending`. Returns the keys of the windows that cannot
        be used.
        """
        vae = (
            self.folder.vae(to_torch(self.precision.vae))
            .to(self.device)
            .eval()
            .requires_grad_(False)
        )
        self._record_dtype("vae", "weights", next(vae.parameters()).dtype)
        refused_keys = set()
        noun = _plural_noun([stored_window.picture for stored_window in pending.values()])
        with torch.no_grad():
            for key, stored_window in track_progress(pending.items(), f"encoding {noun}"):
                picture, window, is_mirrored, _ = stored_window
                try:
                    content = picture.content.read()
                    if isinstance(picture.content, Clip):
                        x = read_clip_pixels(picture.content.open_frames(), window)
                    else:
                        x = read_pixels(content, window)
                    x_1 = x[None].to(self.device, vae.dtype)
                    crop_4 = size_and_crop(
                        *displayed_size(content), window, is_mirrored=is_mirrored
                    )
                    if picture.mask is not None:
                        mask_1HW = read_mask_pixels(picture.mask.read(), window)
                    else:
                        mask_1HW = None
                    controls = _read_controls(stored_window)
                except (BadPicture, OSError) as error:
                    bad_pictures.add(picture.origin, _error_reason(error))
                    refused_keys.add(key)
                    continue
                mean_1, std_1 = self.folder.family.latents.encode(
                    vae, x_1.flip(-1) if is_mirrored else x_1
                )
                self._record_dtype("vae", "pixels", x_1.dtype)
                entry = {"mean": mean_1[0], "std": std_1[0], "cut": crop_4}
                for number, control_CHW in enumerate(controls, start=1):
                    control_1CHW = (control_CHW.flip(-1) if is_mirrored else control_CHW)[None].to(
                        x_1
                    )
                    control_mean_1CHW, _ = self.folder.family.latents.encode(vae, control_1CHW)
                    entry[_control_name(number)] = control_mean_1CHW[0]
                if mask_1HW is not None:
                    latent_mask_1HW = adaptive_avg_pool2d(
                        mask_1HW, (mean_1.shape[-2], mean_1.shape[-1])
                    )
                    entry["mask"] = latent_mask_1HW.flip(-1) if is_mirrored else latent_mask_1HW
                self.store.write(key, entry)
        del vae
        free_memory(self.device)
        return refused_keys

    def _find_missing(self, keys: Mapping[Key, str]) -> list[Key]:
        missing = [item for item, key in keys.items() if not self.store.has(key)]
        self.encoded_count = self.encoded_count + len(missing)
        self.cached_count = self.cached_count + len(keys) - len(missing)
        return missing

    def _record_dtype(self, role: str, tensor: str, dtype: torch.dtype) -> None:
        self.observed[role, tensor] = format_dtype(dtype)


def _read_controls(stored_window: _StoredWindow) -> list[Tensor]:
    """Reads the pictures before the edit, each fp32[3 H W] in [-1, 1] in the size of its window.
    Raises BadPicture, OSError.
    """
    controls = stored_window.picture.controls
    pictures = []
    windows = zip(controls, stored_window.control_windows, strict=True)
    for number, (control, window) in enumerate(windows, start=1):
        with label_control_errors(number if len(controls) > 1 else 0):
            pictures.append(read_pixels(control.read(), window))
    return pictures


def _open_controls(inputs: Sequence[TextInput]) -> tuple[list[TextInput], list[list[Any]]]:
    """Returns the inputs whose pictures can be opened, and for each of them its pictures as PIL
    images. If a picture cannot be opened, this is reported later, when the pictures are encoded.
    """
    readable = []
    for item in inputs:
        with suppress(BadPicture, OSError):
            pictures = [open_displayed(content.read()) for content in item.controls]
            readable.append((item, pictures))
    return [item for item, _ in readable], [pictures for _, pictures in readable]


def _error_reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"cannot be read: {error.strerror or error}"
    return str(error)


def count_weights(files: Iterable[Path]) -> int:
    """Returns the number of values in the safetensors files of a text encoder. Files of a variant
    (`model.fp16.safetensors`) are left out, because they contain the same weights again. Raises
    UsageError.
    """
    count = 0
    for file in files:
        if file.suffix == ".safetensors" and file.name.count(".") == 1:
            count += sum(math.prod(shape) for _, shape in read_headers(file).values())
    return count


def free_memory(device: torch.device) -> None:
    """Returns freed memory to the system before the denoiser is loaded."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
