"""`linear_log_probs`: per-token log-probabilities, entropies and their like, with gradients, without tokens x vocabulary logits."""

from __future__ import annotations

from .op import OUTPUTS, TokenLogProbs, linear_log_probs

__all__ = ["OUTPUTS", "TokenLogProbs", "linear_log_probs"]
