"""Adds Isotype to trainers of other libraries with `attach(trainer, precision=...)`, and removes it
with `detach(trainer)`.

installer   the two functions; `attach` undoes everything when one of its parts fails
attachment  records what was changed in a trainer
claims      lists the settings outside Isotype that decide the precision of this trainer, and the
            effect of each; refuses trainers that cannot be attached
weights     casts weights and moves autocast, and undoes both; trains bf16 weights with an AdamW
            that rounds stochastically
steps       wraps the trainer's steps: deferred logits, and a stop at non-finite numbers
preflight   runs Isotype's checks on the trainer's rows and arguments
record      writes output_dir/isotype/: the calls of the first step, and the observed dtypes
monitor     observes steps, and finds changes of weights and states between steps
"""

from __future__ import annotations

from .attachment import Attachment
from .installer import attach, detach

__all__ = ["Attachment", "attach", "detach"]
