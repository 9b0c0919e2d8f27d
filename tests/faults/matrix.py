"""Every optimizer with every preset and every kind of adapter: trained, killed after a checkpoint, resumed, compared bit for bit.

A cell that the command line refuses counts as a refusal: one message and a fix, before anything was begun.
"""

import itertools
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from isotype.precision.precision import PRESETS

from .child import Ended, run
from .kills import die
from .trial import Trial
from .workshop import FIRST, Workshop

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
