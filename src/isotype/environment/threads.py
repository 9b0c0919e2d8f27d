"""How threads wait for each other at the end of a parallel loop: by default they spin, which shared cores pay for many times over.

OpenMP lets a thread that has finished its part spin for about a millisecond. Where other programs run on the same cores, it spins on the
core that the last thread needs. With `OMP_WAIT_POLICY=PASSIVE` it sleeps. The number of threads, and so every bit of a result, stays.
Without torch: OpenMP reads the variable when torch is loaded.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping

SHARED = 0.5  # processes that want to run, for each core, from which on threads sleep
_SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def wait_passively(
    *, always: bool = False, load: float | None = None, environ: MutableMapping[str, str] | None = None, loaded: bool | None = None
) -> bool:
    """Lets threads sleep while they wait, if other programs use the cores and the user has not set how they wait. Returns whether it did.

    always   whatever the cores do now
    load     processes that want to run, as os.getloadavg's first number
    environ  os.environ
    loaded   whether torch is loaded, so that it is too late
    """
    environ = os.environ if environ is None else environ
    if ("torch" in sys.modules if loaded is None else loaded) or any(name in environ for name in _SETTINGS):
        return False
    if load is None:
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if not always and load < SHARED * (os.cpu_count() or 1):
        return False
    environ["OMP_WAIT_POLICY"] = "PASSIVE"
    return True
