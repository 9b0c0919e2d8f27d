"""The parts of a vision-language model: the decoder of the text, the towers that encode pictures, and
the projectors between them.

Imports no transformers: the parts are what a model's `get_decoder` and `get_encoder` give.
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
    """Paths in a vision-language model.

    language  of the text's decoder
    towers    of the encoders of pictures (or sound), whole: Qwen's merger lies inside its tower
    head      of the output embeddings; "" where there are none
    """

    language: str
    towers: tuple[str, ...]
    head: str

    def part_kind(self, name: str) -> str:
        """The part that a module or parameter of this path belongs to. What is in no tower, decoder
        or head is a projector.
        """
        if _is_inside(name, self.language) or (self.head and _is_inside(name, self.head)):
            return LANGUAGE
        if any(_is_inside(name, tower) for tower in self.towers):
            return TOWER
        return PROJECTOR

    def projectors(self, model: nn.Module) -> list[str]:
        """The outermost modules below the owner of the decoder that are neither decoder nor tower."""
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
    """The parts of a transformers model that has a vision configuration, and a decoder of its own
    for the text; None for other models.

    model  not PEFT's wrapper of one. Its parts are searched once: later changes, such as adapters,
           do not move them
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


def is_vision_weight(model: Any, full: str) -> bool:
    """Whether a parameter of this path in `model`, or in PEFT's wrapper of it, belongs to tower or
    projector.
    """
    parts = vision_parts(model)
    return parts is not None and parts.part_kind(full.removeprefix("base_model.model.")) != LANGUAGE


def get_language_part(model: Any) -> nn.Module:
    """The decoder of a vision-language model's text; another model as it is."""
    parts = vision_parts(model)
    decoder: nn.Module = model if parts is None else model.get_submodule(parts.language)
    return decoder
