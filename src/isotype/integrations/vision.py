"""Two checks of an attached trainer of a vision-language model: what it learns of a picture, and where its adapter will load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from ..data.rows import IGNORED
from ..finding import Finding, Place, Severity
from ..model.architecture import is_vision_language
from ..precision.apply import inner_model
from ..precision.vision import vision_parts
from ..training.setup import Subject

_ROWS = 4  # of the batch that is looked at


def places_learnt(subject: Subject) -> Iterator[Finding]:
    """PF023: labels on the places of pictures, as trainers that learn every token have them."""
    trainer: Any = subject.task.trainer
    config = inner_model(trainer.model).config
    place = next((at for key in ("image_token_id", "image_token_index") if (at := getattr(config, key, None)) is not None), None)
    rows = list(islice(iter(trainer.train_dataset), _ROWS))
    made = trainer.data_collator(rows) if rows and place is not None else None
    labels = made.get("labels") if isinstance(made, Mapping) else None  # a trainer of policies makes its rows itself
    if labels is None:
        return
    learnt, places = int((labels != IGNORED).sum()), int((labels == place).sum())
    if places:
        yield Finding(
            code="PF023", severity=Severity.WARNING, place=Place(symbol="labels"),
            message=f"{places} of {learnt} learnt tokens of the first rows are places of pictures",
            cause="the model learns to write the token for a picture; the user's words are learnt too where every token is",
            fix="labels of the assistant's turns alone (TRL: assistant_only_loss=True), or -100 at the places of pictures",
        )  # fmt: skip


def names_that_do_not_load(subject: Subject) -> Iterator[Finding]:
    """PF024: an adapter on a family's class for text, whose names the released class does not have."""
    from transformers import AutoConfig

    model: Any = inner_model(subject.task.trainer.model)
    name = getattr(model, "name_or_path", "")
    if vision_parts(model) is not None or not hasattr(subject.task.trainer.model, "peft_config") or not name:
        return
    try:
        released = AutoConfig.from_pretrained(name)
    except (OSError, ValueError):  # it came from no folder or hub
        return
    if is_vision_language(released):
        yield Finding(
            code="PF024", severity=Severity.WARNING, place=Place(symbol=type(model).__name__),
            message=f"the adapter's names will not load onto the released model ({(released.architectures or ['?'])[0]}): "
            "servers and AutoModelForImageTextToText find none of them",
            cause=f"{type(model).__name__} is the family's class for text alone: its layers have other paths",
            fix=f"load the model with AutoModelForImageTextToText.from_pretrained({name!r}), for text too",
        )  # fmt: skip
