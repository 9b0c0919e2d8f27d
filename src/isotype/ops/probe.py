"""Whether Triton's kernels can run on a device: one is launched, once. A Triton that imports may lack a C compiler or a driver."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch


@cache
def why_no_kernels(device: torch.device) -> str:
    """Why the ops' Triton kernels do not run on this CUDA device, or "". The first question compiles and launches a tiny kernel."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    try:
        launch(device)
    except Exception as error:  # whatever fails (the compiler, the driver, a missing header), the kernels do not run
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        return f"Triton cannot run a kernel: {type(error).__name__}: {first}"[:200]
    return ""


def launch(device: torch.device) -> None:
    """Adds one to a value on `device` and checks the result. Raises the errors of compiling and launching."""
    from .probe_kernel import add_one

    x = torch.ones(1, device=device)
    with torch.cuda.device(device):
        add_one[(1,)](x)
    if float(x) != 2.0:
        raise RuntimeError(f"1 + 1 was {float(x)}")
