"""Executes statements: binds names, takes branches, and runs loops twice, so that the second round sees the values of the first."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..source import keyword, last_name
from . import matrix_products, promotion, writes
from . import torch_names as names
from .conditions import decide
from .endings import Leave, PathEnds, Return
from .values import NONE, UNKNOWN, Closure, Context, Env, Instance, Items, Loop, Mapping, Method, Scalar, Tensor

if TYPE_CHECKING:
    from .interpreter import Interpreter


_AUTOCAST = re.compile(r"autocast|amp\b|amp_|precision|ctx\.\w*(context|ctx|region)")


def _expr(run: Interpreter, node: ast.Expr, env: Env) -> None:
    run.evaluate(node.value, env)


def _assign(run: Interpreter, node: ast.Assign, env: Env) -> None:
    value = run.evaluate(node.value, env)
    if len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        writes.note_accumulation(run, node.targets[0].id, node, node.value, env)
    for target in node.targets:
        assign(run, target, value, env, node)


def _ann_assign(run: Interpreter, node: ast.AnnAssign, env: Env) -> None:
    if node.value is not None:
        assign(run, node.target, run.evaluate(node.value, env), env, node)


def _aug_assign(run: Interpreter, node: ast.AugAssign, env: Env) -> None:
    before = run.evaluate(node.target, env)  # a target evaluates like the expression it looks like
    added = run.evaluate(node.value, env)
    if isinstance(before, Tensor):
        writes.note_in_place(run, node.target, node, before, added, node.value, env)
        return  # in place: the dtype stays
    if isinstance(node.op, ast.MatMult):
        value = matrix_products.matrix_product(run, "matmul", node, [(run.text(node.target), before), (run.text(node.value), added)])
    else:
        value = promotion.arithmetic(run, node, before, added)
    if isinstance(node.target, ast.Name):
        env.names[node.target.id] = value


def _return(run: Interpreter, node: ast.Return, env: Env) -> None:
    value = run.evaluate(node.value, env) if node.value is not None else NONE
    if run.depth == 0:
        run.emit("returned", node, "return", value=value)
    raise Return(value)


def _if(run: Interpreter, node: ast.If, env: Env) -> None:
    run.path.leaning = _writes_a_product(run, node.body) and not _writes_a_product(run, node.orelse)
    taken = decide(run, node.test, env)
    run.path.leaning = False
    run.run_block(node.body if taken else node.orelse, env)


def _writes_a_product(run: Interpreter, body: list[ast.stmt]) -> bool:
    """Whether a matrix product is written into a tensor here: the branch that is worth a look before the others."""
    known = run.file.memo.setdefault("writes_a_product", {})
    for statement in body:
        if statement not in known:
            calls = (n for n in ast.walk(statement) if isinstance(n, ast.Call))
            known[statement] = any(
                last_name(c.func) in names.LOWER_IN_PLACE or (last_name(c.func) in names.LOWER and keyword(c, "out") is not None)
                for c in calls
            )
        if known[statement]:
            return True
    return False


def _for(run: Interpreter, node: ast.For, env: Env) -> None:
    source = run.evaluate(node.iter, env)
    if isinstance(source, Items) and source.known is not None and len(source.known) <= 4:
        rounds = list(source.known)
    else:
        element = run.element_of(source)
        rounds = [_first(node.iter, element), element]
    _loop(run, node, env, rounds)


def _first(source: ast.expr, element: Any) -> Any:
    """What the first round gets: counting begins with 0."""
    if not isinstance(source, ast.Call) or not isinstance(source.func, ast.Name):
        return element
    counts = source.func.id
    if counts == "range" and (len(source.args) == 1 or (isinstance(source.args[0], ast.Constant) and source.args[0].value == 0)):
        return Scalar(0)
    if counts == "enumerate" and len(source.args) == 1 and not source.keywords and isinstance(element, Items):
        return Items(known=[Scalar(0), *(element.known or [])[1:]])
    return element


def _while(run: Interpreter, node: ast.While, env: Env) -> None:
    test = run.evaluate(node.test, env)
    if not (isinstance(test, Scalar) and test.value is False):
        _loop(run, node, env, [None, None])


def _loop(run: Interpreter, node: ast.For | ast.While, env: Env, rounds: list[Any]) -> None:
    run.loops.append(Loop(node, set(env.names), env))
    try:
        for value in rounds:
            if isinstance(node, ast.For):
                assign(run, node.target, value, env, node)
            try:
                run.run_block(node.body, env)
            except Leave as leave:
                if not leave.again:
                    return
    finally:
        run.loops.pop()
    run.run_block(node.orelse, env)


def _break(run: Interpreter, node: ast.Break, env: Env) -> None:
    raise Leave(False)


def _continue(run: Interpreter, node: ast.Continue, env: Env) -> None:
    raise Leave(True)


def _raise(run: Interpreter, node: ast.Raise, env: Env) -> None:
    raise PathEnds


def _assert(run: Interpreter, node: ast.Assert, env: Env) -> None:
    test = run.evaluate(node.test, env)
    if isinstance(test, Scalar) and test.value is False:
        raise PathEnds


def _with(run: Interpreter, node: ast.With, env: Env) -> None:
    before = run.autocast
    for item in node.items:
        value = run.evaluate(item.context_expr, env)
        if isinstance(value, Method) and value.name == "autocast":
            run.autocast = value.of
        elif value is UNKNOWN and run.phase == "backward" and _AUTOCAST.search(run.file.snippet(item.context_expr, 200)):
            run.autocast = run.scenario.autocast  # made elsewhere, and kept: taken to bring forward's region back
        if item.optional_vars is not None:
            assign(run, item.optional_vars, UNKNOWN, env, node)
    try:
        run.run_block(node.body, env)
    finally:
        run.autocast = before


def _try(run: Interpreter, node: ast.Try, env: Env) -> None:
    try:
        run.run_block([*node.body, *node.orelse], env)
    finally:
        run.run_block(node.finalbody, env)


def _function_def(run: Interpreter, node: ast.FunctionDef, env: Env) -> None:
    env.names[node.name] = Closure(node, run.file, env)


def _delete(run: Interpreter, node: ast.Delete, env: Env) -> None:
    for target in node.targets:
        if isinstance(target, ast.Name):
            env.names.pop(target.id, None)


def assign(run: Interpreter, target: ast.expr, value: Any, env: Env, node: ast.stmt) -> None:
    if isinstance(target, ast.Name):
        env.names[target.id] = value
    elif isinstance(target, (ast.Tuple, ast.List)):
        _unpack(run, target.elts, value, env, node)
    elif isinstance(target, ast.Starred):
        assign(run, target.value, Items(each=run.element_of(value)), env, node)
    elif isinstance(target, ast.Attribute):
        owner = run.evaluate(target.value, env)
        if isinstance(owner, (Context, Instance)):
            owner.attributes[target.attr] = value
    elif isinstance(target, ast.Subscript):
        owner = run.evaluate(target.value, env)
        index = run.evaluate(target.slice, env)
        if isinstance(owner, Mapping) and isinstance(index, Scalar) and index.value is not UNKNOWN:
            owner.entries[index.value] = value
        elif isinstance(owner, Tensor):
            writes.write_at_index(run, target, node, owner, index, value)
        elif isinstance(owner, Items):
            owner.known, owner.each = None, UNKNOWN


def _unpack(run: Interpreter, targets: list[ast.expr], value: Any, env: Env, node: ast.stmt) -> None:
    known = value.known if isinstance(value, Items) else None
    if known is not None and len(known) == len(targets) and not any(isinstance(t, ast.Starred) for t in targets):
        for target, item in zip(targets, known):
            assign(run, target, item, env, node)
        return
    star = next((i for i, t in enumerate(targets) if isinstance(t, ast.Starred)), None)
    if known is not None and star is not None and len(known) >= len(targets) - 1:
        end = len(known) - (len(targets) - star - 1)
        for target, item in zip([*targets[:star], *targets[star + 1 :]], [*known[:star], *known[end:]]):
            assign(run, target, item, env, node)
        starred = targets[star]
        assert isinstance(starred, ast.Starred)
        assign(run, starred.value, Items(known=known[star:end]), env, node)
        return
    for target in targets:
        assign(run, target, run.element_of(value) if known is None else UNKNOWN, env, node)


STATEMENTS: dict[type, Callable[[Interpreter, Any, Env], Any]] = {
    ast.Expr: _expr,
    ast.Assign: _assign,
    ast.AnnAssign: _ann_assign,
    ast.AugAssign: _aug_assign,
    ast.Return: _return,
    ast.If: _if,
    ast.For: _for,
    ast.While: _while,
    ast.Break: _break,
    ast.Continue: _continue,
    ast.Raise: _raise,
    ast.Assert: _assert,
    ast.With: _with,
    ast.Try: _try,
    ast.FunctionDef: _function_def,
    ast.Delete: _delete,
    ast.AsyncFor: _for,
    ast.AsyncWith: _with,
}  # fmt: skip
