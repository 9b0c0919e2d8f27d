"""Log-probabilities that a program makes itself of logits in low precision, and gathers: each is rounded, and a sequence adds them up.

A token's log-probability of -8 in bf16 has steps of 0.03 to 0.06; a sum of 128 of them was off by 1.7 nats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...dtypes import eps
from ...dtypes import name as dtype_name
from ...finding import Finding
from ...observe.operators import LOW, Operator
from ...observe.origin import here, place_of
from .context import After, Before, Context, Watcher, at, now_and_then, say

_LOOKS = 16  # gathers of a line that are looked at, then those whose number is a power of two
_NATS = 0.1  # of a sequence: a difference that losses of preferences and ratios of policies feel


@dataclass(slots=True)
class Gathered:
    """The worst of one line: off, in nats, of a sequence of so many tokens."""

    word: str
    off: float
    tokens: int
    module: str
    site: Any


class LogProbs(Watcher):
    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._logits: torch.Tensor | None = None  # of the last log_softmax in low precision, until they are gathered
        self._looked: dict[Any, int] = {}
        self._found: dict[Any, Gathered] = {}

    def before_ops(self) -> dict[str, Before | tuple[Before, After]]:
        return {"_log_softmax": self.normalised, "gather": self.gathered}

    def normalised(self, op: Operator, args: tuple, kwargs: dict | None) -> None:
        logits, dim, widened = args[:3]
        plain = logits.dtype in LOW and not widened and dim in (-1, logits.ndim - 1) and not torch._C._current_autograd_node()
        self._logits = logits.detach() if plain else None

    def gathered(self, op: Operator, args: tuple, kwargs: dict | None) -> None:
        """Compares what is gathered with the same of the logits in fp32."""
        log_probs, dim, index = args[:3]
        logits, key = self._logits, here()
        if logits is None or log_probs.shape != logits.shape or log_probs.dtype != logits.dtype or dim not in (-1, logits.ndim - 1):
            return
        self._logits = None
        count = self._looked[key] = self._looked.get(key, 0) + 1
        if index.shape[-1] != 1 or not index.numel() or not now_and_then(count, _LOOKS):
            return
        with torch.no_grad():
            exact = logits.float().log_softmax(-1).gather(-1, index).squeeze(-1)
            off = log_probs.detach().gather(-1, index).squeeze(-1).float() - exact
            # more than a rounding: these are other values than that log_softmax's
            if not bool((off.abs() <= eps(dtype_name(logits.dtype)) * exact.abs()).all()):
                return
            worst = float(off.sum(-1).abs().max())
        if worst > max(_NATS, self._found[key].off if key in self._found else 0.0):
            site, module, _ = self._context.here()
            self._found[key] = Gathered(dtype_name(logits.dtype), worst, exact.shape[-1] if exact.ndim else 1, module, site)

    def findings(self) -> list[Finding]:
        return [
            say("TR027", place_of(one.site, one.module), at("at", one.site), word=one.word, off=one.off, tokens=one.tokens)
            for one in self._found.values()
        ]
