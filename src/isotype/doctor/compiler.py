"""Switches PyTorch's compiler off while the doctor observes a function."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext

import torch


def run_without_compiler() -> AbstractContextManager[None]:
    """Returns a context in which functions that are compiled with torch.compile run uncompiled.

    Under a dispatch mode and with a simulated GPU, the compiler skips a function. With
    `fullgraph=True` all later calls then raise "found no compiled frames", such as
    `sort_logit_avg` of cut-cross-entropy 25.1.1. Also, each dtype would be compiled again.
    """
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and the import takes a second
        return nullcontext()
    stance: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance
