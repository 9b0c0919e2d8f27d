"""Describes the pictures of a run, for example their number, their sizes and their captions. The
run's header, plan, report and files contain this description.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...training.task import HeaderRows
from ...wording import pluralise, shorten_middle
from .batches import Row
from .data import PictureData
from .picture_files import count_content_frames
from .pictures import FEWEST_TO_HOLD_OUT
from .sample import control_thumbnails

MAX_CAPTION = 160  # characters of a caption in the header


def plan_facts(data: PictureData) -> dict[str, Any]:
    """Returns the value of `data` in the output of `isotype plan --json`."""
    pictures = data.pictures
    sizes = data.run.sizes
    objective = data.run.objective
    captions = {caption for picture in pictures.all_pictures for caption in picture.captions}
    return {
        "train_pictures": data.row_count,
        "eval_pictures": data.evaluation_row_count,
        "regularisation_pictures": pictures.regularisation_count,
        "masked_pictures": sum(picture.mask is not None for picture in pictures.train),
        "bad_pictures": len(pictures.bad_pictures.rows),
        "captions": len(captions),
        "buckets": len(sizes.all_sizes),
        "resolutions": [side for _, side in sizes.resolutions],
        "latent_tokens": sizes.tokens,
        "objective": objective.kind,
        "timesteps": objective.levels.distribution,
        "shift": objective.levels.shift,
        **_clip_facts(data),
    }


def _clip_facts(data: PictureData) -> dict[str, Any]:
    """Returns the number of frames of the longest clips, and the number of training clips for each
    number of frames. Returns an empty mapping if the run trains on pictures.
    """
    if data.run.frames == 1:
        return {}
    counts = Counter[int]()
    for picture in data.pictures.train:
        counts[count_content_frames(picture.content)] += picture.repeats
    by_frames = {str(frames): count for frames, count in sorted(counts.items(), reverse=True)}
    return {"frames": data.run.frames, "train_clips_by_frames": by_frames}


def plural_noun(facts: Mapping[str, Any]) -> str:
    """Returns `clips` if the run trains on clips, else `pictures`."""
    return "clips" if "frames" in facts else "pictures"


def plan_lines(data: PictureData) -> list[str]:
    """Returns the lines about the data in the output of `isotype plan`. The first lines describe
    the pictures and the noise levels; further lines are notes, for example about captions that are
    too long.
    """
    run = data.run
    pictures = data.pictures
    facts = plan_facts(data)
    noun = plural_noun(facts)
    lines = [
        _describe_pictures(facts),
        f"{run.objective}; evaluated at {run.config.diffusion.eval_draws} fixed ones",
        *run.folder.marker_lines(),
        *([] if run.start is None else [str(run.start.lora)]),
    ]
    if data.cut_captions.number:
        lines.append(str(data.cut_captions))
    if pictures.trains_on_all:
        lines.append(
            f"fewer than {FEWEST_TO_HOLD_OUT} {noun}: none is held out for evaluation"
            " (images.eval_split: 0.1 would hold out some)"
        )
    lines += pictures.unmasked_lines()
    lines += pictures.cut_clip_lines()
    lines += pictures.other_file_lines()
    lines += pictures.unused_repeats_lines()
    lines += _few_steps_lines(data, noun)
    if facts["buckets"] > len(run.sizes.resolutions):
        lines.append(f"aspect buckets: {', '.join(map(str, sorted(run.sizes.all_sizes)))}")
    if pictures.missing_class_pictures:
        lines.append(
            f"{len(pictures.missing_class_pictures)} class pictures are drawn by the base model, once"
        )
    if facts["bad_pictures"]:
        lines.append(f"{facts['bad_pictures']} bad {noun} are left out (images.on_bad_row)")
    return lines


FEW_STEPS = 100
USUAL_STEPS = 2000  # of ai-toolkit's examples; kohya's scripts take 1,600 by default


def _few_steps_lines(data: PictureData, noun: str) -> list[str]:
    """Returns a line if the default number of epochs gives a LoRA only a few steps."""
    config = data.run.config
    train = config.train
    if train.steps is not None or train.epochs != 1 or config.adapter.kind == "none":
        return []
    steps = math.ceil(data.row_count / (train.batch_size * train.accumulate))
    if steps >= FEW_STEPS:
        return []
    return [
        f"one epoch of so few {noun} is {pluralise(steps, 'step')}, and a LoRA that has learnt"
        f" little: train.steps={USUAL_STEPS} train.batch_size=1 is usual"
    ]


def _describe_pictures(facts: Mapping[str, Any]) -> str:
    kinds = [
        f"{facts[f'{kind}_pictures']:,} {kind}"
        for kind in ("regularisation", "masked")
        if facts[f"{kind}_pictures"]
    ]
    kinds_text = f" ({', '.join(kinds)})" if kinds else ""
    has_lengths = len(facts.get("train_clips_by_frames", ())) > 1
    limit = "at most " if has_lengths or len(facts["resolutions"]) > 1 else ""
    sides = " and ".join(f"{side} x {side}" for side in facts["resolutions"])
    if "frames" in facts:
        training = _describe_clips(facts["train_clips_by_frames"])
    else:
        training = f"{facts['train_pictures']:,} training pictures"
    return (
        f"{training}{kinds_text},"
        f" {facts['eval_pictures']:,} for evaluation, {sides} pixels,"
        f" {limit}{facts['latent_tokens']:,} latent tokens each"
    )


def _describe_clips(counts_by_frames: Mapping[str, int]) -> str:
    """Returns for example `20 training clips of 17 frames and 40 training pictures`."""
    parts = [
        f"{count:,} training pictures"
        if frames == "1"
        else f"{count:,} training clips of {frames} frames"
        for frames, count in counts_by_frames.items()
    ]
    return " and ".join(parts)


def header_rows(data: PictureData) -> HeaderRows:
    """Returns the rows about the data for the run's header. They contain the first picture and its
    caption.
    """
    pictures, _, *notes = plan_lines(data)
    rows = [("data", pictures), *(("", note) for note in notes)]
    first_picture = data.pictures.train[0]
    caption = shorten_middle(" ".join(first_picture.captions[0].split()), MAX_CAPTION)
    file_name = Path(first_picture.origin).name
    return [*rows, ("learnt", f'{file_name} from the caption "{caption}"')]


def header_details(data: PictureData) -> HeaderRows:
    """Returns the rows of the header about noise levels and the cache of latents."""
    encoder = data.encoder
    folder = encoder.store.folder
    location = f"in {folder}" if folder else "in memory"
    cache_text = (
        f"{encoder.encoded_count} latents and embeddings made, {encoder.cached_count} found"
        f" {location}"
    )
    return [("data", cache_text), ("", plan_lines(data)[1])]


def _describe_size(data: PictureData, row: Row) -> str:
    """Returns the size of a row in pixels, with the number of frames if the run trains on clips."""
    if data.run.frames == 1:
        return str(row.size)
    frames = 1 + (row.latent_frames - 1) * data.run.frame_step
    return f"{row.size}, {pluralise(frames, 'frame')}"


def run_records(data: PictureData) -> dict[str, Any]:
    """Returns the JSON files that the run writes at its start, as a mapping from name to content."""
    pictures = data.pictures
    counts = Counter(_describe_size(data, row) for row in data.encoded_rows)
    return {
        "data.json": {
            **plan_facts(data),
            "train_pictures_by_size": dict(sorted(counts.items())),
            "files_not_read": pictures.other_files,
            "cut_captions": data.cut_captions.number,
            "first_cut_caption": data.cut_captions.first or None,
            "unmasked_pictures": len(pictures.unmasked_pictures()),
            "made": data.encoder.encoded_count,
            "found": data.encoder.cached_count,
        },
        "examples.json": {
            "examples": pictures.examples(),
            "before": control_thumbnails(data.run.prompts),
        },
    }
