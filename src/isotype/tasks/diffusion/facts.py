"""What a run on pictures says of its data: facts and lines of the plan and the header, and the report's examples."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from .loss import Objective
from .picture_files import Picture
from .pictures import Gathered, captions_of
from .pixels import BadPicture, as_webp
from .sample import Prompt
from .sizes import RunSizes

EXAMPLES, EXAMPLE_SIDE = 6, 192  # pictures in the report, and pixels of their longer side


def data_facts(gathered: Gathered, sizes: RunSizes, objective: Objective, *, rows: int, eval_rows: int) -> dict[str, Any]:
    """rows, eval_rows: of an epoch, and of an evaluation"""
    return {
        "train_pictures": rows,
        "eval_pictures": eval_rows,
        "regularisation_pictures": gathered.regularisation,
        "masked_pictures": sum(picture.mask is not None for picture in gathered.train),
        "bad_pictures": len(gathered.bad.rows),
        "captions": len(captions_of(gathered.all)),
        "buckets": len(sizes.all),
        "resolutions": [side for _, side in sizes.resolutions],
        "latent_tokens": sizes.tokens,
        "objective": objective.kind,
        "timesteps": objective.levels.timesteps,
        "shift": objective.levels.shift,
    }


def data_lines(facts: Mapping[str, Any], gathered: Gathered, sizes: RunSizes, levels: str) -> list[str]:
    """facts: of `data_facts`; levels: the line on noise levels, which comes second"""
    kinds = [f"{facts[f'{kind}_pictures']:,} {kind}" for kind in ("regularisation", "masked") if facts[f"{kind}_pictures"]]
    of_these = f" ({', '.join(kinds)})" if kinds else ""
    lines = [
        f"{facts['train_pictures']:,} training pictures{of_these}, "
        f"{facts['eval_pictures']:,} for evaluation, "
        f"{' and '.join(f'{side} x {side}' for side in facts['resolutions'])} pixels, {facts['latent_tokens']:,} latent tokens each",
        levels,
    ]
    if facts["buckets"] > len(sizes.resolutions):
        lines.append(f"aspect buckets: {', '.join(map(str, sorted(sizes.all)))}")
    if gathered.to_draw:
        lines.append(f"{len(gathered.to_draw)} class pictures are drawn by the base model, once")
    if facts["bad_pictures"]:
        lines.append(f"{facts['bad_pictures']} bad pictures are left out (images.on_bad_row)")
    return lines


def examples(pictures: Sequence[Picture]) -> dict[str, Any]:
    """The first pictures with their captions, small, for the report."""
    shown = []
    for picture in pictures[:EXAMPLES]:
        with suppress(BadPicture, OSError):
            halves = [half for half in (picture.control, picture.content) if half is not None]
            pictures_shown = [_small(half.read()) for half in halves]
            parts = [{"text": caption + "\n", "learnt": False} for caption in picture.captions[:EXAMPLES]]
            times = f", {picture.repeats} times an epoch" if picture.repeats > 1 else ""
            where = f"{Path(picture.where).name}{times}"
            shown.append({"which": where, "parts": parts, "pictures": pictures_shown})
    return {"examples": shown}


def before_edits(prompts: Sequence[Prompt]) -> dict[str, str]:
    """Prompt as the report shows it -> the picture that it edits, small."""
    return {prompt.shown: _small(prompt.control.read_bytes()) for prompt in prompts if prompt.control is not None}


def _small(picture: bytes) -> str:
    return f"data:image/webp;base64,{base64.b64encode(as_webp(picture, side=EXAMPLE_SIDE)).decode()}"
