"""Finds the code that called an operator: the first frame of the Python stack that belongs neither
to PyTorch nor to an observer. This module also finds code of the user's program that runs during an
optimizer's update.
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
from torch.optim import optimizer as torch_optimizer

from ..finding import Place

TORCH_FOLDER = os.path.dirname(torch.__file__) + os.sep
_ISOTYPE_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
# packages of Isotype whose frames may lie between an operator and the code that called it, or
# around a program that they run
OBSERVER_FOLDERS = tuple(
    os.path.join(_ISOTYPE_FOLDER, room) + os.sep for room in ("observe", "doctor", "testing", "cli")
)
_STDLIB_FOLDER = sysconfig.get_paths()["stdlib"] + os.sep
# folders of installed packages
_PACKAGE_FOLDERS = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
# libraries whose code counts as common practice. A model's own code from the hub lies in the cache
# folder of transformers, and counts as the user's code
_HUGGING_FACE_FOLDERS = tuple(
    mark + name + os.sep
    for mark in _PACKAGE_FOLDERS
    for name in ("transformers", "peft", "bitsandbytes", "accelerate")
)
_GENERATED_FILES = (
    "<frozen ",
    "<eval_with_key>",
    "<__array_function__",
    "<attrs ",
    "<decorator-gen",
    "<built-in>",
)
# the start of the name of the folder in which Inductor caches the code that it generated
_INDUCTOR_FOLDER = f"{os.sep}torchinductor_"
# packages whose frames are never the user's code
_TOOL_PACKAGES = frozenset(("torch", "triton", "numpy", "functorch", "_pytest", "pluggy"))
# functions that compute an adapter's own products if `lora_branch` is fp32
_LORA_BRANCH_FUNCTIONS = ("add_branch_fp32", "branch_gradients_fp32")
# methods of a deferred tensor that run other code's operators on its values
_DEFERRED_METHODS = ("_with_real_tensors", "__torch_function__", "__torch_dispatch__")

USER = "user"
ISOTYPE = "isotype"
HUGGING_FACE = "practice"
AUTOGRAD = "autograd"
OPTIMIZER = "torch.optim"
_OBSERVER = "observer"
_TORCH = "torch"
_PYTHON = "python"


@functools.cache
def _code_owner(file: str) -> str:
    if file.startswith(OBSERVER_FOLDERS):
        return _OBSERVER
    if file.startswith(TORCH_FOLDER):
        if file.startswith(TORCH_FOLDER + "optim"):
            return OPTIMIZER
        return _TORCH
    if file.startswith(_ISOTYPE_FOLDER):
        return ISOTYPE
    if any(mark in file for mark in _PACKAGE_FOLDERS):
        if any(part in file for part in _HUGGING_FACE_FOLDERS):
            return HUGGING_FACE
        return USER
    if _is_inductor_file(file):
        return _TORCH
    # interactive code (`<stdin>`, `<string>`, a notebook's cell) is the user's
    if file.startswith((*_GENERATED_FILES, _STDLIB_FOLDER)):
        return _PYTHON
    return USER


def _is_inductor_file(file: str) -> bool:
    """Whether Inductor generated the code of a file, for `torch.compile`."""
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    return _INDUCTOR_FOLDER in file or bool(folder and file.startswith(folder + os.sep))


def is_user_function(function: Any) -> bool:
    """True if a function is in the user's program, and not in PyTorch, Isotype or a library."""
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code is not None and _code_owner(code.co_filename) == USER


class Caller(NamedTuple):
    """The code that called an operator: its kind, file, line and function, and whether it runs
    inside a compiled region.
    """

    kind: str
    file: str
    line: int
    function: str

    @property
    def file_and_line(self) -> str:
        return f"{self.file.rsplit(os.sep, 1)[-1]}:{self.line}"

    @property
    def is_lora_branch(self) -> bool:
        return self.kind == ISOTYPE and self.function in _LORA_BRANCH_FUNCTIONS

    @property
    def is_library(self) -> bool:
        return self.kind != USER


def find_caller(*, skip_deferred_frames: bool = False) -> Caller:
    """Finds the caller of the operator that is being dispatched.

    skip_deferred_frames  whether to skip the frames of a deferred tensor (one that is computed when
                          it is first used), if it was computed for this operator
    """
    frame: FrameType | None = sys._getframe(1)
    kind = file = function = ""
    line = 0
    is_in_optimizer = False
    while frame is not None:
        code = frame.f_code
        owner = _code_owner(code.co_filename)
        if owner == _TORCH:
            if not kind and code.co_name == "_engine_run_backward":
                kind = AUTOGRAD
                file = code.co_filename
                line = frame.f_lineno
        elif owner == OPTIMIZER:
            if (
                not kind
                and not is_in_optimizer
                and code.co_name not in ("wrapper", "_use_grad", "profile_hook_step")
            ):
                is_in_optimizer = True
                file = code.co_filename
                line = frame.f_lineno
        elif (
            owner not in (_OBSERVER, _PYTHON)
            and not kind
            and not (
                skip_deferred_frames and owner == ISOTYPE and code.co_name in _DEFERRED_METHODS
            )
        ):
            kind = OPTIMIZER if is_in_optimizer else owner
            if not is_in_optimizer:
                file = code.co_filename
                line = frame.f_lineno
                function = code.co_name
        frame = frame.f_back
        if kind:
            break
    return Caller(kind or USER, file, line, function)


def is_in_compiled_region() -> bool:
    """Whether the operator that is being dispatched runs in a region for `torch.compile`."""
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    # PyTorch adds each backend to this table when `torch.compile` is called. transformers imports
    # the compiler with every model, so it is often loaded in programs that compile nothing.
    # bitsandbytes adds None, which stands for `torch.compiler.disable`: looking at the stack for
    # each operator after that took 3% of a tiny run
    if eval_frame is None:
        return False
    backends = getattr(eval_frame, "cached_backends", None)
    if backends is not None and all(backend is None for backend in list(backends.values())):
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "compile_wrapper" and _code_owner(code.co_filename) == _TORCH:
            return True
        frame = frame.f_back
    return False


def is_library_forward(module: nn.Module) -> bool:
    """Whether the forward of a module is code of transformers, PEFT, accelerate, bitsandbytes or
    Isotype. Both the forward of its class and a forward that is set on the instance are checked.
    """
    files = set()
    for forward in (type(module).forward, module.__dict__.get("forward")):
        if forward is not None:
            function = inspect.unwrap(getattr(forward, "__func__", forward))
        else:
            function = None
        if (code := getattr(function, "__code__", None)) is not None:
            files.add(_code_owner(code.co_filename))
    return files <= {HUGGING_FACE, ISOTYPE}


# libraries whose optimizers keep all their state in `optimizer.state` or in the settings of their
# groups
_OPTIMIZER_LIBRARIES = (
    "torch.",
    "bitsandbytes.",
    "transformers.",
    "accelerate.",
    "schedulefree.",
    "prodigyopt.",
    "isotype.",
)


def find_custom_update(optimizer: Any) -> str | None:
    """An update of this optimizer may run code that the user wrote: the optimizer's class, a
    replaced `step`, or a hook. Returns the name of this code, or None if there is none.

    An unknown library counts as part of the user's program.
    """
    if type(optimizer).__module__.startswith("accelerate."):
        return find_custom_update(optimizer.optimizer)
    if not _is_optimizer_library(type(optimizer)):
        return type(optimizer).__name__
    hooks: list[Any] = [optimizer.step]
    for attribute in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        hooks += getattr(optimizer, attribute, {}).values()
    hooks += [
        *torch_optimizer._global_optimizer_pre_hooks.values(),
        *torch_optimizer._global_optimizer_post_hooks.values(),
    ]
    return next((_hook_name(hook) for hook in hooks if not _is_optimizer_library(hook)), None)


def find_custom_gradient_hook(parameters: Iterable[Any]) -> str | None:
    """Returns the name of a hook of the user's program that runs when a gradient is accumulated. An
    example is a hook that updates the weight during backward.
    """
    hooks = (
        hook
        for p in parameters
        for hook in (getattr(p, "_post_accumulate_grad_hooks", None) or {}).values()
    )
    return next((_hook_name(hook) for hook in hooks if not _is_optimizer_library(hook)), None)


def _is_optimizer_library(value: Any) -> bool:
    """Whether a class or a function belongs to a known library. If a function wraps another
    function, both are checked, because `functools.wraps` copies the name of the module.
    """
    while isinstance(value, functools.partial):
        value = value.func
    while (function := getattr(value, "__func__", value)) is not None and isinstance(
        getattr(function, "__globals__", None), dict
    ):
        # the dict check is needed because the class of functions has a descriptor `__globals__`
        if not f"{function.__globals__.get('__name__', '')}.".startswith(_OPTIMIZER_LIBRARIES):
            return False
        value = getattr(function, "__wrapped__", None)
    if value is None:
        return True
    module = getattr(value, "__module__", None) or type(value).__module__
    return f"{module}.".startswith(_OPTIMIZER_LIBRARIES)


def _hook_name(hook: Any) -> str:
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
        return f"{short_path(self.file)}:{self.line} in {self.function}"


def innermost_frame(outer: CodeType | None = None) -> FrameType | None:
    """Returns the innermost frame outside the code of PyTorch, Python and observers. Returns None
    if there is no such frame inside the function `outer`.
    """
    for frame in running_frames():
        if frame.f_code is outer:
            return None
        owner = _code_owner(frame.f_code.co_filename)
        if owner not in (_TORCH, OPTIMIZER, _OBSERVER, _PYTHON):
            return frame
    return None


def innermost_site(outer: CodeType | None = None) -> Site | None:
    """Returns the line of the innermost frame (`innermost_frame`)."""
    frame = innermost_frame(outer)
    return None if frame is None else Site(frame.f_code, frame.f_lineno)


def is_tool_file(file: str) -> bool:
    """Whether a file belongs to PyTorch, to Python or to an observer."""
    return _code_owner(file) in (_TORCH, OPTIMIZER, _OBSERVER, _PYTHON)


def call_sites(depth: int = 1) -> list[Site]:
    """Returns the line of each frame of the call stack, innermost first. Frames of an observer are
    left out.
    """
    return [
        Site(frame.f_code, frame.f_lineno)
        for frame in running_frames(depth + 1)
        if _code_owner(frame.f_code.co_filename) != _OBSERVER
    ]


def running_frames(depth: int = 1) -> Iterator[FrameType]:
    """Yields the frames on the stack, innermost first."""
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None:
        yield frame
        frame = frame.f_back


def site_place(site: Site | None, symbol: str | None = None) -> Place:
    """Returns the place to which a message of the doctor points. The place has the file, the line
    and a name, which is `symbol` or, if `symbol` is not given, the name of the function.
    """
    if site is None:
        return Place(symbol=symbol or None)
    return Place(file=site.file, line=site.line, symbol=symbol or site.function)


def short_path(file: str) -> str:
    """Returns a shortened path, which is the part after site-packages or the path relative to the
    current folder.
    """
    for mark in _PACKAGE_FOLDERS:
        if mark in file:
            return file.rpartition(mark)[2]
    relative = os.path.relpath(file)
    return file if relative.startswith("..") else relative


def is_library_file(file: str) -> bool:
    """Whether the file is installed code rather than the user's own."""
    return _code_owner(file) not in (USER, ISOTYPE) or any(
        mark in file for mark in _PACKAGE_FOLDERS
    )


def may_be_at_fault(file: str) -> bool:
    """Whether a check reports faults in this file. Checks do not report faults in files of torch,
    Triton, NumPy, the standard library and test runners.
    """
    for mark in _PACKAGE_FOLDERS:
        if mark in file:
            return file.rpartition(mark)[2].split(os.sep)[0] not in _TOOL_PACKAGES
    return _code_owner(file) in (USER, ISOTYPE)


def innermost_user_site(stack: list[Site]) -> Site | None:
    """Returns the innermost line of the user's own code."""
    return next((site for site in stack if not is_library_file(site.file)), None)


def read_statement(site: Site) -> str:
    """Returns the whole statement at a line as a single line. In the file, the statement may span
    several lines.
    """
    lines = linecache.getlines(site.file)
    try:
        tree = ast.parse("".join(lines))
    except (SyntaxError, ValueError):
        return site.text
    statements = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt)
        and not hasattr(node, "body")
        and node.lineno <= site.line <= (node.end_lineno or node.lineno)
    ]
    if not statements:
        return site.text
    node = max(statements, key=lambda n: n.lineno)
    return " ".join(line.strip() for line in lines[node.lineno - 1 : node.end_lineno])
