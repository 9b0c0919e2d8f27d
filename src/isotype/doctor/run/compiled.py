"""Runs a call of compiled code that failed once more without the compiler. The frames of the first
failure are those of the compiler, or of code that it generated, and contain fake tensors. The
frames of the second failure are those of the user's functions.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .autocast import read_autocast_state
from .frames import CallFrame, collect_frames

_COMPILER_FILE = os.path.join("torch", "_dynamo", "eval_frame.py")


@dataclass(frozen=True, slots=True, eq=False)
class SecondRun:
    """The run of a call without the compiler.

    error   the exception that it raised, or None
    frames  the frames of this exception inside those of the first; without an exception, those
            around the call
    """

    error: BaseException | None
    frames: Sequence[CallFrame]


def run_without_compiler(error: BaseException) -> SecondRun | None:
    """Runs the call of compiled code that raised an exception again. Returns None if the exception
    was not raised in compiled code.

    Code that waits for other processes is not run again, because they have ended.
    """
    frames = collect_frames(error)
    positions = [index for index, frame in enumerate(frames) if _is_compiled_call(frame)]
    if not positions or has_other_processes():
        return None
    outer = frames[: positions[0] + 1]
    variables = outer[-1].variables
    state = read_autocast_state(outer)
    region: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if state.is_on:
        region = torch.autocast(state.device or "cpu", dtype=state.dtype)
    try:
        with torch.compiler.set_stance("force_eager"), region:
            variables["fn"](*variables["args"], **variables["kwargs"])
    except Exception as second:
        link = second.__traceback__
        second.__traceback__ = None if link is None else link.tb_next
        return SecondRun(second, [*outer, *collect_frames(second)])
    return SecondRun(None, outer)


def _is_compiled_call(frame: CallFrame) -> bool:
    is_wrapper = frame.function == "compile_wrapper" and frame.file.endswith(_COMPILER_FILE)
    return is_wrapper and {"fn", "args", "kwargs"} <= set(frame.variables)


def has_other_processes() -> bool:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return False
    return bool(distributed.get_world_size() > 1)
