"""Tests: what dtypes decide of them, and which way is taken where they decide nothing."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..source import last_name
from .values import UNFOLLOWED, UNKNOWN, Closure, Context, Dtype, Env, Items, Layer, Scalar, Tensor

if TYPE_CHECKING:
    from .interpreter import Interpreter

_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def decide(run: Interpreter, test: ast.expr, env: Env) -> bool:
    """Whether this branch is taken: from known values, else as the current path chooses."""
    if isinstance(test, ast.BoolOp):
        results = (decide(run, value, env) for value in test.values)
        return all(results) if isinstance(test.op, ast.And) else any(results)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        run.path.leaning = not run.path.leaning
        try:
            return not decide(run, test.operand, env)
        finally:
            run.path.leaning = not run.path.leaning
    value = run.evaluate(test, env)
    if isinstance(value, Scalar) and value.value is not UNKNOWN:
        return bool(value.value)
    if isinstance(value, Items) and (value.known or value.filled):
        return True
    question = _question(run, test, env)
    leaning = run.path.leaning
    run.path.leaning = leaning or "requires_grad" in question  # a training step is what there is to look at
    taken = run.path.take(question)
    run.path.leaning = leaning
    if taken and isinstance(test, ast.Call) and last_name(test.func) == "isinstance" and len(test.args) == 2:
        is_another_class(run, test.args[0], env)
    return taken


def _question(run: Interpreter, test: ast.expr, env: Env) -> str:
    """The form in which a path records the test: `ctx.fused` in backward is the argument `fused` of forward."""
    if isinstance(test, ast.Attribute) and run.path.answered(test.attr) and isinstance(run.evaluate(test.value, env), Context):
        return test.attr
    return run.file.snippet(test, 80)


def is_another_class(run: Interpreter, node: ast.expr, env: Env) -> None:
    """A tensor that turned out to be of some subclass (quantised, say) has a dtype of its own kind."""
    if isinstance(node, ast.Name) and isinstance(env.get(node.id), Tensor):
        env.names[node.id] = UNFOLLOWED
        run.found_subclass = True


def compare(run: Interpreter, node: ast.Compare, env: Env) -> Any:
    if _asks_for_meta(run, node):
        return Scalar(isinstance(node.ops[0], ast.NotEq))
    left = run.evaluate(node.left, env)
    rights = [run.evaluate(c, env) for c in node.comparators]
    if len(rights) == 1:
        return _compare(run, left, node.ops[0], rights[0])
    links = [_compare(run, a, op, b) for a, op, b in zip([left, *rights], node.ops, rights)]  # a == b == c
    answers = [link.value if isinstance(link, Scalar) else UNKNOWN for link in links]
    if any(a is not UNKNOWN and not a for a in answers):
        return Scalar(False)
    return Scalar() if any(a is UNKNOWN for a in answers) else Scalar(True)


def _asks_for_meta(run: Interpreter, node: ast.Compare) -> bool:
    """`device.type == "meta"`: tensors there have no values that could go wrong."""
    right = node.comparators[0]
    return (
        isinstance(node.ops[0], (ast.Eq, ast.NotEq))
        and len(node.ops) == 1
        and isinstance(right, ast.Constant)
        and right.value == "meta"
        and "device" in run.file.snippet(node.left, 80)
    )


def _compare(run: Interpreter, left: Any, op: ast.cmpop, right: Any) -> Any:
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


def bool_op(run: Interpreter, node: ast.BoolOp, env: Env) -> Any:
    values = [run.evaluate(value, env) for value in node.values]
    if isinstance(node.op, ast.Or) and len(values) == 2 and isinstance(values[0], Scalar) and values[0].value is None:
        return values[1]
    known = [v.value for v in values if isinstance(v, Scalar) and v.value is not UNKNOWN]
    if isinstance(node.op, ast.And) and not all(known):
        return Scalar(False)  # whatever the others are
    if len(known) == len(values):
        return Scalar(all(known) if isinstance(node.op, ast.And) else any(known))
    return values[0] if isinstance(node.op, ast.Or) and isinstance(values[0], Tensor) else UNKNOWN


def unary_op(run: Interpreter, node: ast.UnaryOp, env: Env) -> Any:
    value = run.evaluate(node.operand, env)
    if isinstance(node.op, ast.Not):
        return Scalar(not value.value) if isinstance(value, Scalar) and value.value is not UNKNOWN else Scalar()
    if isinstance(value, Scalar) and isinstance(value.value, (int, float)) and isinstance(node.op, ast.USub):
        return Scalar(-value.value)
    return value
