"""Damage to the files of a run: a checkpoint's files cut short, emptied, removed, or with one bit
flipped; and those beside them.

The damaged checkpoint must be named and passed over, the one before it used, and the run must end
as the undisturbed one.
"""

import os
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from .trial import Trial
from .workshop import EVERY, FIRST, SECOND, STEPS, Workshop

Damage = Callable[[Path, random.Random], None]


def cut(file: Path, where: random.Random) -> None:
    os.truncate(file, where.randrange(1, file.stat().st_size))


def emptied(file: Path, where: random.Random) -> None:
    os.truncate(file, 0)


def removed(file: Path, where: random.Random) -> None:
    file.unlink()


def bit_flipped(file: Path, where: random.Random) -> None:
    content = bytearray(file.read_bytes())
    content[where.randrange(len(content))] ^= 1 << where.randrange(8)
    file.write_bytes(content)


OF_A_CHECKPOINT = ("tensors.safetensors", "state.json", "DONE")
DAMAGES: dict[str, Damage] = {
    "cut short": cut,
    "emptied": emptied,
    "removed": removed,
    "one bit flipped": bit_flipped,
}


BESIDE = ("checkpoints/best.json", "metrics.jsonl", "precision.json", "preflight.json", "env.json")


def corruption_trials(workshop: Workshop, *, flips: int, seed: int) -> Iterator[Trial]:
    """Every damage to every file of the newest checkpoint, `flips` times where it is random; then
    to both checkpoints, and beside them.

    With 0 flips: one damage to each file, and both checkpoints.
    """
    where, trials = random.Random(seed), list[Callable[[], Trial]]()
    for place, name in enumerate(OF_A_CHECKPOINT):
        for how, damage in list(DAMAGES.items())[
            place if not flips else 0 : None if flips else place + 1
        ]:
            for turn in range(max(1, flips) if damage in (cut, bit_flipped) else 1):
                recipe = (FIRST, SECOND)[(place + turn) % 2]
                trials.append(partial(_newest, workshop, recipe, name, how, damage, where))
    trials.append(partial(_every_checkpoint, workshop, where))
    trials += [partial(_beside, workshop, name, where) for name in (BESIDE if flips else ())]
    for trial in trials:
        yield trial()


def _newest(
    workshop: Workshop, recipe: str, name: str, how: str, damage: Damage, where: random.Random
) -> Trial:
    folder = workshop.unfinished(recipe)
    damage(folder / f"checkpoints/step_{STEPS}" / name, where)
    said, start = f"step_{STEPS} is damaged", f"from step {STEPS - EVERY}"
    return _gone_on(
        workshop,
        folder,
        f"{name} of the newest checkpoint {how}",
        recipe=recipe,
        said=said,
        start=start,
    )


def _every_checkpoint(workshop: Workshop, where: random.Random) -> Trial:
    folder = workshop.unfinished()
    for checkpoint in folder.glob("checkpoints/step_*"):
        bit_flipped(checkpoint / "tensors.safetensors", where)
    return _gone_on(
        workshop,
        folder,
        "every checkpoint damaged",
        said="is damaged",
        start="starting from the beginning",
    )


def _beside(workshop: Workshop, name: str, where: random.Random) -> Trial:
    """A file that a run only writes, cut short: nobody is in its way. The checkpoint is whole, and
    the result is made from it.
    """
    folder = workshop.unfinished()
    cut(folder / name, where)
    return _gone_on(
        workshop,
        folder,
        f"{name} cut short",
        said="",
        start=f"from step {STEPS}",
        weights_only=name == "metrics.jsonl",
    )


def _gone_on(workshop: Workshop, folder: Path, what: str, *, said: str, start: str, recipe: str = FIRST,
             weights_only: bool = False) -> Trial:  # fmt: skip
    """Resumes a damaged run; `weights_only`: what was lost of the curves is lost."""
    ended, wrong, different = workshop.ends_as_undisturbed(folder, workshop.undisturbed(recipe)[0])
    lines = [
        " ".join(line.split()) for line in ended.output.splitlines() if line.startswith("resume")
    ]
    if not wrong and not (
        any(said in line for line in lines) and any(start in line for line in lines)
    ):
        wrong = [f"expected {said!r} and {start!r}, said: {lines}"]
    different = [place for place in different if not (weights_only and place.startswith("metrics"))]
    return Trial(
        part="corruption", what=what, wrong=wrong, different=different, message="; ".join(lines)
    )
