"""Finds the assignments in the source code of a function or module: to names, to attributes of
`self`, and to items. Also finds the expressions that a function returns.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import Any

from .frames import CallFrame, source_text

_ITERATION_WRAPPERS = frozenset(("enumerate", "tqdm", "trange", "iter", "islice", "zip"))


def walk_scope(scope: ast.AST) -> Iterator[Any]:
    """Yields the nodes of a function or module, without those of the functions that it defines."""
    for node in ast.iter_child_nodes(scope):
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            yield from walk_scope(node)


def walk_bindings(scope: ast.AST) -> Iterator[Any]:
    """Yields the statements of a function or module that assign a value to a name."""
    for node in walk_scope(scope):
        is_assignment = isinstance(node, (ast.Assign, ast.AugAssign)) or (
            isinstance(node, ast.AnnAssign) and node.value is not None
        )
        if is_assignment or isinstance(node, (ast.For, ast.AsyncFor)):
            yield node


def find_earlier_bindings(scope: ast.AST, name: str, line: int) -> list[Any]:
    """Searches the code before a line for statements that assign a value to a name. The last of
    these statements is returned first. A `for` loop that assigns the name counts too, even if the
    line is inside the loop.
    """
    bindings = [
        binding
        for binding in walk_bindings(scope)
        if read_last_line(binding) < line and name in collect_bound_names(binding)
    ]
    return sorted(bindings, key=lambda binding: binding.lineno, reverse=True)


def collect_bound_names(node: Any) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return {
        part.id
        for target in targets
        for part in ast.walk(target)
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
    }


def read_end_line(node: Any) -> int:
    return int(node.end_lineno)


def read_last_line(binding: Any) -> int:
    """Returns the last line of an assignment, or the first line of a `for` loop."""
    if isinstance(binding, (ast.For, ast.AsyncFor)):
        return int(binding.lineno)
    return int(binding.end_lineno)


def find_assigned_expression(binding: ast.Assign, name: str) -> ast.expr | None:
    """Returns the expression whose value an assignment gives to a name. If the assignment unpacks a
    tuple, returns the element that is assigned to the name. If the assignment unpacks the result of
    a call, returns the call. Returns None if the expression cannot be determined.
    """
    target = binding.targets[0]
    value = binding.value
    if not isinstance(target, (ast.Tuple, ast.List)):
        return value
    if isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts):
        for element, part in zip(target.elts, value.elts):
            if isinstance(element, ast.Name) and element.id == name:
                return part
    return value if isinstance(value, ast.Call) else None


def find_position(target: ast.AST, name: str) -> int | None:
    """Returns the position of a name in the tuple to which a value is assigned, or None."""
    if not isinstance(target, (ast.Tuple, ast.List)):
        return None
    names = [element.id if isinstance(element, ast.Name) else "" for element in target.elts]
    return names.index(name) if name in names else None


def is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def assigns_item(node: ast.Assign, name: str, key: str) -> bool:
    match node.targets[0]:
        case ast.Subscript(ast.Name(owner), ast.Constant(value)):
            return owner == name and value == key
    return False


def contains_node(statements: Sequence[ast.stmt], node: ast.AST) -> bool:
    line = getattr(node, "lineno", 0)
    return any(
        part is node
        for statement in statements
        if statement.lineno <= line <= read_end_line(statement)
        for part in ast.walk(statement)
    )


def find_appended(scope: Any, name: str, line: int) -> ast.expr | None:
    """Returns the value of the only call `NAME.append(value)` before a line."""
    values = []
    for node in walk_scope(scope):
        match node:
            case ast.Call(ast.Attribute(ast.Name(owner), "append"), [value]):
                if owner == name and node.lineno < line:
                    values.append(value)
    return values[0] if len(values) == 1 else None


def find_stored_item(scope: ast.AST | None, node: ast.Subscript, line: int) -> ast.expr | None:
    """Returns the only value that a function assigns to `TABLE[key]` before a line that reads it
    with the same key, as a table of tensors that are made once does.
    """
    if isinstance(node.slice, ast.Constant) or scope is None:
        return None
    values = [
        binding.value
        for binding in walk_scope(scope)
        if isinstance(binding, ast.Assign) and binding.lineno < line
        if source_text(binding.targets[0]) == source_text(node)
    ]
    return values[0] if len(values) == 1 else None


def iterate_returned_values(scope: Any) -> Iterator[ast.expr]:
    """Yields the expressions that a function returns or yields. The last one comes first."""
    if isinstance(scope, ast.Lambda):
        yield scope.body
        return
    nodes = [
        node
        for node in walk_scope(scope)
        if isinstance(node, (ast.Return, ast.Yield)) and node.value
    ]
    for node in sorted(nodes, key=lambda node: node.lineno, reverse=True):
        assert node.value is not None
        yield node.value


def iterate_result_code(scope: Any, values: Sequence[ast.expr]) -> Iterator[ast.AST]:
    """Yields the expressions that a function returns, and the assignments to variables in them. A
    cast elsewhere in the function, for example for a log, does not change the result.
    """
    yield from values
    names = {node.id for value in values for node in ast.walk(value) if isinstance(node, ast.Name)}
    for binding in walk_bindings(scope):
        if isinstance(binding, ast.Assign) and names & collect_bound_names(binding):
            yield binding


def iterate_attribute_assignments(scope: Any, name: str) -> Iterator[ast.Assign]:
    """Yields the assignments `self.NAME = ...` in a method. An assignment of a tuple to several
    attributes counts as one of each element.
    """
    for node in walk_scope(scope):
        if not isinstance(node, ast.Assign):
            continue
        pairs = [(node.targets[0], node.value)]
        match node.targets[0], node.value:
            case ast.Tuple(targets), ast.Tuple(values) if len(targets) == len(values):
                pairs = list(zip(targets, values))
        for target, value in pairs:
            if ast.unparse(target) == f"self.{name}":
                yield ast.copy_location(ast.Assign([target], value), node)


def resolve_iteration(iterable: ast.expr, target: ast.expr, name: str) -> tuple[ast.expr, ast.expr]:
    """Returns the iterable whose items give a name its value, and the target of these items:
    `(rows, row)` for the name `row` of `for number, (row, label) in enumerate(zip(rows, labels))`.
    """
    while isinstance(iterable, ast.Call) and iterable.args:
        called = source_text(iterable.func).rpartition(".")[2]
        if called not in _ITERATION_WRAPPERS:
            break
        parts = target.elts if isinstance(target, (ast.Tuple, ast.List)) else []
        position = 0
        if called == "zip" and len(parts) == len(iterable.args):
            position = find_target_position(parts, name)
            target = parts[position]
        elif called == "enumerate" and len(parts) == 2:
            target = parts[1]
        iterable = iterable.args[position]
    return iterable, target


def find_target_position(targets: Sequence[ast.expr], name: str) -> int:
    """Returns the position of the target that contains a name, or 0."""
    for position, target in enumerate(targets):
        if any(is_name(part, name) for part in ast.walk(target)):
            return position
    return 0


def unwrap_iterable(iterable: ast.AST) -> ast.AST:
    """Returns the iterable inside of `enumerate`, `tqdm`, `iter` and others."""
    while isinstance(iterable, ast.Call) and iterable.args:
        if source_text(iterable.func).rpartition(".")[2] not in _ITERATION_WRAPPERS:
            break
        iterable = iterable.args[0]
    return iterable


def find_iterated_table(iterable: ast.AST) -> ast.expr | None:
    """Returns the dict of `for name, tensor in tensors.items()` and of `tensors.values()`."""
    match iterable:
        case ast.Call(ast.Attribute(table, "items" | "values"), [], []):
            return table
    return None


def reads_changed_value(branch: ast.If, scope: ast.AST) -> bool:
    """True if a comparison reads an attribute or item that the function changes, or a variable of
    a loop around it: in an earlier pass the comparison may have had another result.
    """
    if not any(isinstance(part, ast.Compare) for part in ast.walk(branch.test)):
        return False
    changed = set()
    for node in walk_scope(scope):
        if isinstance(node, (ast.Assign, ast.AugAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            changed |= {source_text(part) for part in targets if not isinstance(part, ast.Name)}
        elif isinstance(node, (ast.For, ast.While)) and any(
            part is branch for part in ast.walk(node)
        ):
            changed |= {name for part in walk_bindings(node) for name in collect_bound_names(part)}
            changed |= collect_bound_names(node) if isinstance(node, ast.For) else set()
    return any(
        source_text(part) in changed
        for part in ast.walk(branch.test)
        if isinstance(part, (ast.Name, ast.Attribute, ast.Subscript))
    )


def find_assigned_call(node: ast.AST, frame: CallFrame) -> ast.Call | None:
    """Returns the call whose result was last assigned to a name before the running line."""
    scope = frame.scope
    if scope is None or not isinstance(node, ast.Name):
        return None
    for binding in find_earlier_bindings(scope, node.id, frame.line):
        if isinstance(binding, ast.Assign) and isinstance(binding.value, ast.Call):
            return binding.value
    return None
