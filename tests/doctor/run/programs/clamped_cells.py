"""The cells of targets are clamped in place to bounds that come from a tensor of floats."""

import sys

import torch


def find_cells(points, gain):
    cells = (points * gain[:2]).long()
    columns, rows = cells.T
    if "repaired" in sys.argv:
        return rows.clamp_(0, (gain[1] - 1).to(rows.dtype)), columns.clamp_(
            0, (gain[0] - 1).to(columns.dtype)
        )
    return rows.clamp_(0, gain[1] - 1), columns.clamp_(0, gain[0] - 1)


gain = torch.ones(4)
gain[:2] = torch.tensor([8, 8])
find_cells(torch.rand(5, 2) * 1.2, gain)
