"""Pictures of a run's rows: where their bytes are, whether they can be used, and what the model's
processor makes of them.

A row holds references to files. Pictures that a row brings as bytes are written once into a folder
of the cache, under a hash of their content; before a run adds its first, those that were not read
for longest go (`cache`). A picture is decoded when its row is tokenised, so that a
truncated file is reported before training. It is decoded again for each batch that uses it, so that
memory holds the pixels of one batch only.
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

from ..dtypes import name as dtype_name
from ..errors import UsageError
from .cache import evict
from .rows import is_picture_unchanged, picture_path

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MAX_PIXELS = 89_478_485  # PIL's own bound: a larger picture may be made to fill the memory
WHITE = (255, 255, 255)
_TOKEN_INPUTS = ("input_ids", "attention_mask")
_READ_AGAIN_FIX = "read the data again: remove the cache entry, or data.cache: none"


class BadPicture(ValueError):
    """A file that is not a complete picture, with the reason in one line."""


# the word after `ftyp` in a file's first bytes
_PHONE_FORMATS = {
    **dict.fromkeys((b"heic", b"heix", b"hevc", b"hevx", b"mif1", b"msf1"), "HEIC"),
    **dict.fromkeys((b"avif", b"avis"), "AVIF"),
}
_PHONE_SUFFIXES = {".heic": "HEIC", ".heif": "HEIC", ".hif": "HEIC", ".avif": "AVIF"}


@cache
def readable_phone_formats() -> frozenset[str]:
    """HEIC and AVIF, where they can be read here: by pillow-heif, which is told to Pillow, and by
    Pillow's own AVIF.
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
    """Why a picture of this ending is not read here; None: it is."""
    kind = _PHONE_SUFFIXES.get(suffix.lower())
    if kind is None or kind in readable_phone_formats():
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
    if kind is not None and kind not in readable_phone_formats():
        return _conversion_fix(kind)
    message = str(error).splitlines()[0] if str(error) else type(error).__name__
    if "BytesIO" in message:
        return "not a picture"
    return f"not a whole picture: {message}"


def convert_to_srgb(image: Any) -> Any:
    """The image with its colours in sRGB, where it names another colour space (Display P3 of a
    phone, Adobe RGB, a printer's CMYK). A profile that cannot be read is passed over, as viewers
    do.
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
    """A PIL image in RGB, turned as its EXIF says, alpha on white. Raises BadPicture, also where it
    has more than `max_pixels`.

    to_srgb  converts its colours by its profile; a model's own processor takes them as they are
    """
    from PIL import Image, ImageOps

    readable_phone_formats()
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
        top = 65535.0 if image.mode.startswith("I") else max(1.0, float(grey.max()))
        image = Image.fromarray(np.clip(grey / top * 255.0 + 0.5, 0, 255).astype(np.uint8))
    if image.mode in ("P", "RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        image = Image.alpha_composite(
            Image.new("RGBA", image.size, (*WHITE, 255)), image.convert("RGBA")
        )
    return image.convert("RGB")


def encode_picture(value: Any) -> str | None:
    """A picture of a row in memory as text, which `_content` reads: bytes, or a PIL image without
    loss; None for other values.
    """
    if hasattr(value, "save") and hasattr(value, "getexif"):
        out = io.BytesIO()
        value.save(out, format="PNG")
        value = out.getvalue()
    if isinstance(value, bytes):
        return "data:;base64," + base64.b64encode(value).decode()
    return None


def resolve_picture(picture: Any, folder: Path) -> Path | bytes:
    """A picture of a row as its file or its bytes.

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
    """The pictures of a run, with the processor of its model.

    load                  gives transformers' processor; called when the first row has a picture.
                          Raises UsageError
    token_id              the model's own for a place of a picture; None: not known
    min_pixels, max_pixels  a picture is made smaller or larger to have so many, its shape kept;
                            None: as it is
    folder                folder of the pictures that rows bring as bytes
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
        self._is_evicted = False
        self.dtype: torch.dtype | None = None
        """Of the pixels that a model is given; None: as the processor makes them."""
        self.floating_dtypes: dict[str, str] = {}
        """Name -> dtype of the floating tensors of the last batch."""

    @cached_property
    def processor(self) -> Any:
        return self._load()

    @property
    def mark(self) -> str:
        """The token that a chat template writes for a picture."""
        return str(self.processor.image_token)

    def settings(self) -> dict[str, Any]:
        """All that decides what tokens and pixels a picture becomes: part of the cache's key, and
        data.json's `pictures`.
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
        """`DIGEST TIME PATH` of a picture that can be used. Raises BadPicture."""
        source = resolve_picture(picture, folder)
        content = source.read_bytes() if isinstance(source, Path) else source
        digest = hashlib.sha256(content).hexdigest()[:32]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Image size")  # PIL's own about a large picture
            open_picture(content, max_pixels=MAX_PIXELS)
        path = source if isinstance(source, Path) else self._store_picture(content, digest)
        return f"{digest} {path.stat().st_mtime_ns} {path.resolve()}"

    def _store_picture(self, content: bytes, digest: str) -> Path:
        assert self.folder is not None
        path = self.folder / f"{digest}.picture"
        if path.is_file():
            self._mark_used(path)
            return path
        if not self._is_evicted:
            self._is_evicted = True
            evict(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{digest}.{os.getpid()}")
        aside.write_bytes(content)
        aside.replace(path)
        return path

    def _mark_used(self, path: Path) -> None:
        """Sets the time of the last access, which many systems do not; that of the last change is
        part of references.
        """
        if path.parent == self.folder:
            with suppress(OSError):  # a read-only cache
                os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))

    def image(self, reference: str) -> Any:
        """The picture as a PIL image, of a size within the bounds. Raises UsageError for a file
        that is no longer what it was.
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
        # rounded down when it is made smaller: no more than was asked for
        scale = math.sqrt(target_pixels / pixels)
        round_size = math.floor if target_pixels < pixels else math.ceil
        return image.resize(
            (max(1, round_size(image.width * scale)), max(1, round_size(image.height * scale)))
        )

    def thumbnail(self, reference: str) -> str:
        """At most 160 pixels wide and high, as a data: URL."""
        image = self.image(reference)
        image.thumbnail((160, 160))
        return str(encode_picture(image)).replace("data:;", "data:image/png;")

    def _decode_images(self, references: Sequence[Sequence[str]]) -> list[list[Any]]:
        flat = [reference for row in references for reference in row]
        with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as workers:
            # decoding does not hold Python's lock
            images = iter(list(workers.map(self.image, flat)))
        return [[next(images) for _ in row] for row in references]

    def picture_texts(self, references: Sequence[str]) -> list[str]:
        """What stands in a text for each picture: the tokens that its pixels will fill, and those
        around them. Raises BadPicture.
        """
        try:
            outputs = self.processor(
                images=self._decode_images([references]),
                text=[self.mark * len(references)],
                return_text_replacement_offsets=True,
            )
        except UsageError:
            raise
        except Exception as error:  # a processor may refuse a shape with any error
            raise BadPicture(
                "the processor refuses it:"
                f" {str(error).splitlines()[0] if str(error) else type(error).__name__}"
            ) from error
        replaced = outputs.get("text_replacement_offsets")
        # a model that attends to pictures across (Llama 3.2 Vision) has one token for each
        if replaced is None:
            texts = [self.mark] * len(references)
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

    def insert_texts(self, text: str, written: Sequence[str]) -> str:
        """A rendered text with what is written for each picture in place of its mark."""
        first, *rest = text.split(self.mark)
        return first + "".join(
            picture_text + following_text for picture_text, following_text in zip(written, rest)
        )

    def inputs(
        self, input_ids: Tensor, attention_mask: Tensor, references: Sequence[Sequence[str]]
    ) -> dict[str, Tensor]:
        """What the processor makes of a batch besides its tokens, by name: pixels, their grids or
        masks, token types.

        input_ids, attention_mask  int[B T]  rows as they were tokenised, padded
        references                 of each row, one or more
        """
        processor = copy.copy(self.processor)
        processor.tokenizer = _FixedTokenizer(self.processor.tokenizer, input_ids, attention_mask)
        outputs = processor(
            images=self._decode_images(references),
            text=[self.mark * len(row) for row in references],
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
        self.floating_dtypes = {name: dtype_name(value.dtype) for name, value in floating.items()}
        return tensors | floating


class _FixedTokenizer:
    """Stands for a processor's tokenizer, and answers with the tokens that the rows have: token
    types and masks are then made for them.
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
            def char_to_token(self, *_: Any, **__: Any) -> int:
                return 0  # asked for token types that no model of these processors reads

        return FixedEncoding(dict(self._encoding))
