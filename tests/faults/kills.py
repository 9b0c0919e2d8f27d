"""SIGKILL at random moments: by the clock, milliseconds into a save, and right before a random file
operation, which meets every window.

A run is killed, resumed, killed again, up to a few times, and then left to end: every kill of such
a chain must have left a whole checkpoint no older than the one before, and the end must be the
undisturbed run's.
"""

import contextlib
import itertools
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from isotype.precision.precision import PRESETS

from .child import Child, before_operation, die, run, wait
from .trial import Trial
from .workshop import FIRST, RECIPES, Workshop

MOST_IN_ONE_RUN = 6
# what writing, syncing and renaming a checkpoint of this size takes, generously
SAVE_SECONDS = 0.012


def kill_trials(workshop: Workshop, *, kills: int, seed: int) -> Iterator[Trial]:
    """`kills` kills in all, over every recipe in turn."""
    moments, done = random.Random(seed), 0
    for turn in range(10 * kills):
        if done >= kills:
            return
        recipe = list(RECIPES)[turn % len(RECIPES)]
        for trial in _chain(
            workshop, recipe, moments, most=min(moments.randint(1, MOST_IN_ONE_RUN), kills - done)
        ):
            done += 1
            yield trial


def _chain(workshop: Workshop, recipe: str, moments: random.Random, *, most: int) -> list[Trial]:
    """One run, killed up to `most` times, then left to end."""
    from isotype.runs.checkpoint.store import CheckpointStore

    undisturbed, ended = workshop.undisturbed(recipe)
    folder = workshop.new_folder()
    settings = workshop.settings(folder, recipe)
    store, newest = CheckpointStore(folder / "checkpoints"), 0
    killed: list[tuple[str, list[str]]] = []
    for _ in range(3 * most):
        if len(killed) == most:
            break
        how = moments.choices(
            ("by the clock", "within a save", "before a file operation"), (2, 1, 1)
        )[0]
        before = (
            before_operation(moments.randint(1, workshop.operations(recipe)), die)
            if how == "before a file operation"
            else None
        )
        child = Child(workshop.go_on(folder, settings), workshop.log(), before=before)
        if how == "by the clock":
            (died,) = wait([child], kill=[0], after=moments.uniform(0, ended.seconds))
        elif how == "within a save":
            (died,) = wait(
                [child],
                kill=[0],
                after=moments.uniform(0, SAVE_SECONDS),
                once=_saves_begin(folder, moments.randint(1, 4)),
            )
        else:
            (died,) = wait([child])
        if died.status == 0:
            break
        step, lost = store.find_newest_intact()
        if (step or 0) < newest:
            lost = [f"the newest whole checkpoint fell from step {newest} to {step}", *lost]
        if died.status != -signal.SIGKILL:
            lost = [f"ended with {died.status} before it was killed: {died.output[-1500:]}"]
        newest = max(newest, step or 0)
        killed.append((f"SIGKILL {how}, {_moment(folder)}", lost))
    last_run, wrong, different = workshop.ends_as_undisturbed(folder, undisturbed, settings)
    said = next(
        (line for line in last_run.output.splitlines() if line.startswith("resume ")),
        "started again",
    )
    message = " ".join(said.split())
    return [
        Trial(part="kills", what=what, wrong=lost + wrong, different=different, message=message)
        for what, lost in killed
    ]


def _saves_begin(folder: Path, number: int) -> Callable[[], bool]:
    """True from the moment when the `number`th folder is seen in the making."""
    seen: set[str] = set()

    def look() -> bool:
        for place in (folder / "checkpoints", folder):
            with contextlib.suppress(OSError):
                seen.update(
                    name
                    for name in os.listdir(place)
                    if name.endswith(".partial") and name.startswith((".step", ".adap", ".model"))
                )
        return len(seen) >= number

    return look


def _moment(folder: Path) -> str:
    """Where a kill met the run, from what it left."""
    names = {p.name for p in folder.iterdir()} if folder.is_dir() else set()
    inside = (
        {p.name for p in (folder / "checkpoints").iterdir()}
        if (folder / "checkpoints").is_dir()
        else set()
    )
    if any(name.startswith(".step_") for name in inside):
        return "in the middle of a checkpoint"
    if any(name in (".adapter.partial", ".model.partial") for name in names):
        return "in the middle of the result"
    if "resolved.yaml" not in names:
        return "before step 1"
    return "after the result" if names & {"adapter", "model"} else "between"


# --- Every optimizer with every preset and every kind of adapter: trained, killed after a
# checkpoint, resumed, compared bit for bit.


OPTIMIZERS = (
    "adamw",
    "adamw8bit",
    "lion",
    "lion8bit",
    "muon",
    "adafactor",
    "schedule-free",
    "prodigy",
)
ADAPTERS: dict[str, dict[str, Any]] = {
    "none": {"kind": "none"},
    "lora": {"kind": "lora", "r": 64, "dropout": 0.1},
    "lora, DoRA from PiSSA": {
        "kind": "lora",
        "r": 8,
        "dora": True,
        "start": "pissa",
        "rank_pattern": {"down_proj": 4},
    },
    "lora, head and embedding trained": {
        "kind": "lora",
        "r": 4,
        "modules_to_save": ["lm_head", "embed_tokens"],
    },
}
STEPS, KILLED_AFTER = 4, 2
REFUSED = (2, 3)  # exit statuses: a contradiction in the configuration, a refusal of the preflight

Cell = tuple[str, str, str]
CELLS: tuple[Cell, ...] = tuple(itertools.product(OPTIMIZERS, PRESETS, ADAPTERS))
# a cell of each kind of state: 8-bit ones in fp32 weights and in LoRA, moments beside rounding, a
# cell that is refused
SLICE: tuple[Cell, ...] = (
    ("adamw8bit", "fp32", "none"),
    ("adamw8bit", "bf16-lora", "lora"),
    ("adamw", "bf16-pure", "lora, head and embedding trained"),
    ("adamw8bit", "bf16-pure", "none"),
)


def matrix_trials(workshop: Workshop, *, cells: tuple[Cell, ...]) -> Iterator[Trial]:
    """One trial a cell."""
    for cell in cells:
        yield _trial(workshop, *cell)


def _trial(workshop: Workshop, optimizer: str, preset: str, adapter: str) -> Trial:
    what = f"{optimizer}, {preset}, adapter {adapter}"
    sections = {
        "precision": {"preset": preset},
        "adapter": {"dropout": 0.0, **ADAPTERS[adapter]},
        "train": {
            "optimizer": optimizer,
            "learning_rate": 1.0 if optimizer == "prodigy" else 1e-3,
            "steps": STEPS,
            "eval_every": KILLED_AFTER,
        },
        "run": {"samples": [], "sample_tokens": 1},
    }
    whole, killed = workshop.new_folder(), workshop.new_folder()
    ended = run(["train", str(workshop.settings(whole, FIRST, **sections))], workshop.log())
    if ended.status in REFUSED:
        clear = ended.clear and not (whole / "resolved.yaml").exists()
        wrong = [] if clear else [f"refused unclearly: {ended.output[-800:]}"]
        return Trial(
            part="matrix", what=what, wrong=wrong, message="refused: " + ended.told("\n  where")
        )
    if ended.status != 0:
        return Trial(
            part="matrix",
            what=what,
            wrong=[f"the run ended with {ended.status}: {ended.output[-800:]}"],
        )
    died = run(
        ["train", str(workshop.settings(killed, FIRST, **sections))],
        workshop.log(),
        before=_die_after_a_save,
    )
    if (
        died.status != -signal.SIGKILL
        or not (killed / f"checkpoints/step_{KILLED_AFTER}/DONE").is_file()
    ):
        return Trial(
            part="matrix",
            what=what,
            wrong=[f"the killed run ended with {died.status}: {died.output[-800:]}"],
        )
    _, wrong, different = workshop.ends_as_undisturbed(killed, whole)
    shutil.rmtree(whole)
    return Trial(
        part="matrix",
        what=what,
        wrong=wrong,
        different=different,
        message=f"killed after step {KILLED_AFTER}",
    )


def _die_after_a_save() -> None:
    """From here on the process kills itself right after the checkpoint of step KILLED_AFTER."""
    from isotype.runs.checkpoint.store import Checkpoint, CheckpointStore

    save = CheckpointStore.save

    def save_then_die(
        self: CheckpointStore, checkpoint: Checkpoint, *, is_best: bool = False
    ) -> None:
        save(self, checkpoint, is_best=is_best)
        if checkpoint.step == KILLED_AFTER:
            die()

    CheckpointStore.save = save_then_die
