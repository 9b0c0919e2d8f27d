"""One name, two dtypes: what a run-time branch, a loop, a conditional expression or two returns make of a value (KN001, KN002)."""

from __future__ import annotations

import ast
import re

from ...dtypes import torch_word
from .observe import Frame
from .provenance import Fault, Origin, Scene, assigns, names_in, origin, origin_facts, scalar_word, source_text, variable_of


def redefined_in_branch(scene: Scene) -> Fault | None:
    first = re.search(r"initial value for `(\w+)` is of type (.+?), *but the (then|else) block redefines it as (.+)$", scene.message)
    both = re.search(r"[Mm]ismatched type for (\w+) between then block \((.+?)\) and else block \((.+)\)$", scene.message)
    if not first and not both:
        return None
    if first:
        name, before, block, after = first[1], scalar_word(first[2]), first[3], scalar_word(first[4])
    else:
        assert both is not None
        name, before, block, after = both[1], scalar_word(both[2]), "else", scalar_word(both[3])
    branch = scene.node if isinstance(scene.node, ast.If) else _enclosing(scene, ast.If)
    inside = _bound_lines(scene.frame, name, after, branch)
    line = scene.frame.line(inside[-1]) if inside else scene.frame.line(scene.node)
    test = getattr(branch, "test", None)
    condition = f"`if {source_text(test)}`" if test is not None else "the branch"
    statement = f"`{source_text(inside[-1])}`" if inside else f"the {block} block"
    entered = _binding_before(scene.frame, name, branch or scene.node, before) if first else None
    cause = (
        f"{condition} is decided when the kernel runs, so {name} must keep one dtype across the branch; {statement} redefines it as {after}"
    )
    if entered:
        cause += f", while it enters as {before}: {entered.text}{scene.at(entered)}"
    fix = _widening(name, before, after, entered, "before the branch")
    flags = _flags(scene.frame, test) if test is not None else []
    if flags:
        fix += f"; or, where it is known at launch, declare {_as_constexprs(flags)}: a constexpr branch may change a dtype"
    message = (
        f"{name} is {before} and a run-time branch redefines it as {after}"
        if first
        else f"{name} is {before} in one branch and {after} in the other"
    )
    return scene.fault(
        "KN001",
        name,
        message,
        cause=cause,
        fix=fix,
        line=line,
        dtypes=(before, after),
        facts=origin_facts(scene, entered),
        statistic=bool(entered and entered.statistic),
    )


def reassigned_in_loop(scene: Scene) -> Fault | None:
    found = re.search(r"[Ll]oop-carried variable (\w+) has initial type (.+?) but is re-assigned to (.+?) in loop", scene.message)
    if not found:
        return None
    name, before, after = found[1], scalar_word(found[2]), scalar_word(found[3])
    loop = scene.node if isinstance(scene.node, (ast.For, ast.While)) else None
    inside = _bound_lines(scene.frame, name, after, loop)
    statement = inside[-1] if inside else None
    line = scene.frame.line(statement or scene.node)
    entered = _binding_before(scene.frame, name, scene.node, before)
    made = _statement_origin(scene.frame, statement)
    cause = f"a value carried round a run-time loop keeps one dtype: {name} enters as {before}"
    cause += f" ({entered.text})" if entered else ""
    cause += f" and `{source_text(statement)}` makes it {after}" if statement is not None else f" and is re-assigned as {after}"
    if made and made.kind in ("scalar", "promotion"):
        cause += f"; {made.text}{scene.at(made)}"
    if "fp64" in (before, after) and made and made.name in scene.frame.parameters:
        cause += f". Under torch.compile (Inductor) a Python float such as {made.name} reaches the kernel as fp64"
        fix = f"pin the scalar before its use: {made.name} = {made.name}.to(tl.float32), or annotate it fp32"
    elif before == _wider(before, after):
        fix = f"keep {name} in {before} inside the loop: cast what is assigned, (...).to(tl.{torch_word(before)})"
    else:
        fix = "give it one dtype: " + _widening(name, before, after, entered, "before the loop")
    message = f"{name} enters a loop as {before} and is re-assigned as {after} in it"
    return scene.fault(
        "KN002",
        name,
        message,
        cause=cause,
        fix=fix,
        line=line,
        dtypes=(before, after),
        facts=origin_facts(scene, made),
        statistic=bool(entered and entered.statistic),
    )


def inconsistent_ternary(scene: Scene) -> Fault | None:
    found = re.search(r"[Tt]ernary expression with dynamic condition has inconsistent types (.+?) and (.+)$", scene.message)
    if not found or not isinstance(scene.node, ast.IfExp):
        return None
    left, right = scalar_word(found[1]), scalar_word(found[2])
    name = variable_of(scene.node.body)
    cause = f"the condition `{source_text(scene.node.test)}` is known only when the kernel runs, and the two sides are {left} and {right}"
    fix = f"cast both sides to one dtype, for example .to(tl.{torch_word(_wider(left, right))}), or use tl.where, which promotes"
    flags = _flags(scene.frame, scene.node.test)
    fix += f"; or declare {_as_constexprs(flags)}" if flags else ""
    return scene.fault(
        "KN001",
        name,
        f"`{source_text(scene.node)}` is {left} on one side and {right} on the other",
        cause=cause,
        fix=fix,
        dtypes=(left, right),
    )


def inconsistent_returns(scene: Scene) -> Fault | None:
    found = re.search(
        r"(?:[Rr]eturn type mismatch|[Ii]nconsistent return types)[: ]*(<.*?>|\S+) (?:and|vs\.?|!=) (<.*?>|\w\S*)", scene.message
    )
    if not found:
        return None
    left, right = scalar_word(found[1]), scalar_word(found[2])
    returns = [n for n in ast.walk(scene.frame.tree or scene.node) if isinstance(n, ast.Return) and n.value is not None]
    line = next((scene.frame.line(n) for n in returns if scene.frame.dtypes.get(n.value or n) == left), None)
    cause = f"{scene.frame.name} returns {left} on one path and {right} on another; a function called from a kernel has one return type"
    return scene.fault(
        "KN001",
        "return",
        f"{scene.frame.name} returns {left} or {right}",
        cause=cause,
        fix=f"cast every return value of {scene.frame.name} to one dtype",
        line=line,
        dtypes=(left, right),
    )


def _bound_lines(frame: Frame, name: str, dtype: str | None, inside: ast.AST | None) -> list[ast.AST]:
    """Statements that gave `name` this dtype, inside a block or before it."""
    statements = []
    for bound in frame.bindings:
        if bound.name == name and assigns(bound.node, name) and (dtype is None or bound.dtype == dtype):
            within = inside is None or any(node is bound.node for node in ast.walk(inside))
            if within and bound.node is not None and bound.node not in statements:
                statements.append(bound.node)
    return statements


def _binding_before(frame: Frame, name: str, node: ast.AST, dtype: str) -> Origin | None:
    """Where the value that enters a branch or a loop was made."""
    probe = ast.Name(id=name, ctx=ast.Load(), lineno=getattr(node, "lineno", 1) - 1, col_offset=0)
    frame.dtypes[probe] = dtype
    return origin(frame, probe)


def _statement_origin(frame: Frame, statement: ast.AST | None) -> Origin | None:
    value = next((b.value for b in reversed(frame.bindings) if b.node is statement), None)
    return origin(frame, value) if value is not None else None


def _enclosing(scene: Scene, kind: type) -> ast.AST | None:
    tree = scene.frame.tree
    if tree is None:
        return None
    holding = [n for n in ast.walk(tree) if isinstance(n, kind) and any(c is scene.node for c in ast.walk(n))]
    return holding[-1] if holding else None


def _flags(frame: Frame, test: ast.AST) -> list[str]:
    """Parameters in a branch's condition that reach the kernel at run time."""
    return [n for n in names_in(test) if n in frame.parameters and not frame.parameters[n].startswith("constexpr")]


def _as_constexprs(flags: list[str]) -> str:
    return " and ".join(f"{flag}: tl.constexpr" for flag in flags)


def _widening(name: str, before: str, after: str, entered: Origin | None, when: str) -> str:
    wide = _wider(before, after)
    if entered and entered.kind == "load":
        return f"widen at load, {when}: {name} = {entered.source}.to(tl.{torch_word(wide)})"
    if entered and entered.kind == "constant":
        return f"start it in {wide} {when}: a Python 0 is int32, so write {name} = 0.0 or tl.zeros(..., tl.{torch_word(wide)})"
    if before == wide:
        return f"keep {name} in {before}: cast what is assigned to it, .to(tl.{torch_word(before)})"
    return f"give {name} its final dtype {when}: {name} = {name}.to(tl.{torch_word(wide)})"


def _wider(left: str, right: str) -> str:
    """The dtype that both should be cast to; fp64 is rarely intended, so fp32 takes its place."""
    order = ["bool", "int8", "int16", "int32", "int64", "fp16", "bf16", "fp32"]
    known = [w for w in (left, right) if w in order]
    if "fp64" in (left, right):
        return "fp32"
    return max(known, key=order.index) if known else right
