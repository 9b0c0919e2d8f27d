"""Isotype in trainers of other libraries: `attach(trainer, precision=...)` and `detach(trainer)`.

attach     the two functions, and what is undone when one of its parts fails
owners     who else claims the precision of this trainer, and what becomes of each claim
refusals   trainers and arguments that cannot be attached to, in a sentence each
weights    the weights' dtypes, and the way back
pure       bf16 weights: their gradients' fp32 sums, and the AdamW that rounds stochastically
accelerate_autocast   where autocast runs: on the inner model, not on accelerate's wrapper
guards     non-finite numbers stop the run; what the trainer's logs say besides
logits     logits of a trainer's own loss are deferred
evaluation loss weighted by tokens where it is their mean, and a full evaluation in low precision that leaves the model as it was
preflight  Isotype's checks on the trainer's rows and arguments, with trainer_rows and trainer_subject
first_steps what ran in the first step, and in which dtypes in the second
record     output_dir/isotype/
callback, axolotl, swift   ways in for tools that build their trainers themselves
"""

from __future__ import annotations

from .attach import attach, detach
from .attachment import Attachment
from .callback import IsotypeCallback

__all__ = ["Attachment", "IsotypeCallback", "attach", "detach"]
