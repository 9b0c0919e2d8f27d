"""A failed compilation as a fault: which variable, which two dtypes, why, and what to change.

Each function recognises one kind of refusal in Triton's message: mathematics (KN004) and `tl.dot`
(KN003). One name with two dtypes is KN001 (a run-time branch) and KN002 (a loop). Anything else is
KN009: Triton's words, with the dtypes at that expression. Of what compiles, sums in low precision
are a fault (KN020).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator

from ...dtypes import torch_word
from ...finding import Severity
from .observe import (
    LOW,
    Fault,
    Frame,
    Observation,
    Origin,
    Scene,
    assigns,
    call_name,
    names_in,
    origin,
    origin_facts,
    scalar_word,
    variable_of,
)


def math_on_low_precision(scene: Scene) -> Fault | None:
    found = re.search(r"Expected dtype (\[.*?\]) but got (\w+)", scene.message)
    call = scene.node
    if isinstance(call, ast.Call):
        arguments = [*call.args, *(k.value for k in call.keywords)]
    else:
        arguments = []
    kind = _math_function(scene)
    wrong = [a for a in arguments if scene.frame.dtypes.get(a) in (*LOW, "int32", "int64")]
    if not found and not (kind and wrong):
        return None
    # libdevice's table of functions by dtype has no entry: its message is the dtypes it was asked
    # for
    argument = next(
        (a for a in wrong if not found or scene.frame.dtypes[a] == found[2]),
        arguments[0] if arguments else None,
    )
    function = call_name(call) or "the function"
    name = variable_of(argument) if argument is not None else function
    got = found[2] if found else scene.frame.dtypes[wrong[0]]
    wanted = " or ".join(re.findall(r"fp\d+", found[1])) if found else "fp32 or fp64"
    where = origin(scene.frame, argument) if argument is not None else None
    cause = (
        f"Triton's {kind or 'math'} function {function} takes {wanted} only, and {name} is {got}"
    )
    cause += f": {where.text}{scene.at(where)}" if where else ""
    text = ast.unparse(argument) if argument is not None else "x"
    if isinstance(argument, (ast.Name, ast.Call, ast.Subscript)):
        wrapped = text
    else:
        wrapped = f"({text})"
    fix = f"upcast before the call: {function}({wrapped}.to(tl.float32))"
    if where and where.kind == "load":
        fix += f", or once at load: {where.source}.to(tl.float32)"
    facts = origin_facts(scene, where)
    return scene.fault(
        "KN004",
        name,
        f"{function} on {name}, which is {got}",
        cause=cause,
        fix=fix,
        dtypes=(got, "fp32"),
        facts=facts,
    )


def _math_function(scene: Scene) -> str | None:
    """`math` or `libdevice` when the node calls one of their functions."""
    if not isinstance(scene.node, ast.Call):
        return None
    if names_in(scene.node.func):
        value: object = scene.frame.scope.get(names_in(scene.node.func)[0])
    else:
        value = None
    for attribute in ast.unparse(scene.node.func).split(".")[1:]:
        value = getattr(value, attribute, None)
    module = str(getattr(value, "__module__", ""))
    if "libdevice" in module:
        return "libdevice"
    if module.endswith("language.math"):
        return "math"
    return None


def dot_operands(scene: Scene) -> Fault | None:
    pattern = (
        r"same dtype\. Got (\w+) and (\w+)|First input \((\w+)\) and second input \((\w+)\) must"
        r" have the same dtype"
    )
    if not (found := re.search(pattern, scene.message)):
        return None
    left, right = filter(None, found.groups())
    call = scene.node
    if isinstance(call, ast.Call):
        operands = [*call.args, *(k.value for k in call.keywords)][:2]
    else:
        operands = []
    if len(operands) < 2:
        return None
    a, b = operands
    name_a = variable_of(a)
    name_b = variable_of(b)
    from_a = origin(scene.frame, a)
    from_b = origin(scene.frame, b)
    cause = (
        f"tl.dot does not promote: its operands {name_a} ({left}) and {name_b} ({right}) must have"
        " one dtype"
    )
    cause += "".join(
        f"; {n}: {o.text}{scene.at(o)}" for n, o in ((name_a, from_a), (name_b, from_b)) if o
    )
    promoted = next(
        ((n, o) for n, o in ((name_a, from_a), (name_b, from_b)) if o and o.kind == "scalar"), None
    )
    if promoted:
        name, step = promoted
        other = name_b if name == name_a else name_a
        fix = (
            f"apply {step.name} after the dot (to its fp32 result), or cast back before it: {name}"
            f" = (...).to({other}.dtype)"
        )
        message = f"a scalar promotes {name} before tl.dot, which then gets {left} and {right}"
    else:
        fix = (
            f"cast one operand: {name_b}.to({name_a}.dtype) keeps {left},"
            f" {name_a}.to({name_b}.dtype) keeps {right}"
        )
        message = f"tl.dot got {name_a} in {left} and {name_b} in {right}"
    computed = [
        n
        for n, o in ((name_a, from_a), (name_b, from_b))
        if o and o.kind not in ("load", "parameter")
    ]
    variable = promoted[0] if promoted else computed[0] if len(computed) == 1 else name_b
    return scene.fault(
        "KN003",
        variable,
        message,
        cause=cause,
        fix=fix,
        dtypes=(left, right),
        facts=(("operands", f"{name_a} {left}, {name_b} {right}"),),
    )


def typed_operands(scene: Scene) -> list[ast.AST]:
    """The outermost typed operands of the expression or loop at which Triton stopped."""
    whole = scene.node.iter if isinstance(scene.node, ast.For) else scene.node
    typed = [n for n in ast.walk(whole) if n in scene.frame.dtypes and n is not scene.node]
    return [
        n
        for n in typed
        if not any(
            n is not other and other is not whole and n in ast.walk(other) for other in typed
        )
    ]


def redefined_in_branch(scene: Scene) -> Fault | None:
    first = re.search(
        r"initial value for `(\w+)` is of type (.+?), *but the (then|else) block redefines it as"
        r" (.+)$",
        scene.message,
    )
    both = re.search(
        r"[Mm]ismatched type for (\w+) between then block \((.+?)\) and else block \((.+)\)$",
        scene.message,
    )
    if not first and not both:
        return None
    if first:
        name = first[1]
        before = scalar_word(first[2])
        block = first[3]
        after = scalar_word(first[4])
    else:
        assert both is not None
        name = both[1]
        before = scalar_word(both[2])
        block = "else"
        after = scalar_word(both[3])
    around = [
        n
        for n in scene.frame.nodes()
        if isinstance(n, ast.If) and any(c is scene.node for c in ast.walk(n))
    ]
    branch = around[-1] if around else None
    inside = _bound_lines(scene.frame, name, after, branch)
    line = scene.frame.line(inside[-1]) if inside else scene.frame.line(scene.node)
    test = getattr(branch, "test", None)
    condition = f"`if {ast.unparse(test)}`" if test is not None else "the branch"
    statement = f"`{ast.unparse(inside[-1])}`" if inside else f"the {block} block"
    if first:
        entered = _binding_before(scene.frame, name, branch or scene.node, before)
    else:
        entered = None
    cause = (
        f"{condition} is decided when the kernel runs, so {name} must keep one dtype across the"
        f" branch; {statement} redefines it as {after}"
    )
    if entered:
        cause += f", while it enters as {before}: {entered.text}{scene.at(entered)}"
    fix = _widening(name, before, after, entered, "before the branch")
    # parameters in the condition that reach the kernel at run time
    if test:
        flags = [
            n
            for n in names_in(test)
            if not scene.frame.parameters.get(n, "constexpr").startswith("constexpr")
        ]
    else:
        flags = []
    if flags:
        declared = " and ".join(f"{flag}: tl.constexpr" for flag in flags)
        fix += (
            f"; or, where it is known at launch, declare {declared}: a constexpr branch may change"
            " a dtype"
        )
    if first:
        message = f"{name} is {before} and a run-time branch redefines it as {after}"
    else:
        message = f"{name} is {before} in one branch and {after} in the other"
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
    found = re.search(
        r"[Ll]oop-carried variable (\w+) has initial type (.+?) but is re-assigned to (.+?) in"
        r" loop",
        scene.message,
    )
    if not found:
        return None
    name = found[1]
    before = scalar_word(found[2])
    after = scalar_word(found[3])
    loop = scene.node if isinstance(scene.node, (ast.For, ast.While)) else None
    inside = _bound_lines(scene.frame, name, after, loop)
    statement = inside[-1] if inside else None
    line = scene.frame.line(statement or scene.node)
    entered = _binding_before(scene.frame, name, scene.node, before)
    value = next((b.value for b in reversed(scene.frame.bindings) if b.node is statement), None)
    made = origin(scene.frame, value) if value is not None else None
    cause = f"a value carried round a run-time loop keeps one dtype: {name} enters as {before}"
    cause += f" ({entered.text})" if entered else ""
    cause += (
        f" and `{ast.unparse(statement)}` makes it {after}"
        if statement is not None
        else f" and is re-assigned as {after}"
    )
    if made and made.kind in ("scalar", "promotion"):
        cause += f"; {made.text}{scene.at(made)}"
    if "fp64" in (before, after) and made and made.name in scene.frame.parameters:
        cause += (
            f". Under torch.compile (Inductor) a Python float such as {made.name} reaches the"
            " kernel as fp64"
        )
        fix = (
            f"pin the scalar before its use: {made.name} = {made.name}.to(tl.float32), or annotate"
            " it fp32"
        )
    elif before == _wider(before, after):
        fix = (
            f"keep {name} in {before} inside the loop: cast what is assigned,"
            f" (...).to(tl.{torch_word(before)})"
        )
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


def _bound_lines(
    frame: Frame, name: str, dtype: str | None, inside: ast.AST | None
) -> list[ast.AST]:
    """Statements that gave `name` this dtype, inside a block or before it."""
    statements = []
    for bound in frame.bindings:
        if (
            bound.name == name
            and assigns(bound.node, name)
            and (dtype is None or bound.dtype == dtype)
        ):
            within = inside is None or any(node is bound.node for node in ast.walk(inside))
            if within and bound.node is not None and bound.node not in statements:
                statements.append(bound.node)
    return statements


def _binding_before(frame: Frame, name: str, node: ast.AST, dtype: str) -> Origin | None:
    """Where the value that enters a branch or a loop was made."""
    probe = ast.Name(id=name, ctx=ast.Load(), lineno=getattr(node, "lineno", 1) - 1, col_offset=0)
    frame.dtypes[probe] = dtype
    return origin(frame, probe)


def _widening(name: str, before: str, after: str, entered: Origin | None, when: str) -> str:
    wide = _wider(before, after)
    if entered and entered.kind == "load":
        return f"widen at load, {when}: {name} = {entered.source}.to(tl.{torch_word(wide)})"
    if entered and entered.kind == "constant":
        return (
            f"start it in {wide} {when}: a Python 0 is int32, so write {name} = 0.0 or"
            f" tl.zeros(..., tl.{torch_word(wide)})"
        )
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


RECOGNISERS: tuple[Callable[[Scene], Fault | None], ...] = (
    redefined_in_branch,
    reassigned_in_loop,
    dot_operands,
    math_on_low_precision,
)


def diagnose(kernel_name: str, file: str, line: int, observation: Observation) -> Fault:
    """The fault behind a failed observation; `file` and `line` are the kernel's own, for failures
    outside any expression.
    """
    assert observation.failed, "only failures are diagnosed"
    # the innermost function of the user's
    found = next(
        (f for f in observation.failures if not f[0].in_triton),
        next(iter(observation.failures), None),
    )
    if found is None:
        cause = f"Triton stopped before the kernel's body: {observation.message}"
        fix = "look at the signature and the constexprs of this combination"
        return Fault(
            "KN009",
            file,
            line,
            kernel_name,
            "",
            f"{kernel_name} does not compile",
            cause,
            fix,
            is_dtype=False,
        )
    scene = Scene(*found, observation.message, kernel_name)
    for recognise in RECOGNISERS:
        if (fault := recognise(scene)) is not None:
            return fault
    return _unrecognised(scene)


def _unrecognised(scene: Scene) -> Fault:
    text = ast.unparse(scene.node).splitlines()[0]
    parts = typed_operands(scene)
    seen = ", ".join(f"{variable_of(n)} {scene.frame.dtypes[n]}" for n in parts)
    facts = (("types here", seen),) if seen else ()
    return scene.fault(
        "KN009",
        variable_of(scene.node) if isinstance(scene.node, ast.expr) else "",
        f"{scene.kernel} does not compile at `{text}`",
        cause=scene.message,
        fix="read Triton's own message above; the types are listed here as it saw them",
        facts=facts,
        is_dtype=False,
    )


def low_precision_sums(kernel: str, observation: Observation) -> list[Fault]:
    """KN020 of one combination that compiled: its typed tree tells that `acc` is bf16, rather than
    a guess.
    """
    frames = [
        frame for frame in observation.frames if not frame.in_triton and frame.tree is not None
    ]
    return [
        Fault(
            "KN020",
            frame.file,
            frame.line(node),
            kernel,
            name,
            message,
            cause,
            fix,
            dtypes=(dtype, "fp32"),
            severity=Severity.WARNING,
        )
        for frame in frames
        for node, name, dtype, message, cause, fix in _sums(frame)
    ]


def _sums(frame: Frame) -> Iterator[tuple[ast.AST, str, str, str, str, str]]:
    """node, variable, dtype, message, cause and fix of each sum that is kept in bf16 or fp16."""
    for loop in [n for n in frame.nodes() if isinstance(n, (ast.For, ast.While))]:
        for statement in [n for part in loop.body for n in ast.walk(part)]:
            name = _accumulated(statement)
            if name is None or not _lives_across(frame, name, loop):
                continue
            dtype = next(
                (
                    b.dtype
                    for b in reversed(frame.bindings)
                    if b.node is statement and b.name == name
                ),
                None,
            )
            if dtype is not None and dtype in LOW:
                cause = (
                    f"`{ast.unparse(statement)}` adds into a {dtype} value once a round: each"
                    " addition rounds"
                )
                fix = (
                    f"start {name} in fp32 (tl.zeros(..., dtype=tl.float32)), widen what is added,"
                    " and cast once at the store"
                )
                yield statement, name, dtype, f"{name} accumulates in {dtype}", cause, fix
    for call in [
        n for n in frame.nodes() if isinstance(n, ast.Call) and call_name(n) in ("sum", "cumsum")
    ]:
        if call.args:
            argument = call.args[0]
        elif isinstance(call.func, ast.Attribute):
            argument = call.func.value
        else:
            argument = None
        dtype = frame.dtypes.get(call)
        if (
            argument is None
            or dtype is None
            or dtype not in LOW
            or frame.dtypes.get(argument) not in LOW
        ):
            continue
        cause = (
            f"`{ast.unparse(call)}` adds in {dtype}: Triton's {call_name(call)} keeps its"
            " argument's dtype"
        )
        name = variable_of(argument)
        fix = f"widen first: {name}.to(tl.float32), and cast the result"
        yield call, name, dtype, f"{call_name(call)} of {name} is computed in {dtype}", cause, fix


def _accumulated(statement: ast.AST) -> str | None:
    """The name that a statement adds to: `x += y`, `x = x + y`, `x = tl.dot(a, b, x)`."""
    if (
        isinstance(statement, ast.AugAssign)
        and isinstance(statement.target, ast.Name)
        and isinstance(statement.op, (ast.Add, ast.Sub))
    ):
        return statement.target.id
    if (
        isinstance(statement, ast.Assign)
        and len(statement.targets) == 1
        and isinstance(statement.targets[0], ast.Name)
    ):
        name = statement.targets[0].id
        value = statement.value
        if isinstance(value, ast.BinOp) and isinstance(value.op, (ast.Add, ast.Sub)):
            operands = (value.left, value.right)
            if any(isinstance(side, ast.Name) and side.id == name for side in operands):
                return name
        if call_name(value) in ("dot", "fma"):
            assert isinstance(value, ast.Call)
            if any(
                isinstance(a, ast.Name) and a.id == name
                for a in [*value.args[2:], *(k.value for k in value.keywords)]
            ):
                return name
    return None


def _lives_across(frame: Frame, name: str, loop: ast.AST) -> bool:
    """Whether the name holds a value from before the loop, and is not started anew in it."""
    inside = set(ast.walk(loop))
    anew = any(
        isinstance(n, ast.Assign) and assigns(n, name) and name not in names_in(n.value)
        for n in inside
    )
    before = any(
        b.name == name and b.node not in inside and assigns(b.node, name) for b in frame.bindings
    )
    return before and not anew
