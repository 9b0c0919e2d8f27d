"""One row of the data of a diffusion run."""

from __future__ import annotations

from dataclasses import dataclass

from .contents import Content


@dataclass(frozen=True)
class Picture:
    """A picture with its captions, of which one is drawn each time.

    where    its file, or the row that names it
    mask     where its loss counts; None: everywhere
    repeats  how often it comes in an epoch
    weight   of its loss
    """

    content: Content
    captions: tuple[str, ...]
    where: str
    mask: Content | None = None
    repeats: int = 1
    weight: float = 1.0
