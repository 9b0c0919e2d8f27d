"""Isotype in trainers of other libraries: `attach(trainer, precision=...)` and `detach(trainer)`.

installer   the two functions; `attach` undoes everything when one of its parts fails
attachment  what was changed in a trainer
claims      who else claims the precision of this trainer, what becomes of each claim, and which
            trainers are refused
weights     the weights' dtypes and autocast, and the way back; bf16 weights with an AdamW that
            rounds stochastically
steps       deferred logits, non-finite numbers that stop the run
preflight   Isotype's checks on the trainer's rows and arguments
record      output_dir/isotype/: what ran in the first step, and in which dtypes in the second
monitor     the steps that are observed, and what changes weights and states between steps
"""

from __future__ import annotations

from .attachment import Attachment
from .installer import attach, detach

__all__ = ["Attachment", "attach", "detach"]
