"""Runs a function on dtypes: what a run remembers, what it tells, and how functions are entered.

Statements are in `statements.py`, expressions in `expressions.py`, tests in `conditions.py`; what torch's functions do is in
`operators.py` and the files that it names. A branch whose test is not decided by dtypes asks the path; the caller runs the function
again for the other answer (`paths.py`).
"""

from __future__ import annotations

import ast
from typing import Any

from ..source import SourceFile
from .endings import Impossible, Leave, OutOfSteps, PathEnds, Return
from .events import Event, Kind, Launches, Scenario
from .expressions import EXPRESSIONS
from .paths import Path
from .statements import STATEMENTS
from .values import (
    NONE,
    UNKNOWN,
    Closure,
    Dtype,
    Env,
    Instance,
    Items,
    Loop,
    Mapping,
    Scalar,
    Tensor,
)

MAX_DEPTH = 6  # calls of functions of the same package within one another
MAX_STEPS = 4000  # expressions in one run of one function


class Interpreter:
    """One run of one function in one scenario along one path."""

    def __init__(self, file: SourceFile, scenario: Scenario, path: Path) -> None:
        self.home = self.file = file
        self.scenario, self.path = scenario, path
        self.autocast = scenario.autocast
        self.phase = "call"
        self.events: list[Event] = []
        self.loops: list[Loop] = []  # those being run, in this function and in its callers
        self.calls: list[ast.Call] = []  # calls by which another file was entered
        self.depth = self.steps = 0
        self.found_subclass = False
        self.launched: Launches = {}
        self.entered: dict[ast.AST, set[frozenset[str | None]]] = {}  # function -> floating dtypes that it was called with, all known

    # -- what happened ---------------------------------------------------------------------------------------------------

    def emit(self, kind: Kind, node: ast.expr | ast.stmt, operation: str, *operands: tuple[str, Tensor], value: Any = None) -> None:
        """An event at this node, or, inside another file, at the call that led there."""
        at = node if self.file is self.home else self.calls[0]
        self.events.append(
            Event(
                kind=kind, node=at, operation=operation, operands=operands, scenario=self.scenario, phase=self.phase,
                path=self.path.told(), symbol=self.home.symbol(at), loop=self.loops[-1].node if self.loops else None, value=value,
            )
        )  # fmt: skip

    def refuse(self, kind: Kind, node: ast.expr | ast.stmt, operation: str, *operands: tuple[str, Tensor]) -> None:
        """torch raises here."""
        self.emit(kind, node, operation, *operands)
        raise PathEnds

    def has_no_kernel(self) -> None:
        """torch raises here for every caller in this scenario; inside autocast, for those whose autocast chose the dtype."""
        raise PathEnds if self.autocast else Impossible

    # -- calls -----------------------------------------------------------------------------------------------------------

    def call_closure(self, closure: Closure, args: list[Any], kwargs: dict[str, Any], node: ast.Call | None = None) -> Any:
        if self.depth >= MAX_DEPTH:
            return UNKNOWN
        env = Env(closure.env)
        self._bind(closure, env, args, kwargs)
        tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)]
        told: list[Any] = [*tensors] or [v for v in (*args, *kwargs.values()) if isinstance(v, Dtype)]
        if told and all((v.dtype if isinstance(v, Tensor) else v.word) is not None for v in told):
            self.entered.setdefault(closure.node, set()).add(frozenset(v.dtype for v in tensors if v.floating))
        elif isinstance(closure.bound, Instance) and all(isinstance(v, Scalar) for v in (*args, *kwargs.values())):
            self.entered.setdefault(closure.node, set()).add(frozenset())  # what it works on is self's
        file, self.file = self.file, closure.file
        left_home = file is self.home and self.file is not self.home and node is not None
        if left_home and node is not None:
            self.calls.append(node)
        self.depth += 1
        try:
            if isinstance(closure.node, ast.Lambda):
                return self.evaluate(closure.node.body, env)
            self.run_block(closure.node.body, env)
            return NONE
        except Return as done:
            return done.value
        finally:
            self.depth -= 1
            self.file = file
            if left_home:
                self.calls.pop()

    def _bind(self, closure: Closure, env: Env, args: list[Any], kwargs: dict[str, Any]) -> None:
        spec = closure.node.args
        names = [a.arg for a in (*spec.posonlyargs, *spec.args)]
        values = [closure.bound, *args] if closure.bound is not None else list(args)
        for name, default in zip(reversed(names), reversed(spec.defaults)):
            env.names[name] = self.evaluate(default, closure.env)
        for argument, given in zip(spec.kwonlyargs, spec.kw_defaults):
            env.names[argument.arg] = self.evaluate(given, closure.env) if given is not None else UNKNOWN
        for name in names:
            env.names.setdefault(name, UNKNOWN)
        env.names.update(zip(names, values))
        if spec.vararg:
            env.names[spec.vararg.arg] = Items(known=values[len(names) :])
        taken = {*names, *(a.arg for a in spec.kwonlyargs)}
        env.names.update({k: v for k, v in kwargs.items() if k in taken})
        if spec.kwarg:
            env.names[spec.kwarg.arg] = Mapping({k: v for k, v in kwargs.items() if k not in taken})

    # -- what is run -----------------------------------------------------------------------------------------------------

    def run_block(self, body: list[ast.stmt], env: Env) -> None:
        for statement in body:
            self.run(statement, env)

    def run(self, node: ast.stmt, env: Env) -> None:
        handler = STATEMENTS.get(type(node))
        if handler is not None:
            handler(self, node, env)

    def element_of(self, value: Any) -> Any:
        """What iterating over a value gives."""
        if isinstance(value, Items):
            return value.element()
        if isinstance(value, Tensor):
            return value.but(zero_dim=None)
        return UNKNOWN

    def text(self, node: ast.AST) -> str:
        return self.file.snippet(node, 48)

    def evaluate(self, node: ast.expr, env: Env) -> Any:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise OutOfSteps
        handler = EXPRESSIONS.get(type(node))
        return handler(self, node, env) if handler is not None else UNKNOWN


def run_function(interpreter: Interpreter, closure: Closure, env: Env) -> Any:
    """Runs the body with the names in `env`; what it returned, or UNKNOWN when it raised or was too long."""
    assert not isinstance(closure.node, ast.Lambda)
    try:
        interpreter.run_block(closure.node.body, env)
    except Return as done:
        return done.value
    except (PathEnds, Leave):
        return UNKNOWN
    return NONE
