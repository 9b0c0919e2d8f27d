"""`linear_divergence`: how far a student's next-token distributions are from a teacher's, from the hidden states of both."""

from __future__ import annotations

from .op import linear_divergence

__all__ = ["linear_divergence"]
