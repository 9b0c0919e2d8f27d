"""The losses of pairs as functions of the answers' log-probabilities: one value a pair, in fp32, to be summed.

c, r     log-probabilities of the chosen and the rejected answer, summed over their tokens
cr, rr   the same under the reference, the model as the run starts
n, m     the answers' lengths in tokens

dpo      -ln sigmoid(beta h), h = (c - cr) - (r - rr). Source: Rafailov et al. 2023, equation 7; label smoothing: Mitchell 2023
ipo      ((c - cr) / n - (r - rr) / m - 1 / (2 beta))^2. Source: Azar et al. 2023, equation 17, by length as its authors confirmed to TRL
simpo    -ln sigmoid(beta (c / n - r / m) - gamma). Source: Meng et al. 2024, equation 6
orpo     -beta ln sigmoid(ln odds(c / n) - ln odds(r / m)), odds(x) = e^x / (1 - e^x). Source: Hong et al. 2024, equation 7
cpo      -ln sigmoid(beta (c - r)). Source: Xu et al. 2024, equation 5
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ....config.schema import PreferenceSection


class Answers(NamedTuple):
    """Of B pairs, fp32[B] each. The reference is 0 for an objective without one."""

    chosen: Tensor
    rejected: Tensor
    chosen_reference: Tensor
    rejected_reference: Tensor
    chosen_length: Tensor
    rejected_length: Tensor


class Judged(NamedTuple):
    """losses, and what TRL calls rewards and logps: fp32[B] each."""

    losses: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor
    chosen_logps: Tensor
    rejected_logps: Tensor


def judged(objective: str, settings: PreferenceSection, a: Answers) -> Judged:
    """The losses of an objective, `nll` included. Rewards are beta times the log-probability of an answer, over that of the reference
    where there is one; simpo and orpo take means over an answer's tokens."""
    beta, smoothing = settings.beta, settings.label_smoothing
    c, r = a.chosen - a.chosen_reference, a.rejected - a.rejected_reference
    logps = a.chosen, a.rejected
    if objective in ("simpo", "orpo"):
        c, r = c / a.chosen_length, r / a.rejected_length
        logps = c, r
    if objective == "ipo":
        losses = (c / a.chosen_length - r / a.rejected_length - 1 / (2 * beta)).square()
    elif objective == "simpo":
        losses = -F.logsigmoid(beta * (c - r) - settings.simpo_gamma)
    elif objective == "orpo":
        losses = -beta * F.logsigmoid((c - r) - (log1mexp(c) - log1mexp(r)))
    else:
        h = beta * (c - r)
        losses = -(1 - smoothing) * F.logsigmoid(h) - smoothing * F.logsigmoid(-h) if smoothing else -F.logsigmoid(h)
    weight = nll_weight(objective, settings)
    if weight:
        losses = losses - weight * a.chosen / a.chosen_length
    return Judged(losses, beta * c, beta * r, *logps)


def nll_weight(objective: str, settings: PreferenceSection) -> float:
    return settings.nll if settings.nll is not None else float(objective in ("orpo", "cpo"))


def log1mexp(x: Tensor) -> Tensor:
    """ln(1 - e^x) for x < 0, without cancellation on either side of ln 1/2; at 0, where it is -inf, the value of -1e-6."""
    x = x.clamp(max=-1e-6)
    return torch.where(x > -math.log(2), torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(x)))
