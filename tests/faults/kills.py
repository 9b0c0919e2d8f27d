"""SIGKILL at random moments: by the clock, milliseconds into a save, and right before a random file operation, which meets every window.

A run is killed, resumed, killed again, up to a few times, and then left to end: every kill of such a chain must have left a whole
checkpoint no older than the one before, and the end must be the undisturbed run's.
"""

import contextlib
import itertools
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from isotype.precision.precision import PRESETS

from .child import Child, Ended, run
from .operations import before_operation, operations_of
from .trial import Trial
from .workshop import FIRST, RECIPES, Workshop

MOST_IN_ONE_RUN = 6
SAVE_SECONDS = 0.012  # what writing, syncing and renaming a checkpoint of this size takes, generously


def kill_trials(workshop: Workshop, *, kills: int, seed: int) -> Iterator[Trial]:
    """`kills` kills in all, over every recipe in turn."""
    moments, done = random.Random(seed), 0
    for turn in range(10 * kills):
        if done >= kills:
            return
        recipe = list(RECIPES)[turn % len(RECIPES)]
        for trial in _chain(workshop, recipe, moments, most=min(moments.randint(1, MOST_IN_ONE_RUN), kills - done)):
            done += 1
            yield trial


def _chain(workshop: Workshop, recipe: str, moments: random.Random, *, most: int) -> list[Trial]:
    """One run, killed up to `most` times, then left to end."""
    from isotype.runs.checkpoint.store import CheckpointStore

    undisturbed, ended = workshop.undisturbed(recipe)
    operations = operations_of(workshop, recipe)
    folder = workshop.new_folder()
    settings = workshop.settings(folder, recipe)
    store, newest = CheckpointStore(folder / "checkpoints"), 0
    killed: list[tuple[str, str, str]] = []
    for _ in range(3 * most):
        if len(killed) == most:
            break
        how = moments.choices(("by the clock", "within a save", "before a file operation"), (2, 1, 1))[0]
        before = before_operation(moments.randint(1, operations), die) if how == "before a file operation" else None
        child = Child(workshop.go_on(folder, settings), workshop.log(), before=before)
        if how == "by the clock":
            status = child.wait(kill_after=moments.uniform(0, ended.seconds)).status
        elif how == "within a save":
            status = child.wait(kill_after=moments.uniform(0, SAVE_SECONDS), once=_saves_begin(folder, moments.randint(1, 4))).status
        else:
            status = child.wait().status
        if status == 0:
            break
        step, passed = store.newest_whole()
        lost = f"the newest whole checkpoint fell from step {newest} to {step}" if (step or 0) < newest else "; ".join(passed)
        if status != -signal.SIGKILL:
            lost = f"ended with {status} before it was killed: {child.log.read_text()[-1500:]}"
        newest = max(newest, step or 0)
        killed.append((how, _moment(folder), lost))
    last_run, wrong = workshop.ends_as_undisturbed(folder, undisturbed, settings)
    said = next((line for line in last_run.output.splitlines() if line.startswith("resume ")), "started again")
    return [
        Trial(
            part="kills", what=f"SIGKILL {how}, {where}", survived=last_run.status == 0 and not lost, identical=not wrong,
            message=" ".join(said.split()), wrong="; ".join([*([lost] if lost else []), *wrong]) + (f" ({folder})" if wrong else ""),
        )
        for how, where, lost in killed
    ]  # fmt: skip


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # the signal is on its way


def _saves_begin(folder: Path, number: int) -> Callable[[], bool]:
    """True from the moment when the `number`th folder is seen in the making."""
    seen: set[str] = set()

    def look() -> bool:
        for place in (folder / "checkpoints", folder):
            with contextlib.suppress(OSError):
                seen.update(
                    name for name in os.listdir(place) if name.endswith(".partial") and name.startswith((".step", ".adap", ".model"))
                )
        return len(seen) >= number

    return look


def _moment(folder: Path) -> str:
    """Where a kill met the run, from what it left."""
    names = {p.name for p in folder.iterdir()} if folder.is_dir() else set()
    inside = {p.name for p in (folder / "checkpoints").iterdir()} if (folder / "checkpoints").is_dir() else set()
    if any(name.startswith(".step_") for name in inside):
        return "in the middle of a checkpoint"
    if any(name in (".adapter.partial", ".model.partial") for name in names):
        return "in the middle of the result"
    if "resolved.yaml" not in names:
        return "before step 1"
    return "after the result" if names & {"adapter", "model"} else "between"


# --- Every optimizer with every preset and every kind of adapter: trained, killed after a checkpoint, resumed, compared bit for bit.


OPTIMIZERS = ("adamw", "adamw8bit")
ADAPTERS: dict[str, dict[str, Any]] = {
    "none": {"kind": "none"},
    "lora": {"kind": "lora", "r": 64, "dropout": 0.1},
    "lora, head and embedding trained": {"kind": "lora", "r": 4, "modules_to_save": ["lm_head", "embed_tokens"]},
}
STEPS, KILLED_AFTER = 4, 2
REFUSED = (2, 3)  # exit statuses: a contradiction in the configuration, a refusal of the preflight

Cell = tuple[str, str, str]
CELLS: tuple[Cell, ...] = tuple(itertools.product(OPTIMIZERS, PRESETS, ADAPTERS))
# a cell of each kind of state: 8-bit ones in fp32 weights and in LoRA, moments beside rounding, a cell that is refused
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
        "train": {"optimizer": optimizer, "steps": STEPS, "eval_every": KILLED_AFTER},
        "run": {"samples": [], "sample_tokens": 1},
    }
    whole, killed = workshop.new_folder(), workshop.new_folder()
    ended = run(["train", str(workshop.settings(whole, FIRST, **sections))], workshop.log())
    if ended.status in REFUSED:
        wrong = "" if ended.clear and not (whole / "resolved.yaml").exists() else f"refused unclearly: {ended.output[-800:]}"
        return Trial(part="matrix", what=what, survived=not wrong, identical=None, message=_refusal(ended), wrong=wrong)
    if ended.status != 0:
        return _failed(what, f"the run ended with {ended.status}: {ended.output[-800:]}")
    died = run(["train", str(workshop.settings(killed, FIRST, **sections))], workshop.log(), before=_die_after_a_save)
    if died.status != -signal.SIGKILL or not (killed / f"checkpoints/step_{KILLED_AFTER}/DONE").is_file():
        return _failed(what, f"the killed run ended with {died.status}: {died.output[-800:]}")
    wrong = "; ".join(workshop.ends_as_undisturbed(killed, whole)[1])
    shutil.rmtree(whole)
    return Trial(part="matrix", what=what, survived=True, identical=not wrong, message=f"killed after step {KILLED_AFTER}", wrong=wrong)


def _failed(what: str, why: str) -> Trial:
    return Trial(part="matrix", what=what, survived=False, identical=None, wrong=why)


def _refusal(ended: Ended) -> str:
    return "refused: " + " ".join(ended.error.removeprefix("isotype: ").partition("\n  where")[0].split())


def _die_after_a_save() -> None:
    """From here on the process kills itself right after the checkpoint of step KILLED_AFTER."""
    from isotype.runs.checkpoint.store import Checkpoint, CheckpointStore

    save = CheckpointStore.save

    def save_then_die(self: CheckpointStore, checkpoint: Checkpoint, *, best: bool = False) -> Path:
        target = save(self, checkpoint, best=best)
        if checkpoint.step == KILLED_AFTER:
            die()
        return target

    CheckpointStore.save = save_then_die
