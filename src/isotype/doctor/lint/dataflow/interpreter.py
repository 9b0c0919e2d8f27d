"""Runs a function on dtypes: statements and expressions. What torch's functions do is in `operators.py` and the files that it names.

A branch whose test is not decided by dtypes asks the path; the caller runs the function again for the other answer (`paths.py`).
A loop's body is run twice, so that what the first round leaves behind is met by the second.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

from ..source import Function, SourceFile, last_name
from . import matrix_products, operators, promotion, writes
from .events import Event, Kind, Scenario
from .modules import module_constants, resolve_function
from .paths import Path
from .values import (
    NONE,
    UNFOLLOWED,
    UNKNOWN,
    Closure,
    Context,
    Dtype,
    Env,
    Instance,
    Items,
    Layer,
    Mapping,
    Method,
    Module,
    Scalar,
    Tensor,
)

MAX_DEPTH = 6  # calls of functions of the same package within one another
MAX_STEPS = 4000  # expressions in one run of one function

_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


class _Return(Exception):
    def __init__(self, value: Any) -> None:
        self.value = value


class _Leave(Exception):
    """break or continue; `again` for continue."""

    def __init__(self, again: bool) -> None:
        self.again = again


class PathEnds(Exception):
    """The code raised, or torch would have: nothing after this is reached."""


class Impossible(Exception):
    """torch has no such kernel for this dtype: nobody runs the function in this scenario along this path."""


class OutOfSteps(Exception):
    """The function is too long to be followed."""


class Interpreter:
    """One run of one function in one scenario along one path."""

    def __init__(self, file: SourceFile, scenario: Scenario, path: Path) -> None:
        self.home = self.file = file
        self.scenario, self.path = scenario, path
        self.autocast = scenario.autocast
        self.phase = "call"
        self.events: list[Event] = []
        self.loops: list[tuple[ast.AST, set[str]]] = []  # the loops being run, with the names bound when each began
        self.calls: list[ast.Call] = []  # calls by which another file was entered
        self.depth = self.steps = 0
        self.found_subclass = False
        self.entered: dict[ast.AST, set[frozenset[str | None]]] = {}  # function -> floating dtypes that it was called with, all known

    # -- what happened ---------------------------------------------------------------------------------------------------

    def emit(self, kind: Kind, node: ast.expr | ast.stmt, operation: str, *operands: tuple[str, Tensor], value: Any = None) -> None:
        """An event at this node, or, inside another file, at the call that led there."""
        at = node if self.file is self.home else self.calls[0]
        self.events.append(
            Event(
                kind=kind, node=at, operation=operation, operands=operands, scenario=self.scenario, phase=self.phase,
                path=self.path.told(), symbol=self.home.symbol(at), loop=self.loops[-1][0] if self.loops else None, value=value,
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
        told = tensors or [v for v in (*args, *kwargs.values()) if isinstance(v, Dtype)]
        if told and all((v.dtype if isinstance(v, Tensor) else v.word) is not None for v in told):
            self.entered.setdefault(closure.node, set()).add(frozenset(v.dtype for v in tensors if v.floating))
        file, self.file = self.file, closure.file
        left_home = file is self.home and self.file is not self.home and node is not None
        if left_home:
            self.calls.append(node)  # type: ignore[arg-type]
        loops, self.loops = self.loops, []
        self.depth += 1
        try:
            if isinstance(closure.node, ast.Lambda):
                return self.evaluate(closure.node.body, env)
            self.run_block(closure.node.body, env)
            return NONE
        except _Return as done:
            return done.value
        finally:
            self.depth -= 1
            self.file, self.loops = file, loops
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

    # -- statements ------------------------------------------------------------------------------------------------------

    def run_block(self, body: list[ast.stmt], env: Env) -> None:
        for statement in body:
            self.run(statement, env)

    def run(self, node: ast.stmt, env: Env) -> None:
        handler = getattr(self, f"_run_{type(node).__name__}", None)
        if handler:
            handler(node, env)

    def _run_Expr(self, node: ast.Expr, env: Env) -> None:
        self.evaluate(node.value, env)

    def _run_Assign(self, node: ast.Assign, env: Env) -> None:
        value = self.evaluate(node.value, env)
        if len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            writes.note_accumulation(self, node.targets[0].id, node, node.value, env)
        for target in node.targets:
            self.assign(target, value, env, node)

    def _run_AnnAssign(self, node: ast.AnnAssign, env: Env) -> None:
        if node.value is not None:
            self.assign(node.target, self.evaluate(node.value, env), env, node)

    def _run_AugAssign(self, node: ast.AugAssign, env: Env) -> None:
        before = self.evaluate(node.target, env)  # a target evaluates like the expression it looks like
        added = self.evaluate(node.value, env)
        if isinstance(before, Tensor):
            writes.note_in_place(self, node.target, node, before, added, node.value, env)
            return  # in place: the dtype stays
        if isinstance(node.op, ast.MatMult):
            value = matrix_products.matrix_product(self, "matmul", node, [(self.text(node.target), before), (self.text(node.value), added)])
        else:
            value = promotion.arithmetic(self, node, before, added)
        if isinstance(node.target, ast.Name):
            env.names[node.target.id] = value

    def _run_Return(self, node: ast.Return, env: Env) -> None:
        value = self.evaluate(node.value, env) if node.value is not None else NONE
        if self.depth == 0:
            self.emit("returned", node, "return", value=value)
        raise _Return(value)

    def _run_If(self, node: ast.If, env: Env) -> None:
        self.run_block(node.body if self.decide(node.test, env) else node.orelse, env)

    def _run_For(self, node: ast.For, env: Env) -> None:
        source = self.evaluate(node.iter, env)
        if isinstance(source, Items) and source.known is not None and len(source.known) <= 4:
            rounds = list(source.known)
        else:
            rounds = [self.element_of(source)] * 2
        self._loop(node, env, rounds)

    _run_AsyncFor = _run_For

    def _run_While(self, node: ast.While, env: Env) -> None:
        test = self.evaluate(node.test, env)
        if not (isinstance(test, Scalar) and test.value is False):
            self._loop(node, env, [None, None])

    def _loop(self, node: ast.For | ast.While, env: Env, rounds: list[Any]) -> None:
        self.loops.append((node, set(env.names)))
        try:
            for value in rounds:
                if isinstance(node, ast.For):
                    self.assign(node.target, value, env, node)
                try:
                    self.run_block(node.body, env)
                except _Leave as leave:
                    if not leave.again:
                        return
        finally:
            self.loops.pop()
        self.run_block(node.orelse, env)

    def _run_Break(self, node: ast.Break, env: Env) -> None:
        raise _Leave(False)

    def _run_Continue(self, node: ast.Continue, env: Env) -> None:
        raise _Leave(True)

    def _run_Raise(self, node: ast.Raise, env: Env) -> None:
        raise PathEnds

    def _run_Assert(self, node: ast.Assert, env: Env) -> None:
        test = self.evaluate(node.test, env)
        if isinstance(test, Scalar) and test.value is False:
            raise PathEnds

    def _run_With(self, node: ast.With, env: Env) -> None:
        before = self.autocast
        for item in node.items:
            value = self.evaluate(item.context_expr, env)
            if isinstance(value, Method) and value.name == "autocast":
                self.autocast = value.of
            if item.optional_vars is not None:
                self.assign(item.optional_vars, UNKNOWN, env, node)
        try:
            self.run_block(node.body, env)
        finally:
            self.autocast = before

    _run_AsyncWith = _run_With

    def _run_Try(self, node: ast.Try, env: Env) -> None:
        try:
            self.run_block([*node.body, *node.orelse], env)
        finally:
            self.run_block(node.finalbody, env)

    def _run_FunctionDef(self, node: ast.FunctionDef, env: Env) -> None:
        env.names[node.name] = Closure(node, self.file, env)

    def _run_Delete(self, node: ast.Delete, env: Env) -> None:
        for target in node.targets:
            if isinstance(target, ast.Name):
                env.names.pop(target.id, None)

    def assign(self, target: ast.expr, value: Any, env: Env, node: ast.stmt) -> None:
        if isinstance(target, ast.Name):
            env.names[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            self._unpack(target.elts, value, env, node)
        elif isinstance(target, ast.Starred):
            self.assign(target.value, Items(each=self.element_of(value)), env, node)
        elif isinstance(target, ast.Attribute):
            owner = self.evaluate(target.value, env)
            if isinstance(owner, (Context, Instance)):
                owner.attributes[target.attr] = value
        elif isinstance(target, ast.Subscript):
            owner = self.evaluate(target.value, env)
            index = self.evaluate(target.slice, env)
            if isinstance(owner, Mapping) and isinstance(index, Scalar) and index.value is not UNKNOWN:
                owner.entries[index.value] = value
            elif isinstance(owner, Tensor):
                writes.write_at_index(self, target, node, owner, index, value)
            elif isinstance(owner, Items):
                owner.known, owner.each = None, UNKNOWN

    def _unpack(self, targets: list[ast.expr], value: Any, env: Env, node: ast.stmt) -> None:
        known = value.known if isinstance(value, Items) else None
        if known is not None and len(known) == len(targets) and not any(isinstance(t, ast.Starred) for t in targets):
            for target, item in zip(targets, known):
                self.assign(target, item, env, node)
            return
        for target in targets:
            self.assign(target, self.element_of(value) if known is None else UNKNOWN, env, node)

    def element_of(self, value: Any) -> Any:
        """What iterating over a value gives."""
        if isinstance(value, Items):
            return value.element()
        if isinstance(value, Tensor):
            return value.but(zero_dim=None)
        return UNKNOWN

    # -- tests -----------------------------------------------------------------------------------------------------------

    def decide(self, test: ast.expr, env: Env) -> bool:
        """Whether this branch is taken: decided by what is known, else by the path."""
        if isinstance(test, ast.BoolOp):
            results = (self.decide(value, env) for value in test.values)
            return all(results) if isinstance(test.op, ast.And) else any(results)
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return not self.decide(test.operand, env)
        value = self.evaluate(test, env)
        if isinstance(value, Scalar) and value.value is not UNKNOWN:
            return bool(value.value)
        if isinstance(value, Items) and (value.known or value.filled):
            return True
        taken = self.path.take(self.file.snippet(test, 80))
        if taken and isinstance(test, ast.Call) and last_name(test.func) == "isinstance" and len(test.args) == 2:
            self._is_another_class(test.args[0], env)
        return taken

    def _is_another_class(self, node: ast.expr, env: Env) -> None:
        """A tensor that turned out to be of some subclass (quantised, say) has a dtype of its own kind."""
        if isinstance(node, ast.Name) and isinstance(env.get(node.id), Tensor):
            env.names[node.id] = UNFOLLOWED
            self.found_subclass = True

    # -- expressions -----------------------------------------------------------------------------------------------------

    def text(self, node: ast.AST) -> str:
        return self.file.snippet(node, 48)

    def evaluate(self, node: ast.expr, env: Env) -> Any:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise OutOfSteps
        handler = getattr(self, f"_eval_{type(node).__name__}", None)
        return handler(node, env) if handler else UNKNOWN

    def _eval_Constant(self, node: ast.Constant, env: Env) -> Any:
        return Scalar(node.value)

    def _eval_Name(self, node: ast.Name, env: Env) -> Any:
        value = env.get(node.id)
        if value is not None:
            return value
        closure = resolve_function(self.file, node.id)
        if closure is not None:
            return closure
        constant = module_constants(self.file).get(node.id)
        if constant is not None:
            return self.evaluate(constant, env)
        return Module(self.file.imports.get(node.id, node.id))

    def _eval_Attribute(self, node: ast.Attribute, env: Env) -> Any:
        owner = self.evaluate(node.value, env)
        return operators.attribute(self, owner, node)

    def _eval_Subscript(self, node: ast.Subscript, env: Env) -> Any:
        owner = self.evaluate(node.value, env)
        index = self.evaluate(node.slice, env)
        if isinstance(owner, Tensor):
            return owner
        if isinstance(owner, Items):
            return self._item(owner, node.slice, index)
        if isinstance(owner, Scalar):
            return Scalar()
        if isinstance(owner, Mapping) and isinstance(index, Scalar):
            return owner.entries.get(index.value, UNKNOWN) if index.value is not UNKNOWN else UNKNOWN
        return UNKNOWN

    def _item(self, owner: Items, where: ast.expr, index: Any) -> Any:
        if owner.known is None:
            return Items(each=owner.each) if isinstance(where, ast.Slice) else owner.each
        if isinstance(index, Scalar) and isinstance(index.value, int) and -len(owner.known) <= index.value < len(owner.known):
            return owner.known[index.value]
        if isinstance(where, ast.Slice) and where.step is None:
            start, stop = where.lower, where.upper
            if all(b is None or (isinstance(b, ast.Constant) and isinstance(b.value, int)) for b in (start, stop)):
                first, last = (b.value if isinstance(b, ast.Constant) else None for b in (start, stop))
                return Items(known=owner.known[first:last])  # type: ignore[index]
        return owner.element()

    def _eval_Slice(self, node: ast.Slice, env: Env) -> Any:
        return Scalar()

    def _eval_Tuple(self, node: ast.Tuple | ast.List, env: Env) -> Any:
        values: list[Any] = []
        for element in node.elts:
            if not isinstance(element, ast.Starred):
                values.append(self.evaluate(element, env))
                continue
            inner = self.evaluate(element.value, env)
            if not isinstance(inner, Items) or inner.known is None:
                return Items(each=UNKNOWN)
            values += inner.known
        return Items(known=values)

    _eval_List = _eval_Tuple

    def _eval_Dict(self, node: ast.Dict, env: Env) -> Any:
        mapping = Mapping()
        for key, value in zip(node.keys, node.values):
            result = self.evaluate(value, env)
            if isinstance(key, ast.Constant):
                mapping.entries[key.value] = result
            elif key is None and isinstance(result, Mapping):  # {**other}
                mapping.entries |= result.entries
                mapping.open = mapping.open or result.open
            else:
                mapping.open = True
        return mapping

    def _eval_Lambda(self, node: ast.Lambda, env: Env) -> Any:
        return Closure(node, self.file, env)

    def _eval_NamedExpr(self, node: ast.NamedExpr, env: Env) -> Any:
        value = self.evaluate(node.value, env)
        env.names[node.target.id] = value
        return value

    def _eval_IfExp(self, node: ast.IfExp, env: Env) -> Any:
        return self.evaluate(node.body if self.decide(node.test, env) else node.orelse, env)

    def _comprehension(self, node: ast.GeneratorExp | ast.ListComp | ast.SetComp, env: Env) -> Any:
        inner = Env(env)
        known: list[Any] | None = None
        if len(node.generators) == 1 and not node.generators[0].ifs:
            source = self.evaluate(node.generators[0].iter, inner)
            known = source.known if isinstance(source, Items) and source.known is not None and len(source.known) <= 8 else None
        if known is not None:
            results = []
            for value in known:
                self.assign(node.generators[0].target, value, inner, ast.Pass())
                results.append(self.evaluate(node.elt, inner))
            return Items(known=results)
        for generator in node.generators:
            self.assign(generator.target, self.element_of(self.evaluate(generator.iter, inner)), inner, ast.Pass())
        return Items(each=self.evaluate(node.elt, inner))

    _eval_GeneratorExp = _eval_ListComp = _eval_SetComp = _comprehension

    def _eval_BoolOp(self, node: ast.BoolOp, env: Env) -> Any:
        values = [self.evaluate(value, env) for value in node.values]
        if isinstance(node.op, ast.Or) and len(values) == 2 and isinstance(values[0], Scalar) and values[0].value is None:
            return values[1]
        known = [v.value for v in values if isinstance(v, Scalar) and v.value is not UNKNOWN]
        if isinstance(node.op, ast.And) and not all(known):
            return Scalar(False)  # whatever the others are
        if len(known) == len(values):
            return Scalar(all(known) if isinstance(node.op, ast.And) else any(known))
        return values[0] if isinstance(node.op, ast.Or) and isinstance(values[0], Tensor) else UNKNOWN

    def _eval_UnaryOp(self, node: ast.UnaryOp, env: Env) -> Any:
        value = self.evaluate(node.operand, env)
        if isinstance(node.op, ast.Not):
            return Scalar(not value.value) if isinstance(value, Scalar) and value.value is not UNKNOWN else Scalar()
        if isinstance(value, Scalar) and isinstance(value.value, (int, float)) and isinstance(node.op, ast.USub):
            return Scalar(-value.value)
        return value

    def _eval_Compare(self, node: ast.Compare, env: Env) -> Any:
        left = self.evaluate(node.left, env)
        rights = [self.evaluate(c, env) for c in node.comparators]
        if len(rights) == 1:
            return self._compare(left, node.ops[0], rights[0])
        links = [self._compare(a, op, b) for a, op, b in zip([left, *rights], node.ops, rights)]  # a == b == c
        answers = [link.value if isinstance(link, Scalar) else UNKNOWN for link in links]
        if any(a is not UNKNOWN and not a for a in answers):
            return Scalar(False)
        return Scalar() if any(a is UNKNOWN for a in answers) else Scalar(True)

    def _compare(self, left: Any, op: ast.cmpop, right: Any) -> Any:
        if isinstance(op, (ast.Is, ast.IsNot)) and isinstance(right, Scalar) and right.value is None:
            if isinstance(left, Scalar) and left.value is not UNKNOWN:
                return Scalar((left.value is None) == isinstance(op, ast.Is))
            if isinstance(left, (Tensor, Items, Dtype, Closure, Layer)):
                return Scalar(isinstance(op, ast.IsNot))
            return Scalar()
        if isinstance(left, Dtype) and isinstance(op, (ast.In, ast.NotIn)) and isinstance(right, Items) and right.known is not None:
            words = [v.word if isinstance(v, Dtype) else None for v in right.known]
            if left.word is None or None in words:
                return Scalar()
            return Scalar((left.word in words) == isinstance(op, ast.In))
        if isinstance(left, Dtype) and isinstance(right, Dtype) and left.word and right.word:
            same = left.word == right.word
            return Scalar(same if isinstance(op, (ast.Eq, ast.Is)) else not same)
        if isinstance(left, Scalar) and isinstance(right, Scalar) and UNKNOWN not in (left.value, right.value):
            compare = _COMPARE.get(type(op))
            try:
                return Scalar(compare(left.value, right.value)) if compare else Scalar()
            except TypeError:
                return Scalar()
        if isinstance(left, Tensor) or isinstance(right, Tensor):
            return Tensor("bool")
        return Scalar()

    def _eval_BinOp(self, node: ast.BinOp, env: Env) -> Any:
        left, right = self.evaluate(node.left, env), self.evaluate(node.right, env)
        if isinstance(node.op, ast.MatMult):
            return matrix_products.matrix_product(self, "matmul", node, [(self.text(node.left), left), (self.text(node.right), right)])
        if isinstance(left, Items) and isinstance(right, Items) and isinstance(node.op, ast.Add):
            both = [*left.known, *right.known] if left.known is not None and right.known is not None else None
            return Items(known=both)
        return promotion.arithmetic(self, node, left, right)

    def _eval_Call(self, node: ast.Call, env: Env) -> Any:
        function = self.evaluate(node.func, env)
        args: list[Any] = []
        for argument in node.args:
            if isinstance(argument, ast.Starred):
                inner = self.evaluate(argument.value, env)
                args += inner.known if isinstance(inner, Items) and inner.known is not None else [UNKNOWN]
            else:
                args.append(self.evaluate(argument, env))
        kwargs = self._keywords(node, env)
        if isinstance(function, Closure):
            own = {"file": function.file, "name": getattr(function.node, "name", "")}
            cast = _is_autocast_decorated(own["file"], function.node)
            if cast:
                return UNKNOWN
            result = self.call_closure(function, args, kwargs, node)
            if isinstance(result, Scalar) and result.value is True and self.found_subclass:
                for argument in node.args:  # a test written as a function: what it found holds for the caller too
                    self._is_another_class(argument, env)
            self.found_subclass = False
            return result
        return operators.call(self, function, args, kwargs, node, env)

    def _keywords(self, node: ast.Call, env: Env) -> dict[str, Any]:
        """Keyword arguments; of a `**mapping` that is not known, one that any name may have come from."""
        kwargs: dict[str, Any] = {}
        for item in node.keywords:
            value = self.evaluate(item.value, env)
            if item.arg is not None:
                kwargs[item.arg] = value
            elif isinstance(value, Mapping) and not value.open:
                kwargs |= {k: v for k, v in value.entries.items() if isinstance(k, str)}
            else:
                kwargs.setdefault("dtype", UNKNOWN)
        return kwargs


def _is_autocast_decorated(file: SourceFile, node: ast.AST) -> bool:
    """Whether a decorator switches autocast on or off for the function: its effect is not followed."""
    return isinstance(node, Function) and any("autocast" in last_name(d) for d in node.decorator_list)


def run_function(interpreter: Interpreter, closure: Closure, env: Env) -> Any:
    """Runs the body with the names in `env`; what it returned, or UNKNOWN when it raised or was too long."""
    assert not isinstance(closure.node, ast.Lambda)
    try:
        interpreter.run_block(closure.node.body, env)
    except _Return as done:
        return done.value
    except (PathEnds, _Leave):
        return UNKNOWN
    return NONE
