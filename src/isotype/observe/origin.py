"""Who asked for an operator: the first frame of the Python stack that is neither PyTorch's nor an
observer's, and whose code it is; and whose code an update runs.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import optimizer as of_torch

from ..finding import Place

TORCH = os.path.dirname(torch.__file__) + os.sep
_ISOTYPE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
# rooms whose frames stand between an operator and the code that asked for it, or around a program
# that they run
OBSERVERS = tuple(
    os.path.join(_ISOTYPE, room) + os.sep for room in ("observe", "doctor", "testing", "cli")
)
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
# libraries whose models and layers are what plain practice means here; models of the Hub lie in a
# folder of transformers' cache
_PRACTICE = tuple(
    mark + name + os.sep
    for mark in _PACKAGES
    for name in ("transformers", "peft", "bitsandbytes", "accelerate")
)
_GENERATED = (
    "<frozen ",
    "<eval_with_key>",
    "<__array_function__",
    "<attrs ",
    "<decorator-gen",
    "<built-in>",
)
_TOOLS = frozenset(("torch", "triton", "numpy", "functorch", "_pytest", "pluggy"))
# compute an adapter's own products where `lora_branch` is fp32
_BRANCH = ("add_branch_fp32", "branch_gradients_fp32")
# methods of a deferred tensor that run an operator of others on its values
_HANDS_ON = ("_with_real_tensors", "__torch_function__", "__torch_dispatch__")

USER = "user"
OURS = "isotype"
PRACTICE = "practice"
ENGINE = "autograd"
OPTIMIZER = "torch.optim"
_OBSERVER = "observer"
_TORCH = "torch"
_PYTHON = "python"


@functools.cache
def _room(file: str) -> str:
    if file.startswith(OBSERVERS):
        return _OBSERVER
    if file.startswith(TORCH):
        if file.startswith(TORCH + "optim"):
            return OPTIMIZER
        return _TORCH
    if file.startswith(_ISOTYPE):
        return OURS
    if any(mark in file for mark in _PACKAGES):
        if any(part in file for part in _PRACTICE):
            return PRACTICE
        return USER
    # code that is typed (`<stdin>`, `<string>`, a notebook's cell) is the user's
    if file.startswith((*_GENERATED, _STDLIB)):
        return _PYTHON
    return USER


class Caller(NamedTuple):
    """The kind of code, its file, line and function, and whether it runs inside a compiled region."""

    kind: str
    file: str
    line: int
    function: str
    compiled: bool

    @property
    def place(self) -> str:
        return f"{self.file.rsplit(os.sep, 1)[-1]}:{self.line}"

    @property
    def is_lora_branch(self) -> bool:
        return self.kind == OURS and self.function in _BRANCH

    @property
    def of_a_library(self) -> bool:
        return self.kind != USER


def caller(*, asked: bool = False) -> Caller:
    """The caller of the operator that is being dispatched.

    asked  whether to pass by a deferred tensor that became real for it, to the code that asked for
           the operator
    """
    frame: FrameType | None = sys._getframe(1)
    kind = file = function = ""
    line = 0
    compiled = False
    optimizer = False
    compiler = "torch._dynamo" in sys.modules
    while frame is not None:
        code = frame.f_code
        where = _room(code.co_filename)
        if where == _TORCH:
            if not kind and code.co_name == "_engine_run_backward":
                kind = ENGINE
                file = code.co_filename
                line = frame.f_lineno
            compiled = compiled or code.co_name == "compile_wrapper"
        elif where == OPTIMIZER:
            if (
                not kind
                and not optimizer
                and code.co_name not in ("wrapper", "_use_grad", "profile_hook_step")
            ):
                optimizer = True
                file = code.co_filename
                line = frame.f_lineno
        elif (
            where not in (_OBSERVER, _PYTHON)
            and not kind
            and not (asked and where == OURS and code.co_name in _HANDS_ON)
        ):
            kind = OPTIMIZER if optimizer else where
            if not optimizer:
                file = code.co_filename
                line = frame.f_lineno
                function = code.co_name
        if kind and not compiler:
            break  # nothing above can be a compiled region
        frame = frame.f_back
    return Caller(kind or USER, file, line, function, compiled)


def written_by_a_family(module: nn.Module) -> bool:
    """Whether the forward of a module's class, and one that was set on the module itself, are code
    of transformers and its like.
    """
    files = set()
    for forward in (type(module).forward, module.__dict__.get("forward")):
        if forward is not None:
            function = inspect.unwrap(getattr(forward, "__func__", forward))
        else:
            function = None
        if (code := getattr(function, "__code__", None)) is not None:
            files.add(_room(code.co_filename))
    return files <= {PRACTICE, OURS}


# libraries of optimizers: every state of theirs is in `optimizer.state` or in the settings of its
# groups
_OF_OPTIMIZERS = (
    "torch.",
    "bitsandbytes.",
    "transformers.",
    "accelerate.",
    "schedulefree.",
    "prodigyopt.",
    "isotype.",
)


def code_of_update(optimizer: Any) -> str | None:
    """The name of a program's own code that an update of this optimizer runs: its class, a `step`
    that replaced it, or a hook of it.

    A library that is not known counts as a program's own.
    """
    if type(optimizer).__module__.startswith("accelerate."):
        return code_of_update(optimizer.optimizer)
    if not _of_an_optimizers_library(type(optimizer)):
        return type(optimizer).__name__
    hooks: list[Any] = [optimizer.step]
    for of_one in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        hooks += getattr(optimizer, of_one, {}).values()
    hooks += [
        *of_torch._global_optimizer_pre_hooks.values(),
        *of_torch._global_optimizer_post_hooks.values(),
    ]
    return next((_name(hook) for hook in hooks if not _of_an_optimizers_library(hook)), None)


def hook_of_gradients(parameters: Iterable[Any]) -> str | None:
    """The name of a program's own hook that runs when a gradient has arrived, as one that updates
    the weight in backward.
    """
    hooks = (
        hook
        for p in parameters
        for hook in (getattr(p, "_post_accumulate_grad_hooks", None) or {}).values()
    )
    return next((_name(hook) for hook in hooks if not _of_an_optimizers_library(hook)), None)


def _of_an_optimizers_library(made: Any) -> bool:
    """Whether a class, or a function and everything that it wraps, is of a library:
    `functools.wraps` copies the name of the module.
    """
    while isinstance(made, functools.partial):
        made = made.func
    while (function := getattr(made, "__func__", made)) is not None and isinstance(
        getattr(function, "__globals__", None), dict
    ):
        # the class of functions has a descriptor of that name
        if not f"{function.__globals__.get('__name__', '')}.".startswith(_OF_OPTIMIZERS):
            return False
        made = getattr(function, "__wrapped__", None)
    if made is None:
        return True
    module = getattr(made, "__module__", None) or type(made).__module__
    return f"{module}.".startswith(_OF_OPTIMIZERS)


def _name(hook: Any) -> str:
    return str(getattr(hook, "__qualname__", None) or type(hook).__qualname__)


class Site(NamedTuple):
    """A line of a running function."""

    code: CodeType
    line: int

    @property
    def file(self) -> str:
        return self.code.co_filename

    @property
    def function(self) -> str:
        return self.code.co_qualname.replace("<locals>.", "")

    @property
    def text(self) -> str:
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        return f"{short(self.file)}:{self.line} in {self.function}"


def here() -> Site | None:
    """The innermost running line that is neither PyTorch's, Python's nor an observer's."""
    own = (
        frame
        for frame in running_frames()
        if _room(frame.f_code.co_filename) not in (_TORCH, OPTIMIZER, _OBSERVER, _PYTHON)
    )
    return next((Site(frame.f_code, frame.f_lineno) for frame in own), None)


def callers(depth: int = 1) -> list[Site]:
    """Every line on the stack but an observer's, innermost first."""
    return [
        Site(frame.f_code, frame.f_lineno)
        for frame in running_frames(depth + 1)
        if _room(frame.f_code.co_filename) != _OBSERVER
    ]


def running_frames(depth: int = 1) -> Iterator[FrameType]:
    """Innermost first."""
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None:
        yield frame
        frame = frame.f_back


def place_of(site: Site | None, symbol: str | None = None) -> Place:
    """Where a finding points to: the line, under `symbol`, or under its function where there is
    none.
    """
    if site is None:
        return Place(symbol=symbol or None)
    return Place(file=site.file, line=site.line, symbol=symbol or site.function)


def short(file: str) -> str:
    """A shortened path: the part after site-packages, or relative to the current folder."""
    for mark in _PACKAGES:
        if mark in file:
            return file.rpartition(mark)[2]
    relative = os.path.relpath(file)
    return file if relative.startswith("..") else relative


def in_library(file: str) -> bool:
    """Whether the file is installed code rather than the user's own."""
    return _room(file) not in (USER, OURS) or any(mark in file for mark in _PACKAGES)


def may_be_at_fault(file: str) -> bool:
    """Whether code in this file may have a fault that a check finds: not torch, Triton, NumPy, the
    standard library or a checker.
    """
    for mark in _PACKAGES:
        if mark in file:
            return file.rpartition(mark)[2].split(os.sep)[0] not in _TOOLS
    return _room(file) in (USER, OURS)


def users_line(stack: list[Site]) -> Site | None:
    """The innermost line of the user's own code."""
    return next((site for site in stack if not in_library(site.file)), None)


def statement(site: Site) -> str:
    """The whole statement at a line, on one line (a call may span several)."""
    lines = linecache.getlines(site.file)
    try:
        tree = ast.parse("".join(lines))
    except (SyntaxError, ValueError):
        return site.text
    holding = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt)
        and not hasattr(node, "body")
        and node.lineno <= site.line <= (node.end_lineno or node.lineno)
    ]
    if not holding:
        return site.text
    node = max(holding, key=lambda n: n.lineno)
    return " ".join(line.strip() for line in lines[node.lineno - 1 : node.end_lineno])
