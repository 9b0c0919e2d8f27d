"""What each expression is: names looked up, tuples and dicts built, functions of these files entered."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..source import Function, SourceFile, last_name
from . import matrix_products, operators, promotion, writes
from .conditions import bool_op, compare, decide, is_another_class, unary_op
from .modules import module_constants, resolve_function
from .operators import distinct, mapping_of
from .statements import assign
from .values import NONE, UNKNOWN, Closure, Env, Items, Mapping, Module, Partial, Scalar, Tensor

if TYPE_CHECKING:
    from .interpreter import Interpreter


def _constant(run: Interpreter, node: ast.Constant, env: Env) -> Any:
    return Scalar(node.value)


def _name(run: Interpreter, node: ast.Name, env: Env) -> Any:
    value = env.get(node.id)
    if value is not None:
        return value
    closure = resolve_function(run.file, node.id)
    if closure is not None:
        return closure
    constant = module_constants(run.file).get(node.id)
    if constant is not None:
        return run.evaluate(constant, env)
    return Module(run.file.imports.get(node.id, node.id))


def _attribute(run: Interpreter, node: ast.Attribute, env: Env) -> Any:
    owner = run.evaluate(node.value, env)
    return operators.attribute(run, owner, node)


def _subscript(run: Interpreter, node: ast.Subscript, env: Env) -> Any:
    owner = run.evaluate(node.value, env)
    index = run.evaluate(node.slice, env)
    if isinstance(owner, Tensor):
        return owner if owner.buffer is None or writes.is_whole(node.slice) else owner.but(buffer=None)
    if isinstance(owner, Items):
        return _item(run, owner, node.slice, index, env)
    if isinstance(owner, Scalar):
        return Scalar()
    if isinstance(owner, Mapping) and isinstance(index, Scalar):
        return owner.entries.get(index.value, UNKNOWN) if index.value is not UNKNOWN else UNKNOWN
    return UNKNOWN


def _item(run: Interpreter, owner: Items, where: ast.expr, index: Any, env: Env) -> Any:
    if owner.known is None:
        return Items(each=owner.each) if isinstance(where, ast.Slice) else owner.each
    if isinstance(index, Scalar) and isinstance(index.value, int) and -len(owner.known) <= index.value < len(owner.known):
        return owner.known[index.value]
    if isinstance(where, ast.Slice) and where.step is None:
        bounds = [run.evaluate(b, env) if b is not None else NONE for b in (where.lower, where.upper)]
        numbers: list[Any] = [b.value if isinstance(b, Scalar) else UNKNOWN for b in bounds]
        if all(n is None or isinstance(n, int) for n in numbers):
            return Items(known=owner.known[numbers[0] : numbers[1]])
    return owner.element()


def _slice(run: Interpreter, node: ast.Slice, env: Env) -> Any:
    return Scalar()


def _tuple(run: Interpreter, node: ast.Tuple | ast.List, env: Env) -> Any:
    values: list[Any] = []
    for element in node.elts:
        if not isinstance(element, ast.Starred):
            values.append(run.evaluate(element, env))
            continue
        inner = run.evaluate(element.value, env)
        if not isinstance(inner, Items) or inner.known is None:
            return Items(each=UNKNOWN)
        values += inner.known
    return Items(known=values)


def _dict(run: Interpreter, node: ast.Dict, env: Env) -> Any:
    mapping = Mapping()
    for key, value in zip(node.keys, node.values):
        result = run.evaluate(value, env)
        if isinstance(key, ast.Constant):
            mapping.entries[key.value] = result
        elif key is None and isinstance(result, Mapping):  # {**other}
            mapping.entries |= result.entries
            mapping.open = mapping.open or result.open
        else:
            mapping.open = True
    return mapping


def _lambda(run: Interpreter, node: ast.Lambda, env: Env) -> Any:
    return Closure(node, run.file, env)


def _named_expr(run: Interpreter, node: ast.NamedExpr, env: Env) -> Any:
    value = run.evaluate(node.value, env)
    env.names[node.target.id] = value
    return value


def _if_exp(run: Interpreter, node: ast.IfExp, env: Env) -> Any:
    return run.evaluate(node.body if decide(run, node.test, env) else node.orelse, env)


def _comprehension(run: Interpreter, node: ast.GeneratorExp | ast.ListComp | ast.SetComp, env: Env) -> Any:
    inner = Env(env)
    known: list[Any] | None = None
    if len(node.generators) == 1 and not node.generators[0].ifs:
        source = run.evaluate(node.generators[0].iter, inner)
        known = source.known if isinstance(source, Items) and source.known is not None and len(source.known) <= 8 else None
    if known is not None:
        results = []
        for value in known:
            assign(run, node.generators[0].target, value, inner, ast.Pass())
            results.append(run.evaluate(node.elt, inner))
        return Items(known=results)
    for generator in node.generators:
        assign(run, generator.target, run.element_of(run.evaluate(generator.iter, inner)), inner, ast.Pass())
    return Items(each=run.evaluate(node.elt, inner))


def _set_comprehension(run: Interpreter, node: ast.SetComp, env: Env) -> Any:
    return distinct(_comprehension(run, node, env))


def _set(run: Interpreter, node: ast.Set, env: Env) -> Any:
    return distinct(Items(known=[run.evaluate(e, env) for e in node.elts]))


def _dict_comprehension(run: Interpreter, node: ast.DictComp, env: Env) -> Any:
    pairs = ast.copy_location(ast.ListComp(ast.Tuple([node.key, node.value], ast.Load()), node.generators), node)
    return mapping_of(_comprehension(run, pairs, env))


def _bin_op(run: Interpreter, node: ast.BinOp, env: Env) -> Any:
    left, right = run.evaluate(node.left, env), run.evaluate(node.right, env)
    if isinstance(node.op, ast.MatMult):
        return matrix_products.matrix_product(run, "matmul", node, [(run.text(node.left), left), (run.text(node.right), right)])
    if isinstance(left, Items) and isinstance(right, Items) and isinstance(node.op, ast.Add):
        both = [*left.known, *right.known] if left.known is not None and right.known is not None else None
        return Items(known=both)
    return promotion.arithmetic(run, node, left, right)


def _call(run: Interpreter, node: ast.Call, env: Env) -> Any:
    function = run.evaluate(node.func, env)
    args: list[Any] = []
    for argument in node.args:
        if isinstance(argument, ast.Starred):
            inner = run.evaluate(argument.value, env)
            args += inner.known if isinstance(inner, Items) and inner.known is not None else [UNKNOWN]
        else:
            args.append(run.evaluate(argument, env))
    kwargs = _keywords(run, node, env)
    if isinstance(node.func, ast.Subscript):
        run.launched.setdefault(node, []).append((args, kwargs))
    sources = list(node.args)
    while isinstance(function, Partial):
        args, sources, kwargs = [*function.args, *args], [*function.nodes, *sources], function.kwargs | kwargs
        function = function.function
    if isinstance(function, Closure):
        own = {"file": function.file, "name": getattr(function.node, "name", "")}
        cast = _is_autocast_decorated(own["file"], function.node)
        if cast:
            return UNKNOWN
        result = run.call_closure(function, args, kwargs, node)
        if isinstance(result, Scalar) and result.value is True and run.found_subclass:
            for argument in node.args:  # a test written as a function: what it found holds for the caller too
                is_another_class(run, argument, env)
        run.found_subclass = False
        return result
    return operators.call(run, function, args, kwargs, node, env, sources)


def _keywords(run: Interpreter, node: ast.Call, env: Env) -> dict[str, Any]:
    """Keyword arguments; of a `**mapping` that is not known, one that any name may have come from."""
    kwargs: dict[str, Any] = {}
    for item in node.keywords:
        value = run.evaluate(item.value, env)
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


EXPRESSIONS: dict[type, Callable[[Interpreter, Any, Env], Any]] = {
    ast.Constant: _constant,
    ast.Name: _name,
    ast.Attribute: _attribute,
    ast.Subscript: _subscript,
    ast.Slice: _slice,
    ast.Tuple: _tuple,
    ast.Dict: _dict,
    ast.Lambda: _lambda,
    ast.NamedExpr: _named_expr,
    ast.IfExp: _if_exp,
    ast.BoolOp: bool_op,
    ast.UnaryOp: unary_op,
    ast.Compare: compare,
    ast.BinOp: _bin_op,
    ast.Call: _call,
    ast.List: _tuple,
    ast.GeneratorExp: _comprehension,
    ast.ListComp: _comprehension,
    ast.SetComp: _set_comprehension,
    ast.Set: _set,
    ast.DictComp: _dict_comprehension,
}  # fmt: skip
