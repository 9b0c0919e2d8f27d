"""A buffer of NumPy is created with the dtype of a tensor."""

import sys

import numpy as np
import torch


def collect(hidden):
    dtype = np.float32 if "repaired" in sys.argv else hidden.dtype
    rows = np.zeros((2, hidden.shape[0]), dtype=dtype)
    rows[0] = hidden.float().numpy()
    return rows


print(collect(torch.ones(4, dtype=torch.bfloat16)).sum())
