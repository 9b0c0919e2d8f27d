from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from ..dataflow import torch_names as names
from ..repository import Repository
from ..rule import Hit, Rule
from ..source import Function, SourceFile, last_name
from .evidence import signature_is_its_own
from .lt007_float_tensor_without_dtype import ignoring_its_dtype

_PRECISION = re.compile(r"(\w+_)?dtype|(\w+_)?(in|to|as)_(fp|float)32|(use_)?(fp32|float32|bf16|bfloat16|fp16|float16|half)|upcast(_\w+)?")
_MAKES = names.FACTORIES | names.LIKE | names.NEW | frozenset({"to", "float", "half", "bfloat16", "autocast", "from_pretrained"})


class DtypeArgumentWithoutEffect(Rule):
    """a function takes a dtype and never reads it

    Why
    ---
    `states_in_fp32=True` and `dtype=torch.float32` promise a precision. Where the function makes or casts tensors and never reads the
    argument, the caller gets another dtype than the one asked for, and nothing says so.

    Example
    -------
    ```python
    def states(k, states_in_fp32=False):
        return k.new_empty(k.shape)          # in the dtype of k, whatever was asked for
    ```

    Use instead
    -----------
    ```python
    def states(k, states_in_fp32=False):
        return k.new_empty(k.shape, dtype=torch.float32 if states_in_fp32 else k.dtype)
    ```

    Fix safety
    ----------
    There is no automatic fix: where the dtype belongs is for the author to say.

    Known problems
    --------------
    Off by default: how often it is right has not been measured on enough code. A method that overrides another is left alone, since its
    arguments are those of its base, and so is an argument that no caller in the repository passes. Of an argument that is read in one
    branch only nothing is said. A function that takes `dtype` and makes a float tensor without one is LT007's.
    """

    code = "LT025"
    name = "dtype-argument-without-effect"
    in_tests = False
    on = False

    def visit(self, file: SourceFile) -> Iterator[Hit]:
        for node, option in _options_without_reader(file):
            yield Hit(
                node=node,
                message=f"the option `{option}` is kept and never read",
                cause=f"`{option}` stands among the defaults of this class and nowhere else in the file: what it asks for has no effect",
                fix=f'read it where the tensor is made: dtype=group["{option}"]',
            )
        for function in file.functions():
            for argument in _unread(file, function):
                yield Hit(
                    node=argument,  # type: ignore[arg-type]  # an ast.arg has a place, as expressions have
                    message=f"`{function.name}` takes `{argument.arg}` and never reads it",
                    cause=f"tensors are made or cast in this function, in dtypes that do not depend on `{argument.arg}`: whoever passes it "
                    "gets another dtype than the one asked for",
                    fix=f"use `{argument.arg}` where tensors are made or cast, or take it out of the signature",
                    symbol=file.symbol(argument),
                    leads=partial(_passed, file, function, argument.arg),
                )


def _options_without_reader(file: SourceFile) -> Iterator[tuple[ast.expr, str]]:
    """`defaults = dict(lr=lr, momentum_dtype=momentum_dtype)` of an optimizer, where no text "momentum_dtype" and no attribute reads it."""
    read = {n.value for n in file.nodes(ast.Constant) if isinstance(n.value, str)} | {n.attr for n in file.nodes(ast.Attribute)}
    for call in file.nodes(ast.Call):
        function = file.function_of(call)
        if last_name(call.func) != "dict" or function is None or function.name != "__init__":
            continue
        stored = file.parents.get(call)
        if not (isinstance(stored, ast.Assign) and last_name(stored.targets[0]) == "defaults"):
            continue
        for item in call.keywords:
            if item.arg and item.arg.endswith("_dtype") and item.arg not in read and isinstance(item.value, ast.Name):
                yield item.value, item.arg


def _unread(file: SourceFile, function: Function) -> Iterator[ast.arg]:
    if not signature_is_its_own(file, function):
        return
    inside = [n for statement in function.body for n in ast.walk(statement)]
    if any(isinstance(n, ast.Call) and last_name(n.func) in ("locals", "vars", "super") for n in inside):
        return
    if not any(isinstance(n, ast.Call) and last_name(n.func) in _MAKES for n in inside):
        return
    read = {n.id for n in inside if isinstance(n, ast.Name)}
    for argument in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs):
        if _PRECISION.fullmatch(argument.arg) and argument.arg not in read and not list(ignoring_its_dtype(file, function)):
            yield argument


def _passed(file: SourceFile, function: Function, argument: str, repository: Repository | None) -> tuple[str, str]:
    """A call that passes the argument by name: of this file, or of another that names the function."""
    others = repository.files_with(f"{function.name}(".encode(), but=Path(file.path)) if repository is not None else []
    for other in (file, *others):
        for call in other.nodes(ast.Call):
            if last_name(call.func) == function.name and any(k.arg == argument for k in call.keywords):
                return f"{Path(other.path).name}:{call.lineno} passes {argument}", ""
    return "", f"no call of {function.name} that passes {argument} was found"
