"""What a rule finds: a finding, the key by which repetitions of it are reported once, and the method that has the fault."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any

from ...finding import Finding, Place, Severity
from .attempt import Outcome
from .subjects import Subject

Fault = tuple[tuple[object, ...], Finding]


def fault(code: str, message: str, place: Place, cause: str, fix: str, severity: Severity = Severity.ERROR, **more: str) -> Fault:
    return (code, place.symbol, place.line, severity), Finding(
        code=code, severity=severity, message=message, place=place, cause=cause, fix=fix, observed=more.get("observed")
    )


def method_at_fault(subject: Subject, outcome: Outcome, stage: str) -> Place:
    """The hand-written method that has the fault, if there is one."""
    if outcome.calls:
        function = outcome.calls[0].function
        return method_place(function, stage, owner_of_method(function, stage))
    return subject.place


def registered(function: type, method: str) -> Any:
    """What the author of a torch.library operator registered, for the Function that torch generates around it; else None."""
    own = getattr(function, "backward", None)
    if not function.__name__.startswith("GeneratedBackwardFor_") or own is None:
        return None
    infos = [cell.cell_contents for cell in own.__closure__ or () if hasattr(cell.cell_contents, "_backward_fn")]
    return getattr(infos[0], "_backward_fn" if method == "backward" else "_init_fn", None) if infos else None


def owner_of_method(function: type, method: str) -> str:
    """`Class.backward`; the registered function's own name for an operator of torch.library."""
    written = registered(function, method)
    if written is not None:
        return f"{written.__qualname__.split('<locals>.')[-1]} (of {function.__name__.removeprefix('GeneratedBackwardFor_')})"
    return f"{function.__qualname__.split('<locals>.')[-1]}.{method}"


def return_of(function: type, owner: str) -> Place:
    """The last `return` of a Function's backward."""
    return method_place(function, "backward", owner, statement=True)


def method_place(function: type, method: str, owner: str, *, statement: bool = False) -> Place:
    written: Any = inspect.unwrap(registered(function, method) or getattr(function, method))
    try:
        lines, first = inspect.getsourcelines(written)
        file = inspect.getsourcefile(written)
    except (OSError, TypeError):
        return Place(symbol=owner)
    line = first + next((i for i, text in enumerate(lines) if text.lstrip().startswith("def ")), 0)
    if statement:
        try:
            tree = ast.parse(textwrap.dedent("".join(lines)))
        except SyntaxError:
            tree = ast.Module(body=[], type_ignores=[])
        line = max((first + n.lineno - 1 for n in ast.walk(tree) if isinstance(n, ast.Return)), default=line)
    return Place(file=file, line=line, symbol=owner)
