"""Reads the frames that are running, without those of PyTorch and of the records of `doctor run`.

This module does not import torch, so that a program starts without delay.
"""

from __future__ import annotations

import functools
import os
import sys
from types import CodeType, FrameType, TracebackType
from typing import Any, NamedTuple

_FOLDER = os.path.dirname(__file__) + os.sep
# the files of the records, and PyTorch's function that passes a call to a mode
_RECORD_FILES = tuple(
    _FOLDER + name for name in ("weight_record.py", "tensor_record.py", "first_steps.py")
)
_FORWARDING_FUNCTION = "handle_torch_function"
_MAX_CALLS = 32  # frames outside of PyTorch that are kept for a call


class RunningCode(NamedTuple):
    """A frame that was running: its code, the index of its instruction, and its global variables.
    The local variables are not kept.
    """

    code: CodeType
    instruction: int
    global_variables: dict[str, Any]


def read_calls(frame: FrameType | None) -> tuple[RunningCode, ...]:
    """Returns a frame and those around it, without the frames of PyTorch and of the record."""
    skipped = _skipped_folders()
    calls: list[RunningCode] = []
    while frame is not None and len(calls) < _MAX_CALLS:
        file = frame.f_code.co_filename
        if not file.startswith(skipped):
            calls.append(RunningCode(frame.f_code, frame.f_lasti, frame.f_globals))
        frame = frame.f_back
    return tuple(calls)


def read_innermost_call(frame: FrameType | None) -> RunningCode | None:
    """Returns the first frame, from this one outwards, that is not one of PyTorch or of the record."""
    skipped = _skipped_folders()
    while frame is not None:
        if not frame.f_code.co_filename.startswith(skipped):
            return RunningCode(frame.f_code, frame.f_lasti, frame.f_globals)
        frame = frame.f_back
    return None


@functools.cache
def _skipped_folders() -> tuple[str, ...]:
    torch_folder = os.path.dirname(sys.modules["torch"].__file__ or "") + os.sep
    return _FOLDER, torch_folder, "<frozen "


def remove_record_frames(error: BaseException | None) -> None:
    """Removes the frames of the records from the traceback of an exception, and those in which
    PyTorch passed a call to the record of tensors. The exceptions that caused it are included.
    """
    cleaned: list[BaseException] = []
    while error is not None and not any(error is other for other in cleaned):
        _clean_traceback(error.__traceback__)
        cleaned.append(error)
        error = error.__cause__ or error.__context__


def _clean_traceback(traceback: TracebackType | None) -> None:
    links = []
    while traceback is not None:
        links.append(traceback)
        traceback = traceback.tb_next
    kept: list[TracebackType] = []
    is_after_record = False
    for link in links:
        code = link.tb_frame.f_code
        if kept and code.co_filename in _RECORD_FILES:
            if kept[-1].tb_frame.f_code.co_name == _FORWARDING_FUNCTION:
                kept.pop()
            is_after_record = True
            continue
        if is_after_record and len(kept) > 1 and kept[-1].tb_frame.f_code is code:
            kept.pop()  # the same function, which PyTorch called again after the record
        kept.append(link)
        is_after_record = False
    for link, following in zip(kept, [*kept[1:], None]):
        link.tb_next = following
