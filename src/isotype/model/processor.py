"""Loads the processor of a vision-language model, and copies the processor's files. The processor
converts pictures to pixel tensors and inserts their tokens.

The processor is loaded with the image processor that uses PIL, and without its video part. The
other image processors and the video part need torchvision. If a picture is resized by PIL and by
torchvision, a pixel can differ by one level. Because Isotype always uses PIL, the pixels are the
same on every machine.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from ..config.schema import DataSection, ModelSection
from ..data.cache import PICTURES_FOLDER, cache_folder
from ..data.pictures import Pictures
from ..errors import UsageError
from ..wording import first_line
from .architecture import is_vision_language
from .gguf import read_architecture

PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
# the file of older repositories with the chat template, which the tokenizer does not read
_TEMPLATE = "chat_template.json"


def _find_file(name: str, file_name: str, revision: str | None) -> str | None:
    """Returns the path of a file of a model. If `name` is a hub id, the file is downloaded. Returns
    None if there is no such file.
    """
    from transformers.utils import cached_file

    path: str | None = cached_file(
        name,
        file_name,
        revision=revision,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return path


def copy_files(name: str, revision: str | None, folder: Path) -> None:
    """Copies the base's processor files into the folder of a saved model or adapter, where servers
    look for them.
    """
    for file_name in PROCESSOR_FILES:
        path = _find_file(name, file_name, revision)
        if path is not None and not (folder / file_name).exists():
            shutil.copyfile(path, folder / file_name)


def build_picture_reader(
    section: ModelSection, data: DataSection, tokenizer: Any
) -> Pictures | None:
    """Builds the object that reads the pictures in a run's rows. Returns None for a model without a
    vision tower.
    """
    architecture = _architecture(section) if has_vision(section) else None
    if architecture is None:
        return None
    name = str(section.name)
    token_id = next(
        (
            token_value
            for key in ("image_token_id", "image_token_index")
            if (token_value := getattr(architecture, key, None)) is not None
        ),
        None,
    )
    picture_cache = cache_folder(data.cache)
    if picture_cache is not None:
        picture_cache = picture_cache / PICTURES_FOLDER
    return Pictures(
        lambda: load_processor(name, section.revision, architecture, tokenizer),
        token_id=token_id,
        min_pixels=data.min_pixels,
        max_pixels=data.max_pixels,
        folder=picture_cache,
    )


def has_vision(section: ModelSection) -> bool:
    """Returns True if a run's model has a vision tower. The result is False for a model that cannot
    be read; loading the model reports the error later.
    """
    if isinstance(section.config, dict):
        return "vision_config" in section.config
    try:
        architecture = _architecture(section)
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return False
    return architecture is not None and is_vision_language(architecture)


def _architecture(section: ModelSection) -> Any:
    """Reads the configuration of the model that a run loads. Returns None if the run builds the
    model from `model.config`.
    """
    if section.name is None or section.config is not None:
        return None
    return read_architecture(
        section.name, section.revision, trust_remote_code=section.trust_remote_code
    )


def load_processor(name: str, revision: str | None, architecture: Any, tokenizer: Any) -> Any:
    """Loads transformers' processor of this model. Raises UsageError."""
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    label = f"model {name}: rows have pictures, and its processor"
    if not hasattr(transformers.ProcessorMixin, "get_text_with_replacements"):
        raise UsageError(
            f"{label} does not say what it writes for them: transformers {transformers.__version__}"
            " is too old for pictures"
        )
    contents = [_read_json_file(name, file, revision) for file in PROCESSOR_FILES[:2]]
    if not any(contents):
        raise UsageError(
            f"{label} is missing: no {PROCESSOR_FILES[0]} there",
            fix="put the files of the released model's processor beside it",
        )
    family = getattr(architecture, "model_type", "")
    class_name = next(
        (content["processor_class"] for content in contents if content.get("processor_class")),
        PROCESSOR_MAPPING_NAMES.get(family),
    )
    processor_class = getattr(transformers, str(class_name), None)
    if processor_class is None:
        raise UsageError(
            f"{label} is a {class_name}, which transformers {transformers.__version__} does not"
            " have"
        )
    try:
        image_processor = transformers.AutoImageProcessor.from_pretrained(
            name, revision=revision, backend="pil"
        )
        class_without_video: Any = type(
            processor_class.__name__, (_WithoutVideo, processor_class), {}
        )
        parts = {"image_processor": image_processor, "tokenizer": tokenizer}
        arguments = [parts.get(part) for part in processor_class.get_attributes()]
        return class_without_video.from_args_and_dict(
            arguments, {**contents[1], "chat_template": None}
        )
    # malformed files and missing libraries (num2words) may raise any type of error
    except Exception as error:
        raise UsageError(f"{label} cannot be loaded: {first_line(error)}") from error


class _WithoutVideo:
    """A mixin for a processor whose video part is None."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        if argument is None:
            return type(None)
        return super().check_argument_for_proper_class(argument_name, argument)  # type: ignore[misc]  # the method of the processor class


def _read_json_file(name: str, file: str, revision: str | None) -> dict[str, Any]:
    path = _find_file(name, file, revision)
    if path is not None:
        content: Any = json.loads(Path(path).read_text(encoding="utf-8"))
    else:
        content = {}
    return content if isinstance(content, dict) else {}


def load_processor_template(name: str, revision: str | None) -> str | None:
    """Reads the chat template that older repositories store with their processor. Returns None if
    there is no such template.
    """
    template = _read_json_file(name, _TEMPLATE, revision).get("chat_template")
    return template if isinstance(template, str) else None
