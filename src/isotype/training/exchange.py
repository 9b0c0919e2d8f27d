"""The bytes that a step exchanges between processes, for each way to share the work.

W processes, L of them on a machine, N = W / L machines; n forward passes of each process in a step. P are the bytes of all weights, H of
the unit that stays gathered from forward to backward (norm and head), G the bytes of all gradients in `precision.reduce`. Counts what a
process sends with ring algorithms (it receives as much): gathering or scattering x bytes over k processes sends x (k - 1) / k, summing them
on all sends twice that.

    replicate  2 G (W - 1) / W                                               once a step
    shard      n (2 P - H + G) (W - 1) / W                                   each pass gathers for its forward and its backward
    hybrid     n (2 P - H + G) (L - 1) / L, and 2 n (G / L) (N - 1) / N between machines

With recomputation a layer's weights are gathered for the backward and are there for its recomputed forward. A ring over N machines crosses
from each machine to the next once: that link carries what one process sends.

Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations", section 4; Rajbhandari et al. 2020,
"ZeRO", section 7.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..dtypes import to_torch
from ..precision.precision import Precision
from .memory.distributed_plan import UnitBytes


@dataclass(frozen=True)
class Exchange:
    """Bytes in a step. sent: by one process, in all; between: out of one machine."""

    sent: int
    between: int


def replicated(units: Sequence[UnitBytes], precision: Precision, *, processes: int, nodes: int) -> Exchange:
    sent = 2 * _share(_gradients(units, precision), processes)
    return Exchange(sent, sent if nodes > 1 else 0)


def sharded(units: Sequence[UnitBytes], precision: Precision, *, processes: int, nodes: int, passes: int) -> Exchange:
    sent = passes * _share(_of_a_pass(units, precision), processes)
    return Exchange(sent, sent if nodes > 1 else 0)


def hybrid(units: Sequence[UnitBytes], precision: Precision, *, processes: int, nodes: int, passes: int) -> Exchange:
    local = processes // nodes
    within = passes * _share(_of_a_pass(units, precision), local)
    # each process sums its own part with those of the other machines
    between = passes * 2 * _share(_gradients(units, precision) // local, nodes)
    return Exchange(within + between, between * local)


def _of_a_pass(units: Sequence[UnitBytes], precision: Precision) -> int:
    """What all processes of a ring together gather and scatter in one forward and backward."""
    forward = sum(unit.weights for unit in units)
    backward = sum(unit.weights for unit in units if not unit.stays_gathered)
    return forward + backward + _gradients(units, precision)


def _gradients(units: Sequence[UnitBytes], precision: Precision) -> int:
    return sum(unit.elements for unit in units) * to_torch(precision.reduce).itemsize


def _share(size: int, processes: int) -> int:
    return size * (processes - 1) // processes
