"""A simulation samples from a distribution in fp16, whose covariance has no Cholesky factor on a CPU."""

import sys

import torch
from torch.distributions import MultivariateNormal


class Beam:
    def __init__(self, mean, covariance):
        if "repaired" in sys.argv:
            mean, covariance = mean.float(), covariance.float()
        self.distribution = MultivariateNormal(mean, covariance_matrix=covariance)


def make_beam(width, dtype):
    covariance = torch.eye(2, dtype=dtype) * width
    return Beam(torch.zeros(2, dtype=dtype), covariance)


make_beam(0.5, torch.float16).distribution.sample((4,))
