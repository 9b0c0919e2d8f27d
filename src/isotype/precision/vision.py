"""Finds the parts of a vision-language model. They are the text decoder, the towers that encode
pictures, and the projectors between decoder and towers.

This module does not import transformers. It finds the parts with a model's `get_decoder` and
`get_encoder`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

LANGUAGE = "language"
TOWER = "tower"
PROJECTOR = "projector"


@dataclass(frozen=True)
class VisionParts:
    """The paths of the parts in a vision-language model.

    language  the path of the text decoder
    towers    the paths of the encoders of pictures or sound (in Qwen, the merger is inside the
              tower)
    head      the path of the output embeddings; "" if there are none
    """

    language: str
    towers: tuple[str, ...]
    head: str

    def part_kind(self, name: str) -> str:
        """Returns the part to which the module or parameter at this path belongs. A module outside
        the towers, the decoder and the head is a projector.
        """
        if _is_inside(name, self.language) or (self.head and _is_inside(name, self.head)):
            return LANGUAGE
        if any(_is_inside(name, tower) for tower in self.towers):
            return TOWER
        return PROJECTOR

    def projectors(self, model: nn.Module) -> list[str]:
        """Returns the paths of the projectors. These are the modules that have the same parent as
        the decoder and are not towers.
        """
        owner = self.language.rpartition(".")[0]
        children = model.get_submodule(owner).named_children()
        paths = [f"{owner}.{name}".removeprefix(".") for name, _ in children]
        return [
            path
            for path in paths
            if self.part_kind(path) == PROJECTOR
            and not any(_is_inside(tower, path) for tower in self.towers)
        ]


def _is_inside(name: str, path: str) -> bool:
    return name == path or name.startswith(f"{path}.")


_PARTS_CACHE: WeakKeyDictionary[Any, VisionParts | None] = WeakKeyDictionary()


def vision_parts(model: Any) -> VisionParts | None:
    """Finds the parts of a transformers model that has a vision configuration and a separate text
    decoder. Returns None for other models.

    model  the transformers model itself, not PEFT's wrapper. The result is cached, because adapters
           do not move the parts
    """
    if model not in _PARTS_CACHE:
        _PARTS_CACHE[model] = _find_parts(model)
    return _PARTS_CACHE[model]


def _find_parts(model: Any) -> VisionParts | None:
    config = getattr(model, "config", None)
    if not any(
        getattr(config, name, None) is not None for name in ("vision_config", "audio_config")
    ) or not hasattr(model, "get_decoder"):
        return None
    paths = {id(module): name for name, module in model.named_modules()}
    language = paths.get(id(model.get_decoder()), "")
    if not language:
        return None
    towers = {
        paths.get(id(model.get_encoder(modality=modality)), "")
        for modality in ("image", "video", "audio")
    }
    head = paths.get(id(model.get_output_embeddings()), "")
    return VisionParts(
        language,
        tuple(sorted(tower for tower in towers if tower and not _is_inside(language, tower))),
        head,
    )


def is_vision_weight(model: Any, full_name: str) -> bool:
    """Whether the parameter at this path belongs to a tower or a projector. `model` may also be
    PEFT's wrapper of the model.
    """
    parts = vision_parts(model)
    return (
        parts is not None
        and parts.part_kind(full_name.removeprefix("base_model.model.")) != LANGUAGE
    )


def get_language_part(model: Any) -> nn.Module:
    """Returns the text decoder of a vision-language model. Any other model is returned unchanged."""
    parts = vision_parts(model)
    decoder: nn.Module = model if parts is None else model.get_submodule(parts.language)
    return decoder
