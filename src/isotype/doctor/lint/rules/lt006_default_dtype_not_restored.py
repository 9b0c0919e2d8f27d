from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..rule import Edit, FixSafety, Hit, Rule
from ..source import Function, SourceFile, last_name, own_nodes

_RETURN_FORMER = ("get_default_dtype",)
_LOW = re.compile(r"bfloat16|float16|half", re.IGNORECASE)
_HANDED_IN = re.compile(r"(torch_|model_|param_|compute_)?dtype$")  # a default_dtype or orig_dtype is what it is set back to
_SETS_UP = re.compile(r"dtype|precision|default|set_?up|init|config|main|worker|environ|seed", re.IGNORECASE)
SETTERS = ("set_default_dtype", "set_default_tensor_type")


class DefaultDtypeNotRestored(Rule):
    """the default dtype is changed, and an exception keeps it changed

    Why
    ---
    `torch.set_default_dtype` is global. When the code between the change and the restore raises (a corrupt checkpoint, an interrupted
    download, the body of a `with` over a generator), the restore never runs, and every tensor made later without `dtype=`, in any
    library, silently has the other dtype.

    Example
    -------
    ```python
    @contextmanager
    def model_dtype(dtype):
        previous = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        yield
        torch.set_default_dtype(previous)
    ```

    Use instead
    -----------
    ```python
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(previous)
    ```

    Fix safety
    ----------
    Safe: the statements between are put into `try` and the restore into `finally`. Offered where both stand in one block.

    Known problems
    --------------
    A program that sets the default once and means it for good is not reported: a function that restores nothing is, where it hands back
    what it made and no other code of its file sets the default. Nor is a pair of `__enter__` and `__exit__`. A restore by a helper of
    another file is not recognised as one.
    """

    code = "LT006"
    name = "default-dtype-not-restored"
    on = False
    by_name = True
    first_look = (11, 17)
    fix_safety = FixSafety.SAFE
    words = SETTERS

    def visit(self, file: SourceFile) -> Iterator[Hit]:
        for function in file.functions():
            if any(last_name(d) == "fixture" for d in function.decorator_list):
                continue  # pytest continues after the yield even if the test raised
            hit = _unguarded(file, function) or _for_good(file, function)
            if hit:
                yield hit


def _unguarded(file: SourceFile, function: Function) -> Hit | None:
    helpers = _helpers(file)
    if function.name in helpers:
        return None  # judged where it is called
    setters = {*SETTERS, *helpers}
    calls = [n for n in own_nodes(function) if isinstance(n, ast.Call) and file.dotted(n.func).rpartition(".")[2] in setters]
    calls.sort(key=lambda c: c.lineno)
    saved = _saved(file, function)
    guarded = any(_is_guarded(file, call, function) for call in calls)
    restored = {c: c.args[0].id for c in calls if c.args and isinstance(c.args[0], ast.Name) and c.args[0].id in saved}
    restores = list(restored)
    if guarded or not calls:
        return None
    restore = restores[-1] if restores else (calls[-1] if len(calls) > 1 and _in_sequence(file, calls[0], calls[-1]) else None)
    if restore is None:
        return None
    changes = [c for c in calls if c.lineno < restore.lineno and c not in restores]
    # the change may be made by a helper that returns the former dtype: then the finding is placed where that is stored
    first = changes[0] if changes else saved[restored[restores[-1]]]
    risky = [
        n
        for n in own_nodes(function)
        if isinstance(n, (ast.Call, ast.Yield, ast.YieldFrom, ast.Await, ast.Return)) and first.lineno < n.lineno < restore.lineno
    ]
    if not risky:
        return None
    where = "at the yield, where the caller's exceptions arrive," if any(isinstance(n, ast.Yield) for n in risky) else "in between"
    change = f"{file.snippet(first, 50)} (line {first.lineno})"
    return Hit(
        node=first,
        message=f"{function.name} changes the default dtype and restores it outside of `finally`",
        cause=f"set_default_dtype is global: after an exception {where} {file.snippet(restore, 50)} (line {restore.lineno}) never runs, "
        f"and the dtype set by {change} stays for the whole process",
        fix=f"put what follows line {first.lineno} into `try:` and {file.snippet(restore, 50)} into `finally:`",
        edit=_edit(file, first, restore),
    )


def _saved(file: SourceFile, function: Function) -> dict[str, ast.expr]:
    """Names bound to the former default dtype: by get_default_dtype(), or by a helper that sets the default and returns the former."""
    found: dict[str, ast.expr] = {}
    for node in own_nodes(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and len(node.targets) == 1:
            target, called = node.targets[0], file.dotted(node.value.func).rpartition(".")[2]
            if isinstance(target, ast.Name) and (called in _RETURN_FORMER or called in _helpers(file) or _speaks_of_it(called)):
                found[target.id] = node.value
        elif isinstance(node, ast.NamedExpr) and last_name(node.value) == "get_default_dtype":
            found[node.target.id] = node.value
    return found


def _speaks_of_it(called: str) -> bool:
    return "default" in called and "dtype" in called


def _helpers(file: SourceFile) -> set[str]:
    """Functions of this file that set the default to what they are handed, and leave it so: `def enter(dtype): ...`."""
    if "default_dtype_helpers" not in file.memo:
        found = set()
        for function in file.functions():
            calls = [n for n in own_nodes(function) if isinstance(n, ast.Call) and last_name(n.func) in SETTERS]
            arguments = {a.arg for a in (*function.args.args, *function.args.kwonlyargs)}
            handed = len(calls) == 1 and bool(calls[0].args) and last_name(calls[0].args[0]) in arguments
            waits = any(isinstance(n, (ast.Yield, ast.YieldFrom, ast.Try, ast.With)) for n in own_nodes(function))
            if handed and not waits and sum(isinstance(n, ast.Call) for n in own_nodes(function)) <= 3:
                found.add(function.name)
        file.memo["default_dtype_helpers"] = found
    helpers: set[str] = file.memo["default_dtype_helpers"]
    return helpers


def _for_good(file: SourceFile, function: Function) -> Hit | None:
    """A function that hands back what it made, and leaves the default low for the rest of the process."""
    calls = [n for n in file.nodes(ast.Call) if last_name(n.func) in SETTERS]
    if len(calls) != 1 or file.function_of(calls[0]) is not function or not calls[0].args or _SETS_UP.search(function.name):
        return None
    (call,) = calls
    if not (_LOW.search(ast.unparse(call.args[0])) or _HANDED_IN.match(last_name(call.args[0]))) or _is_guarded(file, call, function):
        return None
    made = [n for n in own_nodes(function) if isinstance(n, (ast.Return, ast.Yield)) and n.lineno > call.lineno]
    made = [n for n in made if isinstance(n, ast.Yield) or not (n.value is None or last_name(n.value).endswith("dtype"))]
    if not made:
        return None
    return Hit(
        node=call,
        message=f"{function.name} changes the default dtype and never restores it",
        cause=f"set_default_dtype is global: after {function.name} every tensor made without dtype=, in any library, has the dtype set by "
        f"{file.snippet(call, 50)}, whether or not an exception came between",
        fix="keep torch.get_default_dtype() first, and in `try: ... finally:` set it back",
    )


def _is_guarded(file: SourceFile, call: ast.Call, function: Function) -> bool:
    """Whether it stands in a `finally`, an `except` or a nested function that will be called later."""
    child: ast.AST = call
    while child is not function:
        parent = file.parents[child]
        if isinstance(parent, ast.ExceptHandler) or (isinstance(parent, ast.Try) and child in parent.finalbody):
            return True
        child = parent
    return False


def _in_sequence(file: SourceFile, first: ast.Call, last: ast.Call) -> bool:
    """Whether the second certainly follows the first: not the two arms of one `if`, and another precision."""
    if _precision(first) == _precision(last) if first.args and last.args else True:
        return False
    above: list[tuple[ast.AST, ast.AST]] = []
    child: ast.AST = first
    while (parent := file.parents.get(child)) is not None:
        above.append((parent, child))
        child = parent
    child = last
    while (parent := file.parents.get(child)) is not None:
        for other, branch in above:
            if other is parent and isinstance(parent, ast.If):
                return (branch in parent.body) == (child in parent.body)
        child = parent
    return True


def _precision(call: ast.Call) -> str:
    """`torch.FloatTensor` and `torch.cuda.FloatTensor` are one."""
    return ast.unparse(call.args[0]).replace(".cuda", "").strip("'\"")


def _edit(file: SourceFile, first: ast.expr, restore: ast.Call) -> Edit | None:
    before, after = file.parents.get(first), file.parents.get(restore)
    if not isinstance(before, (ast.Expr, ast.Assign)) or not isinstance(after, ast.Expr):
        return None
    if file.parents.get(before) is not file.parents.get(after) or after.lineno - before.lineno < 2:
        return None
    return Edit.at("finally", before, until=after.lineno)
