"""Finds the code that called an operator: the first frame of the Python stack that belongs neither to PyTorch nor to the observer."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterator
from functools import cache
from types import FrameType
from typing import NamedTuple

import torch
from torch import nn

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OBSERVER = os.path.dirname(__file__) + os.sep
_OURS = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep
# computes an adapter's own products where `lora_branch` is fp32
_BRANCH = os.path.join(_OURS, "lora", "wide_branch.py")
# methods of a deferred tensor that run an operator of others on its values
_HANDS_ON = ("_with_real_tensors", "__torch_function__", "__torch_dispatch__")
# libraries whose models and layers are what plain practice means here
_PRACTICE = tuple(f"{os.sep}site-packages{os.sep}{name}{os.sep}" for name in ("transformers", "peft", "bitsandbytes", "accelerate"))
# models of the Hub lie in a folder of transformers' cache, not among its files
USER, OURS, PRACTICE, ENGINE, OPTIMIZER = "user", "isotype", "practice", "autograd", "torch.optim"


class Caller(NamedTuple):
    """The kind of code, its file and line, and whether it runs inside a compiled region."""

    kind: str
    file: str
    line: int
    compiled: bool

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


@cache
def _room(file: str) -> str:
    if file.startswith(_OBSERVER):
        return "observer"
    if file.startswith(_TORCH):
        return "optim" if file.startswith(_TORCH + "optim") else "torch"
    if file.startswith(_OURS):
        return OURS
    return PRACTICE if any(part in file for part in _PRACTICE) else USER


def is_practice(file: str) -> bool:
    return _room(file) == PRACTICE


def is_lora_branch(file: str) -> bool:
    return file == _BRANCH


def forward_files(module: nn.Module) -> Iterator[str]:
    """The files of the forward of a module's class, and of one that was set on the module itself."""
    for forward in (type(module).forward, module.__dict__.get("forward")):
        function = inspect.unwrap(getattr(forward, "__func__", forward)) if forward is not None else None
        code = getattr(function, "__code__", None)
        if code is not None and _room(code.co_filename) != OURS:
            yield code.co_filename


def caller(*, asked: bool = False) -> Caller:
    """The caller of the operator that is being dispatched.

    asked  whether to pass by a deferred tensor that became real for it, to the code that asked for the operator
    """
    frame: FrameType | None = sys._getframe(1)
    kind = file = ""
    line, compiled, optimizer, compiler = 0, False, False, "torch._dynamo" in sys.modules
    while frame is not None:
        code = frame.f_code
        where = _room(code.co_filename)
        if where == "torch":
            if not kind and code.co_name == "_engine_run_backward":
                kind, file, line = ENGINE, code.co_filename, frame.f_lineno
            compiled = compiled or code.co_name == "compile_wrapper"
        elif where == "optim":
            if not kind and not optimizer and code.co_name not in ("wrapper", "_use_grad", "profile_hook_step"):
                optimizer, file, line = True, code.co_filename, frame.f_lineno
        elif where != "observer" and not kind and not (asked and where == OURS and code.co_name in _HANDS_ON):
            kind = OPTIMIZER if optimizer else where
            if not optimizer:
                file, line = code.co_filename, frame.f_lineno
        if kind and not compiler:
            break  # nothing above can be a compiled region
        frame = frame.f_back
    return Caller(kind or USER, file, line, compiled)
