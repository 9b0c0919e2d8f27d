"""Finds the hooks of modules and the callbacks of trainers in the user's code, with the lines that
register them.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ...observe.origin import short_path
from .frames import CallFrame, parse_user_file
from .modules import ModelNames

_REGISTERING_METHOD = re.compile(r"register_\w*hook\w*")
_CALLBACK_BASES = ("TrainerCallback", "Callback")
# files of torch that run a function of the user's code which is no hook
_FUNCTION_WRAPPERS = ("/_dynamo/eval_frame.py", "/utils/checkpoint.py")
_HOOK_VARIABLES = ("hook", "pre_hook", "post_hook", "fn")


@dataclass(frozen=True, slots=True)
class Handler:
    """A hook or callback of the user's code that was running.

    kind  hook or callback
    text  its name, and where it was registered
    """

    kind: str
    text: str


def describe_hook(hook: Any, kind: str, path: str, files: Iterable[str]) -> str:
    """Returns a text such as "forward hook `cast` of embed (registered at train.py:12)"."""
    name = _function_name(hook)
    text = f"{kind} `{name}` of {path}" if path else f"{kind} `{name}`"
    location = find_hook_registration(hook, files)
    return f"{text} (registered at {location})" if location else text


def find_handler(frames: Sequence[CallFrame], names: ModelNames) -> Handler | None:
    """Returns the innermost hook or callback of the user's code among the running functions."""
    files = [frame.file for frame in frames if frame.is_user_code]
    for index in reversed(range(1, len(frames))):
        frame = frames[index]
        caller = frames[index - 1]
        if not frame.is_user_code or caller.is_user_code:
            continue
        owner = frame.variables.get("self")
        if is_callback(owner) and frame.function.startswith("on_"):
            text = f"{type(owner).__name__}.{frame.function}"
            location = find_callback_registration(owner, files)
            return Handler("callback", f"{text}, registered at {location}" if location else text)
        hook = _running_hook(frame, caller)
        if hook is not None:
            module = caller.variables.get("self")
            path = names.module_path(module) if isinstance(module, nn.Module) else ""
            return Handler("hook", describe_hook(hook, "hook", path, files))
    return None


def _running_hook(frame: CallFrame, caller: CallFrame) -> Any:
    """Returns the function of a frame if its caller in torch runs it as a hook, or None."""
    file = caller.file.replace("\\", "/")
    if "/torch/" not in file or file.endswith(_FUNCTION_WRAPPERS):
        return None
    for name in _HOOK_VARIABLES:
        hook = caller.variables.get(name)
        function = getattr(hook, "__func__", hook)
        if getattr(function, "__code__", None) is frame.code:
            return hook
    if caller.function == "_engine_run_backward" and frame.function != "backward":
        return frame.code
    return None


def is_callback(value: Any) -> bool:
    """True for an object whose class is derived from a trainer's callback class."""
    return any(kind.__name__ in _CALLBACK_BASES for kind in type(value).__mro__)


def _function_name(hook: Any) -> str:
    function = hook.func if isinstance(hook, functools.partial) else hook
    name = getattr(function, "__qualname__", None) or getattr(function, "co_qualname", None)
    return str(name or type(hook).__name__).rpartition("<locals>.")[2]


def find_hook_registration(hook: Any, files: Iterable[str]) -> str:
    """Returns the file and line at which the user's code registers a hook, or "" if the code
    contains no such line.
    """
    function = hook.func if isinstance(hook, functools.partial) else hook
    code = getattr(function, "__code__", function)
    first_line = getattr(code, "co_firstlineno", 0)
    # a function that another function returned is registered as `make_hook(...)`
    parts = str(getattr(function, "__qualname__", _function_name(hook))).split(".<locals>.")
    names = [part.rpartition(".")[2] for part in parts]
    for file, call in _iterate_calls([getattr(code, "co_filename", ""), *files]):
        method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        if not _REGISTERING_METHOD.fullmatch(method):
            continue
        for node in _walk_arguments(call):
            is_lambda = isinstance(node, ast.Lambda) and node.lineno == first_line
            if is_lambda or any(_names(node, name) for name in names):
                return f"{short_path(file)}:{call.lineno}"
    return ""


def find_callback_registration(callback: Any, files: Iterable[str]) -> str:
    """Returns the file and line at which the user's code passes a callback to a trainer. If no such
    line names the class, returns the line that creates the callback.
    """
    name = type(callback).__name__
    created = ""
    for file, call in _iterate_calls(files):
        location = f"{short_path(file)}:{call.lineno}"
        method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        nodes = [keyword.value for keyword in call.keywords if keyword.arg == "callbacks"]
        if method == "add_callback":
            nodes += call.args
        if any(_names(part, name) for node in nodes for part in ast.walk(node)):
            return location
        if _names(call.func, name) and not created:
            created = location
    return created


def _iterate_calls(files: Iterable[str]) -> Iterator[tuple[str, ast.Call]]:
    """Yields the calls in files of the user's code."""
    for file in dict.fromkeys(files):
        tree = parse_user_file(file) if file else None
        if tree is None:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                yield file, node


def _walk_arguments(call: ast.Call) -> Iterator[ast.AST]:
    for argument in [*call.args, *(keyword.value for keyword in call.keywords)]:
        yield from ast.walk(argument)


def _names(node: ast.AST, name: str) -> bool:
    """True if an expression is this name, or an attribute with this name."""
    if isinstance(node, ast.Name):
        return node.id == name
    return isinstance(node, ast.Attribute) and node.attr == name
