"""Reads the pictures of a run's rows, checks them, and prepares them with the model's processor.

A row stores references to files. Pictures that the data contain as bytes are written to a folder of
the cache. The name of such a file is a hash of its content, so each picture is stored only once. If
the folder is larger than its limit, the least recently used pictures are removed before a run adds
its first picture. A picture is decoded when its row is tokenised, so that a truncated file is
reported before training. The picture is decoded again for each batch that contains its row, so that
memory holds the pixels of only one batch.
"""

from __future__ import annotations

import base64
import binascii
import copy
import hashlib
import io
import math
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..dtypes import format_dtype
from ..errors import UsageError
from .cache import evict
from .rows import is_picture_unchanged, picture_path

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MAX_PIXELS = 89_478_485  # Pillow's limit: a larger picture may be an attack that fills the memory
WHITE = (255, 255, 255)
_TOKEN_INPUTS = ("input_ids", "attention_mask")
_READ_AGAIN_FIX = "read the data again: remove the cache entry, or data.cache: none"


class BadPicture(ValueError):
    """Raised for a file that is not a complete picture. The message is one line."""


# the brand after `ftyp` in a file's first bytes -> format
_PHONE_FORMATS = {
    **dict.fromkeys((b"heic", b"heix", b"hevc", b"hevx", b"mif1", b"msf1"), "HEIC"),
    **dict.fromkeys((b"avif", b"avis"), "AVIF"),
}
# ending of a file -> format
_PHONE_SUFFIXES = {".heic": "HEIC", ".heif": "HEIC", ".hif": "HEIC", ".avif": "AVIF"}


@cache
def register_phone_formats() -> frozenset[str]:
    """Returns which of the formats HEIC and AVIF can be read. HEIC needs the package pillow-heif,
    which this function registers in Pillow. AVIF can be read if the installed Pillow supports it.
    """
    from PIL import features

    kinds = {"AVIF"} if features.check("avif") else set()
    try:
        import pillow_heif
    except ImportError:
        return frozenset(kinds)
    pillow_heif.register_heif_opener()
    return frozenset(kinds | {"HEIC"})


def unreadable_reason(suffix: str) -> str | None:
    """Returns the reason why a picture with this ending cannot be read, or None."""
    kind = _PHONE_SUFFIXES.get(suffix.lower())
    if kind is None or kind in register_phone_formats():
        return None
    return _conversion_fix(kind)


def _conversion_fix(kind: str) -> str:
    package = "pillow-heif" if kind == "HEIC" else "'Pillow>=11.3'"
    return f"a {kind} picture: pip install {package} reads it; or convert it to JPEG, PNG or WebP"


def bad_picture_reason(error: Exception, content: bytes) -> str:
    if not content:
        return "an empty file"
    if type(error).__name__ == "DecompressionBombError":
        return (
            f"more than {2 * MAX_PIXELS / 1e6:.0f} megapixels, and at most {MAX_PIXELS / 1e6:.0f}"
            " are read"
        )
    kind = _PHONE_FORMATS.get(content[8:12]) if content[4:8] == b"ftyp" else None
    if kind is not None and kind not in register_phone_formats():
        return _conversion_fix(kind)
    message = str(error).splitlines()[0] if str(error) else type(error).__name__
    if "BytesIO" in message:
        return "not a picture"
    return f"not a whole picture: {message}"


def convert_to_srgb(image: Any) -> Any:
    """Converts the colours of an image with another colour profile (Display P3, Adobe RGB, CMYK) to
    sRGB. A colour profile that cannot be read is ignored, as image viewers do.
    """
    from PIL import ImageCms

    profile = image.info.get("icc_profile")
    if not profile:
        return image
    if image.mode in ("P", "PA"):
        image = image.convert("RGBA")
    mode = image.mode if image.mode == "RGBA" else "RGB"
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        if "sRGB" in ImageCms.getProfileDescription(source):
            return image
        target = ImageCms.createProfile("sRGB")
        return ImageCms.profileToProfile(image, source, target, outputMode=mode)
    except (OSError, ValueError, TypeError, ImageCms.PyCMSError):
        return image


def open_picture(content: bytes, *, max_pixels: int | None = None, to_srgb: bool = False) -> Any:
    """Opens a picture as a PIL image in RGB, rotated as its EXIF data say, with transparent parts
    on white. Raises BadPicture if the picture cannot be used, or if it has more than `max_pixels`
    pixels.

    to_srgb  whether to convert the colours to sRGB with the picture's colour profile; the
             processors of vision-language models do not convert them
    """
    from PIL import Image, ImageOps

    register_phone_formats()
    try:
        image: Any = Image.open(io.BytesIO(content))
        if max_pixels is not None and (pixels := image.width * image.height) > max_pixels:
            raise BadPicture(
                f"{pixels / 1e6:.0f} megapixels, and at most {max_pixels / 1e6:.0f} are read"
            )
        image.load()
        image = ImageOps.exif_transpose(image)
        if to_srgb:
            image = convert_to_srgb(image)
    except BadPicture:
        raise
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise BadPicture(bad_picture_reason(error, content)) from None
    if image.mode.startswith("I;16") or image.mode in ("I", "F"):
        grey = np.asarray(image, dtype=np.float64)
        white = 65535.0 if image.mode.startswith("I") else max(1.0, float(grey.max()))
        image = Image.fromarray(np.clip(grey / white * 255.0 + 0.5, 0, 255).astype(np.uint8))
    if image.mode in ("P", "RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        image = Image.alpha_composite(
            Image.new("RGBA", image.size, (*WHITE, 255)), image.convert("RGBA")
        )
    return image.convert("RGB")


def encode_picture(value: Any) -> str | None:
    """Encodes a picture without loss as a `data:` URL, which `resolve_picture` can read. The
    picture is given as bytes or as a PIL image. Returns None for other values.
    """
    if hasattr(value, "save") and hasattr(value, "getexif"):
        out = io.BytesIO()
        value.save(out, format="PNG")
        value = out.getvalue()
    if isinstance(value, bytes):
        return "data:;base64," + base64.b64encode(value).decode()
    return None


def resolve_picture(picture: Any, folder: Path) -> Path | bytes:
    """Returns the file or the bytes of a row's picture.

    picture  a path, relative to `folder`; a data: or file: URL; bytes; `datasets`' {bytes, path}; a
            PIL image
    Raises  BadPicture
    """
    if isinstance(picture, Mapping):
        picture = next(
            (
                picture[key]
                for key in ("bytes", "path", "image", "url")
                if picture.get(key) is not None
            ),
            None,
        )
    if isinstance(picture, bytes):
        return picture
    text = encode_picture(picture) if not isinstance(picture, str) else picture
    if not isinstance(text, str) or not text.strip():
        raise BadPicture(f"expected a picture's file, got {type(picture).__name__}")
    if text.startswith("data:"):
        try:
            return base64.b64decode(text.partition(",")[2], validate=True)
        except (binascii.Error, ValueError):
            raise BadPicture("a data: URL that is not base64") from None
    if text.startswith(("http://", "https://")):
        raise BadPicture(
            f"{text[:60]}: pictures are not fetched from the network: download them, and give their"
            " paths"
        )
    path = folder / text.removeprefix("file://")
    # unlike Path.is_file also False for a text that is longer than any name
    if not os.path.isfile(path):
        raise BadPicture(f"{text:.100}: no such picture")
    return path


class Pictures:
    """Reads the pictures of a run and prepares them with the model's processor.

    load                  a function that returns transformers' processor; it is called when the
                          first row with a picture is read, and may raise UsageError
    token_id              the id of the model's placeholder token for a picture; None if it is
                          unknown
    min_pixels, max_pixels  a picture with fewer or more pixels is scaled to this limit with the
                            same aspect ratio; None for no limit
    folder                folder for pictures that the data contain as bytes; None for a temporary
                          folder
    """

    def __init__(
        self,
        load: Callable[[], Any],
        *,
        token_id: int | None = None,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        folder: Path | None = None,
    ) -> None:
        self._load = load
        self.token_id = token_id
        self.min_pixels = min_pixels
        self.max_pixels = max_pixels
        self._temporary = (
            tempfile.TemporaryDirectory(prefix="isotype-pictures-") if folder is None else None
        )
        self.folder = Path(self._temporary.name) if self._temporary is not None else folder
        self._has_evicted = False
        self.dtype: torch.dtype | None = None
        """The dtype of the pixels that the model gets; None: the processor's output dtype."""
        self.floating_dtypes: dict[str, str] = {}
        """Name -> dtype of the floating-point tensors of the last batch."""

    @cached_property
    def processor(self) -> Any:
        return self._load()

    @property
    def placeholder(self) -> str:
        """Returns the text that a chat template writes for a picture."""
        return str(self.processor.image_token)

    def settings(self) -> dict[str, Any]:
        """Returns all settings that influence the tokens and pixels of a picture. These settings
        are part of the key of a cache entry, and are stored as `pictures` in data.json.
        """
        images = self.processor.image_processor
        lengths = sorted(
            (name, value)
            for name, value in vars(self.processor).items()
            if isinstance(value, int | str | float)
        )
        digest = hashlib.sha256((images.to_json_string() + repr(lengths)).encode()).hexdigest()[:16]
        return {
            "processor": type(self.processor).__name__,
            "images": type(images).__name__,
            "settings": digest,
            "min_pixels": self.min_pixels,
            "max_pixels": self.max_pixels,
        }

    def reference(self, picture: Any, folder: Path) -> str:
        """Checks a picture and returns its reference. The reference is a text `DIGEST TIME PATH`
        with the hash of the file's content, its modification time and its path. Raises BadPicture.
        """
        source = resolve_picture(picture, folder)
        content = source.read_bytes() if isinstance(source, Path) else source
        digest = hashlib.sha256(content).hexdigest()[:32]
        with warnings.catch_warnings():
            # Pillow's warning about a large picture
            warnings.filterwarnings("ignore", "Image size")
            open_picture(content, max_pixels=MAX_PIXELS)
        path = source if isinstance(source, Path) else self._store_picture(content, digest)
        return f"{digest} {path.stat().st_mtime_ns} {path.resolve()}"

    def _store_picture(self, content: bytes, digest: str) -> Path:
        assert self.folder is not None
        path = self.folder / f"{digest}.picture"
        if path.is_file():
            self._mark_used(path)
            return path
        if not self._has_evicted:
            self._has_evicted = True
            evict(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{digest}.{os.getpid()}")
        temporary.write_bytes(content)
        temporary.replace(path)
        return path

    def _mark_used(self, path: Path) -> None:
        """Sets the access time of a stored picture, because many systems do not update it when the
        file is read. The modification time is not changed, because it is part of the picture's
        reference.
        """
        if path.parent == self.folder:
            with suppress(OSError):  # a read-only cache
                os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))

    def image(self, reference: str) -> Any:
        """Returns the picture as a PIL image, scaled so that its number of pixels is within the
        limits. Raises UsageError if the file was changed or removed after tokenising.
        """
        if not is_picture_unchanged(reference):
            raise UsageError(
                f"{picture_path(reference)}: the picture changed, or is gone, since its row was"
                " tokenised",
                fix=_READ_AGAIN_FIX,
            )
        path = picture_path(reference)
        image = open_picture(path.read_bytes())
        self._mark_used(path)
        pixels = image.width * image.height
        target_pixels = min(max(pixels, self.min_pixels or 0), self.max_pixels or pixels)
        if target_pixels == pixels:
            return image
        # sizes are rounded down when scaling down and up when scaling up, so that the limits hold
        scale = math.sqrt(target_pixels / pixels)
        round_size = math.floor if target_pixels < pixels else math.ceil
        return image.resize(
            (max(1, round_size(image.width * scale)), max(1, round_size(image.height * scale)))
        )

    def thumbnail(self, reference: str) -> str:
        """Returns a thumbnail of at most 160 x 160 pixels as a `data:` URL."""
        image = self.image(reference)
        image.thumbnail((160, 160))
        return str(encode_picture(image)).replace("data:;", "data:image/png;")

    def _decode_images(self, references: Sequence[Sequence[str]]) -> list[list[Any]]:
        flat = [reference for row in references for reference in row]
        with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as workers:
            # decoding releases Python's global lock, so that several threads decode faster than one
            images = iter(list(workers.map(self.image, flat)))
        return [[next(images) for _ in row] for row in references]

    def picture_texts(self, references: Sequence[str]) -> list[str]:
        """Returns, for each picture, the text that replaces its mark. The text contains the
        picture's placeholder tokens and the tokens around them. Raises BadPicture.
        """
        try:
            outputs = self.processor(
                images=self._decode_images([references]),
                text=[self.placeholder * len(references)],
                return_text_replacement_offsets=True,
            )
        except UsageError:
            raise
        except Exception as error:  # a processor may reject a picture's shape with any error
            raise BadPicture(
                "the processor refuses it:"
                f" {str(error).splitlines()[0] if str(error) else type(error).__name__}"
            ) from error
        replaced = outputs.get("text_replacement_offsets")
        # a model with cross-attention to pictures (Llama 3.2 Vision) has one token per picture
        if replaced is None:
            texts = [self.placeholder] * len(references)
        else:
            texts = [replacement["replacement"] for replacement in replaced[0]]
        if (
            self.token_id is not None
            and self.token_id
            not in self.processor.tokenizer(texts[0], add_special_tokens=False)["input_ids"]
        ):
            raise UsageError(
                f"{type(self.processor).__name__} writes a picture without the model's own token"
                f" for it ({self.token_id}): the processor is another model's",
                fix="the preprocessor_config.json and tokenizer that the model was released with",
            )
        return texts

    def insert_texts(self, text: str, picture_texts: Sequence[str]) -> str:
        """In a rendered text, replaces the mark of each picture by the text that `picture_texts`
        returns for it.
        """
        first, *rest = text.split(self.placeholder)
        return first + "".join(
            picture_text + following_text
            for picture_text, following_text in zip(picture_texts, rest)
        )

    def inputs(
        self, input_ids: Tensor, attention_mask: Tensor, references: Sequence[Sequence[str]]
    ) -> dict[str, Tensor]:
        """Returns a dictionary with the processor's outputs for the pictures of a batch: the
        pixels, the grid or mask of each picture, and the token types.

        input_ids, attention_mask  int[B T]  the padded tokens of the rows
        references                 the references of each row's pictures. There must be at least one
                                   picture
        """
        processor = copy.copy(self.processor)
        processor.tokenizer = _FixedTokenizer(self.processor.tokenizer, input_ids, attention_mask)
        outputs = processor(
            images=self._decode_images(references),
            text=[self.placeholder * len(row) for row in references],
            return_tensors="pt",
        )
        tensors = {
            name: value
            for name, value in outputs.items()
            if name not in _TOKEN_INPUTS and hasattr(value, "dtype")
        }
        floating = {
            name: value.to(self.dtype)
            for name, value in tensors.items()
            if value.is_floating_point()
        }
        self.floating_dtypes = {name: format_dtype(value.dtype) for name, value in floating.items()}
        return tensors | floating


class _FixedTokenizer:
    """Replaces the tokenizer of a processor. This tokenizer returns the tokens that the rows
    already have, so that the processor computes token types and masks for these tokens.
    """

    def __init__(self, tokenizer: Any, input_ids: Tensor, attention_mask: Tensor) -> None:
        self._tokenizer = tokenizer
        self._encoding = {
            "input_ids": input_ids.tolist(),
            "attention_mask": attention_mask.tolist(),
        }

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, *_: Any, **__: Any) -> Any:
        from transformers import BatchEncoding

        class FixedEncoding(BatchEncoding):
            """The tokens of a prompt that was already tokenised."""

            def char_to_token(self, *_: Any, **__: Any) -> int:
                return 0  # called to build token types, which these models do not read

        return FixedEncoding(dict(self._encoding))
