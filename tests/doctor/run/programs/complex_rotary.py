"""Rotary embedding as complex numbers, for which bf16 queries and keys have no complex form."""

import sys

import torch


def rotate(queries, keys, angles):
    if "repaired" in sys.argv:
        queries, keys = queries.float(), keys.float()
    complex_queries = torch.view_as_complex(queries.unflatten(-1, (-1, 2)))
    complex_keys = torch.view_as_complex(keys.unflatten(-1, (-1, 2)))
    return complex_queries * angles, complex_keys * angles


angles = torch.polar(torch.ones(3, 2), torch.rand(3, 2))
rotate(torch.randn(3, 4).bfloat16(), torch.randn(3, 4).bfloat16(), angles)
