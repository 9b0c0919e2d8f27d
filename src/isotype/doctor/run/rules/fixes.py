"""Checks whether a fix can be applied as it is written."""

from __future__ import annotations

import ast
import dataclasses
import math
import re
from collections.abc import Iterator
from collections.abc import Set as AbstractSet

import torch

from ....finding import Finding
from ....observe.origin import short_path
from ..evidence import Evidence
from ..expressions import DTYPE_KEEPING_METHODS
from ..frames import CallFrame, Scope
from ..user_files import iterate_user_files
from ..variable_uses import reaches_layer
from ..weight_record import RECORD
from .autocast import find_outermost_call
from .operands import find_half_dtype, list_floating

# code in backticks, and the place at which it has to be typed
_CODE_OR_PLACE = re.compile(r"`(?P<code>[^`]+)`|(?: at|before) (?P<file>\S+):(?P<line>\d+)|[(;]")
_GENERAL_FIX = (
    "cast the value where your code makes it: the frames do not show this line, and `isotype"
    " doctor run --trace` names it"
)
_ADVICE_TO_TRACE = "; `isotype doctor run --trace` names the line"
_GENERAL_FIX_OF_RECORD = "cast the value where your code makes it"


def check_fix(finding: Finding, evidence: Evidence) -> Finding:
    """Replaces a fix that cannot be applied as it is written by a general one. A fix never edits a
    line of a library.
    """
    library_files = {short_path(f.file) for f in evidence.frames if not f.is_user_code}
    places = {match["file"] for match in _CODE_OR_PLACE.finditer(finding.fix or "")}
    general_fix = _GENERAL_FIX
    if RECORD.is_complete:
        general_fix = _GENERAL_FIX_OF_RECORD
        fix = (finding.fix or "").replace(_ADVICE_TO_TRACE, "")
        finding = dataclasses.replace(finding, fix=fix)
    if places & library_files:
        general_fix = _run_under_autocast(evidence) or general_fix
        return dataclasses.replace(finding, fix=general_fix)
    for code, file, line in _iterate_located_code(finding.fix or ""):
        if not _is_applicable(code, file, line, evidence):
            return dataclasses.replace(finding, fix=general_fix)
    return finding


# functions whose operands autocast casts on each device
_AUTOCAST_FUNCTIONS = frozenset(
    ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "conv1d", "conv2d", "conv3d")
)


def _run_under_autocast(evidence: Evidence) -> str:
    """Returns code that runs the user's call under autocast, if autocast would cast the operands of
    the function of a library that failed, or "".
    """
    half = find_half_dtype(list_floating(evidence))
    frame = find_outermost_call(evidence)
    is_simple = isinstance(frame.statement, (ast.Assign, ast.Expr, ast.Return))
    is_cast = evidence.operation in _AUTOCAST_FUNCTIONS and evidence.autocast.is_on is False
    if half is None or not is_simple or not is_cast or evidence.autocast.location:
        return ""
    call = f"{frame.text}  ({frame.location})"
    return f'with torch.autocast("{evidence.device}", dtype={half}): {call}'


_TORCH_CAST = re.compile(r"\.to\(torch\.(?P<dtype>float32|float64|float16|bfloat16)\)")
_CAST_METHODS = {"float32": "float", "float64": "double", "float16": "half", "bfloat16": "bfloat16"}
_TORCH_NAME = re.compile(r"\btorch\.")


def write_names_of_files(finding: Finding, evidence: Evidence) -> Finding:
    """Writes the code of a fix with the name that `torch` has in the file where it has to be typed,
    such as `th`. In a file that does not import torch, writes a cast as `.float()`.
    """
    fix = finding.fix or ""
    for code, file, _ in list(_iterate_located_code(fix)):
        if not _TORCH_NAME.search(code):
            continue
        tree = _find_tree(file, evidence)
        name = "torch" if tree is None else _find_torch_name(tree)
        if name == "torch":
            continue
        written = _TORCH_NAME.sub(f"{name}.", code)
        if not name:
            written = _TORCH_CAST.sub(lambda match: f".{_CAST_METHODS[match['dtype']]}()", code)
        fix = fix.replace(f"`{code}`", f"`{written}`")
        if not name and _TORCH_NAME.search(written):
            fix += f"; {file} needs `import torch`"
    return dataclasses.replace(finding, fix=fix) if finding.fix else finding


def _find_tree(file: str, evidence: Evidence) -> ast.Module | None:
    """Returns the syntax tree of a file of the user's program, by its path as it is printed."""
    files = iterate_user_files(evidence.frames)
    return next((tree for path, tree, _ in files if short_path(path) == file), None)


def _find_torch_name(tree: ast.Module) -> str:
    """Returns the name by which a file imports torch, or "" if it does not import it."""
    for node in ast.walk(tree):
        for alias in node.names if isinstance(node, ast.Import) else ():
            if alias.name == "torch" or (alias.name.startswith("torch.") and not alias.asname):
                return alias.asname or "torch"
    return ""


_CAST_IN_LINE = re.compile(r"`(?P<value>[^`]+)\.to\((?P<dtype>[\w.]+)\)` at (?P<at>\S+:\d+)")


def cast_before_later_uses(finding: Finding, evidence: Evidence) -> Finding:
    """Replaces a cast in the failing line by one before it, if another use of the same variable would
    fail next: a later line that uses it together with a tensor of the other dtype, or a layer that
    gets it, such as the next norm of a residual stream.
    """
    match = _CAST_IN_LINE.fullmatch(finding.fix or "")
    if match is None or len(evidence.floating_dtypes) != 2:
        return finding
    name = _find_variable(match["value"])
    for frame in evidence.frames:
        if not name or frame.location != match["at"] or not frame.is_user_code:
            continue
        value = frame.variables.get(name)
        scope = frame.scope
        if not isinstance(value, torch.Tensor) or scope is None:
            continue
        others = evidence.floating_dtypes - {value.dtype}
        if len(others) != 1:
            continue
        dtype = match["dtype"]
        if not isinstance(scope, ast.Module) and _has_later_use(scope, name, frame, others):
            partners = _list_variables(frame.expression, frame, others - {value.dtype}) - {name}
            # the function may be called with other dtypes too
            dtype = f"{partners.pop()}.dtype" if len(partners) == 1 else dtype
        elif dtype != str(next(iter(others))) or not reaches_layer(frame, name, next(iter(others))):
            continue
        code = f"`{name} = {name}.to({dtype})` before {match['at']}"
        return dataclasses.replace(finding, fix=code)
    return finding


def _find_variable(expression: str) -> str:
    """Returns the variable of an expression that has the dtype of this variable, such as `kernel` in
    `kernel.view(1, -1)`, or "".
    """
    try:
        node: ast.AST = ast.parse(expression, mode="eval").body
    except SyntaxError:
        return ""  # a statement, such as an assignment
    while True:
        match node:
            case ast.Name(name):
                return name
            case ast.Subscript(value):
                node = value
            case ast.Call(ast.Attribute(value, method)) if method in DTYPE_KEEPING_METHODS:
                node = value
            case _:
                return ""


def _function_name(call: ast.Call) -> str:
    """Returns the name of a function or method, which is the same for its form in place."""
    return ast.unparse(call.func).rpartition(".")[2].rstrip("_")


def _list_variables(
    node: ast.AST | None, frame: CallFrame, dtypes: AbstractSet[torch.dtype]
) -> set[str]:
    """Returns the variables in an expression that are tensors of these dtypes."""
    names = {part.id for part in ast.walk(node or ast.Pass()) if isinstance(part, ast.Name)}
    values = {name: frame.variables.get(name) for name in names}
    return {
        name
        for name, value in values.items()
        if isinstance(value, torch.Tensor) and value.dtype in dtypes
    }


def _has_later_use(
    scope: Scope, name: str, frame: CallFrame, dtypes: AbstractSet[torch.dtype]
) -> bool:
    """True if a call after the running line is one of the same function, and uses a variable and a
    tensor of one of `dtypes`, before another value is assigned to the variable.
    """
    running = frame.expression
    if not isinstance(running, ast.Call):
        return False
    assignments = [
        node.lineno
        for node in ast.walk(scope)
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store)
    ]
    end = min((line for line in assignments if line > frame.line), default=math.inf)
    for node in ast.walk(scope):
        if not isinstance(node, ast.Call) or not frame.line < node.lineno <= end:
            continue
        if _function_name(node) != _function_name(running):
            continue
        names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        if name in names and _list_variables(node, frame, dtypes) - {name}:
            return True
    return False


def _iterate_located_code(fix: str) -> Iterator[tuple[str, str, int]]:
    """Yields each piece of code of a fix with the file and line at which it has to be typed. Several
    pieces may have one place: `q.half()` and `k.half()` at model.py:3.
    """
    pieces: list[str] = []
    for match in _CODE_OR_PLACE.finditer(fix):
        if match["code"]:
            pieces.append(match["code"])
            continue
        for code in pieces if match["file"] else ():
            yield code, match["file"], int(match["line"])
        pieces = []


def _is_applicable(code: str, file: str, line: int, evidence: Evidence) -> bool:
    """True if the file is the user's, and all names in the code are variables there or stand on the
    line. If the line is the running line of a frame, it must also contain the names.
    """
    frames = [frame for frame in evidence.frames if short_path(frame.file) == file]
    frames = [frame for frame in frames if frame.is_user_code]
    try:
        names = _names_in(code)
    except SyntaxError:
        return False
    if not any(all(frame.has_variable(name) for name in names) for frame in frames):
        tree = _find_tree(file, evidence)
        return tree is not None and names <= _names_in_lines(tree, line)
    running = [frame for frame in frames if frame.line == line]
    if any(_calls_in_place_function(frame, evidence) for frame in running):
        return False  # it would change a copy
    return not running or any(names <= _names_in_statement(frame) for frame in running)


def _calls_in_place_function(frame: CallFrame, evidence: Evidence) -> bool:
    """True if the frame calls a Python function of a library whose name ends with `_`."""
    call = frame.expression
    if frame is evidence.failing_frame or not isinstance(call, ast.Call):
        return False
    return ast.unparse(call.func).endswith("_")


def _names_in(code: str) -> set[str]:
    """Returns the variables that an expression reads, without the names of modules of torch."""
    tree = ast.parse(code)
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    bound = {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    return names - bound - {"torch", "nn", "safetensors"}


def _names_in_lines(tree: ast.Module, line: int) -> set[str]:
    """Returns the names in the expressions of a file that begin on a line. An expression may end on
    a later line.
    """
    expressions = [
        node for node in ast.walk(tree) if isinstance(node, ast.expr) and node.lineno == line
    ]
    nodes = [part for expression in expressions for part in ast.walk(expression)]
    return {node.id for node in nodes if isinstance(node, ast.Name)}


def _names_in_statement(frame: CallFrame) -> set[str]:
    statement = frame.statement
    if statement is None:
        return set()
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
