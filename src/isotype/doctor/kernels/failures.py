"""Explains why a compilation failed. The explanation (a `Fault`) names the variable, its two
dtypes, the cause and the fix.

Each `diagnose_` function recognises one kind of Triton message. The messages are about a variable
that changes its dtype in a run-time branch (KN001) or in a loop (KN002), about the operands of
`tl.dot` (KN003), and about math functions (KN004). For all other messages, the module reports
KN009, which quotes the message and lists the dtypes in the expression that failed. In kernels that
compile, the module reports sums in low precision (KN020).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from importlib.metadata import version

from ...dtypes import torch_dtype_name
from ...finding import Severity
from .observe import (
    LOW_PRECISION,
    FailureSite,
    Fault,
    Frame,
    Observation,
    Origin,
    call_name,
    describe_origin,
    find_names,
    find_origin,
    is_assignment_to,
    scalar_dtype,
    variable_name,
)


def diagnose_math_dtype(site: FailureSite) -> Fault | None:
    match = re.search(r"Expected dtype (\[.*?\]) but got (\w+)", site.message)
    call = site.node
    if isinstance(call, ast.Call):
        arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    else:
        arguments = []
    kind = _math_function(site)
    wrong_arguments = [
        argument
        for argument in arguments
        if site.frame.dtypes.get(argument) in (*LOW_PRECISION, "int32", "int64")
    ]
    if not match and not (kind and wrong_arguments):
        return None
    # libdevice has no function for these dtypes, and its message only lists them
    argument = next(
        (
            argument
            for argument in wrong_arguments
            if not match or site.frame.dtypes[argument] == match[2]
        ),
        arguments[0] if arguments else None,
    )
    function = call_name(call) or "the function"
    name = variable_name(argument) if argument is not None else function
    actual = match[2] if match else site.frame.dtypes[wrong_arguments[0]]
    accepted = " or ".join(re.findall(r"fp\d+", match[1])) if match else "fp32 or fp64"
    argument_origin = find_origin(site.frame, argument) if argument is not None else None
    cause = f"Triton's {kind or 'math'} function {function} takes {accepted} only, and {name} is {actual}"
    if argument_origin:
        cause += f": {argument_origin.text}{site.format_location(argument_origin)}"
    text = ast.unparse(argument) if argument is not None else "x"
    if isinstance(argument, (ast.Name, ast.Call, ast.Subscript)):
        operand_text = text
    else:
        operand_text = f"({text})"
    fix = f"upcast before the call: {function}({operand_text}.to(tl.float32))"
    if argument_origin and argument_origin.kind == "load":
        fix += f", or once at load: {argument_origin.source}.to(tl.float32)"
    facts = describe_origin(site, argument_origin)
    return site.make_fault(
        "KN004",
        name,
        f"{function} on {name}, which is {actual}",
        cause=cause,
        fix=fix,
        dtypes=(actual, "fp32"),
        facts=facts,
    )


def _math_function(site: FailureSite) -> str | None:
    """Returns `math` or `libdevice` if the node calls a function of one of these modules. Returns
    None for other nodes.
    """
    if not isinstance(site.node, ast.Call):
        return None
    if find_names(site.node.func):
        value: object = site.frame.scope.get(find_names(site.node.func)[0])
    else:
        value = None
    for attribute in ast.unparse(site.node.func).split(".")[1:]:
        value = getattr(value, attribute, None)
    module = str(getattr(value, "__module__", ""))
    if "libdevice" in module:
        return "libdevice"
    if module.endswith("language.math"):
        return "math"
    return None


def diagnose_dot_operands(site: FailureSite) -> Fault | None:
    pattern = (
        r"same dtype\. Got (\w+) and (\w+)|First input \((\w+)\) and second input \((\w+)\) must"
        r" have the same dtype"
    )
    if not (match := re.search(pattern, site.message)):
        return None
    left_dtype, right_dtype = filter(None, match.groups())
    call = site.node
    if isinstance(call, ast.Call):
        operands = [*call.args, *(keyword.value for keyword in call.keywords)][:2]
    else:
        operands = []
    if len(operands) < 2:
        return None
    left, right = operands
    left_name = variable_name(left)
    right_name = variable_name(right)
    left_origin = find_origin(site.frame, left)
    right_origin = find_origin(site.frame, right)
    cause = (
        f"tl.dot does not promote: its operands {left_name} ({left_dtype}) and {right_name} ({right_dtype}) must have"
        " one dtype"
    )
    cause += "".join(
        f"; {n}: {origin.text}{site.format_location(origin)}"
        for n, origin in ((left_name, left_origin), (right_name, right_origin))
        if origin
    )
    promoted_operand = next(
        (
            (n, origin)
            for n, origin in ((left_name, left_origin), (right_name, right_origin))
            if origin and origin.kind == "scalar"
        ),
        None,
    )
    if promoted_operand:
        name, step = promoted_operand
        other_name = right_name if name == left_name else left_name
        fix = (
            f"apply {step.name} after the dot (to its fp32 result), or cast back before it: {name}"
            f" = (...).to({other_name}.dtype)"
        )
        message = f"a scalar promotes {name} before tl.dot, which then gets {left_dtype} and {right_dtype}"
    else:
        fix = (
            f"cast one operand: {right_name}.to({left_name}.dtype) keeps {left_dtype},"
            f" {left_name}.to({right_name}.dtype) keeps {right_dtype}"
        )
        message = f"tl.dot got {left_name} in {left_dtype} and {right_name} in {right_dtype}"
    computed_names = [
        n
        for n, origin in ((left_name, left_origin), (right_name, right_origin))
        if origin and origin.kind not in ("load", "parameter")
    ]
    variable = (
        promoted_operand[0]
        if promoted_operand
        else computed_names[0]
        if len(computed_names) == 1
        else right_name
    )
    return site.make_fault(
        "KN003",
        variable,
        message,
        cause=cause,
        fix=fix,
        dtypes=(left_dtype, right_dtype),
        facts=(("operands", f"{left_name} {left_dtype}, {right_name} {right_dtype}"),),
    )


def find_typed_operands(site: FailureSite) -> list[ast.AST]:
    """Returns the operands whose type is known, from the expression or loop at which Triton
    stopped. If one of them contains another, only the outer operand is returned.
    """
    root = site.node.iter if isinstance(site.node, ast.For) else site.node
    typed_nodes = [
        node for node in ast.walk(root) if node in site.frame.dtypes and node is not site.node
    ]
    return [
        node
        for node in typed_nodes
        if not any(
            node is not parent and parent is not root and node in ast.walk(parent)
            for parent in typed_nodes
        )
    ]


def diagnose_branch(site: FailureSite) -> Fault | None:
    redefinition = re.search(
        r"initial value for `(\w+)` is of type (.+?), *but the (then|else) block redefines it as"
        r" (.+)$",
        site.message,
    )
    mismatch = re.search(
        r"[Mm]ismatched type for (\w+) between then block \((.+?)\) and else block \((.+)\)$",
        site.message,
    )
    if not redefinition and not mismatch:
        return None
    if redefinition:
        name = redefinition[1]
        entry_dtype = scalar_dtype(redefinition[2])
        block = redefinition[3]
        new_dtype = scalar_dtype(redefinition[4])
    else:
        assert mismatch is not None
        name = mismatch[1]
        entry_dtype = scalar_dtype(mismatch[2])
        block = "else"
        new_dtype = scalar_dtype(mismatch[3])
    enclosing_branches = [
        node
        for node in site.frame.nodes()
        if isinstance(node, ast.If) and any(child is site.node for child in ast.walk(node))
    ]
    branch = enclosing_branches[-1] if enclosing_branches else None
    assignments = _find_assignments(site.frame, name, new_dtype, branch)
    line = site.frame.line(assignments[-1]) if assignments else site.frame.line(site.node)
    test = getattr(branch, "test", None)
    condition = f"`if {ast.unparse(test)}`" if test is not None else "the branch"
    statement = f"`{ast.unparse(assignments[-1])}`" if assignments else f"the {block} block"
    if redefinition:
        entry_origin = _entry_origin(site.frame, name, branch or site.node, entry_dtype)
    else:
        entry_origin = None
    cause = (
        f"{condition} is decided when the kernel runs, so {name} must keep one dtype across the"
        f" branch; {statement} redefines it as {new_dtype}"
    )
    if entry_origin:
        cause += f", while it enters as {entry_dtype}: {entry_origin.text}{site.format_location(entry_origin)}"
    fix = _suggest_widening(name, entry_dtype, new_dtype, entry_origin, "before the branch")
    # parameters in the condition that are not constexpr
    if test:
        runtime_parameters = [
            name
            for name in find_names(test)
            if not site.frame.parameters.get(name, "constexpr").startswith("constexpr")
        ]
    else:
        runtime_parameters = []
    if runtime_parameters:
        declared = " and ".join(f"{flag}: tl.constexpr" for flag in runtime_parameters)
        fix += (
            f"; or, where it is known at launch, declare {declared}: a constexpr branch may change"
            " a dtype"
        )
    if redefinition:
        message = f"{name} is {entry_dtype} and a run-time branch redefines it as {new_dtype}"
    else:
        message = f"{name} is {entry_dtype} in one branch and {new_dtype} in the other"
    return site.make_fault(
        "KN001",
        name,
        message,
        cause=cause,
        fix=fix,
        line=line,
        dtypes=(entry_dtype, new_dtype),
        facts=describe_origin(site, entry_origin),
        is_row_statistic=bool(entry_origin and entry_origin.is_row_statistic),
    )


def diagnose_loop(site: FailureSite) -> Fault | None:
    match = re.search(
        r"[Ll]oop-carried variable (\w+) has initial type (.+?) but is re-assigned to (.+?) in"
        r" loop",
        site.message,
    )
    if not match:
        return None
    name = match[1]
    entry_dtype = scalar_dtype(match[2])
    new_dtype = scalar_dtype(match[3])
    loop = site.node if isinstance(site.node, (ast.For, ast.While)) else None
    assignments = _find_assignments(site.frame, name, new_dtype, loop)
    statement = assignments[-1] if assignments else None
    line = site.frame.line(statement or site.node)
    entry_origin = _entry_origin(site.frame, name, site.node, entry_dtype)
    value = next(
        (binding.value for binding in reversed(site.frame.bindings) if binding.node is statement),
        None,
    )
    value_origin = find_origin(site.frame, value) if value is not None else None
    cause = f"a value carried round a run-time loop keeps one dtype: {name} enters as {entry_dtype}"
    if entry_origin:
        cause += f" ({entry_origin.text})"
    if statement is not None:
        cause += f" and `{ast.unparse(statement)}` makes it {new_dtype}"
    else:
        cause += f" and is re-assigned as {new_dtype}"
    if value_origin and value_origin.kind in ("scalar", "promotion"):
        cause += f"; {value_origin.text}{site.format_location(value_origin)}"
    if (
        "fp64" in (entry_dtype, new_dtype)
        and value_origin
        and value_origin.name in site.frame.parameters
    ):
        cause += (
            f". Under torch.compile (Inductor) a Python float such as {value_origin.name} reaches the"
            " kernel as fp64"
        )
        fix = f"pin the scalar before its use: {value_origin.name} = {value_origin.name}.to(tl.float32)"
    elif entry_dtype == _wider_dtype(entry_dtype, new_dtype):
        fix = (
            f"keep {name} in {entry_dtype} inside the loop: cast what is assigned,"
            f" (...).to(tl.{torch_dtype_name(entry_dtype)})"
        )
    else:
        fix = "give it one dtype: " + _suggest_widening(
            name, entry_dtype, new_dtype, entry_origin, "before the loop"
        )
    message = f"{name} enters a loop as {entry_dtype} and is re-assigned as {new_dtype} in it"
    return site.make_fault(
        "KN002",
        name,
        message,
        cause=cause,
        fix=fix,
        line=line,
        dtypes=(entry_dtype, new_dtype),
        facts=describe_origin(site, value_origin),
        is_row_statistic=bool(entry_origin and entry_origin.is_row_statistic),
    )


def _find_assignments(
    frame: Frame, name: str, dtype: str | None, block: ast.AST | None
) -> list[ast.AST]:
    """Returns the statements inside the block that assign a value of this dtype to `name`. If no
    block is given, the whole function is searched.
    """
    statements = []
    for binding in frame.bindings:
        if (
            binding.name == name
            and is_assignment_to(binding.node, name)
            and (dtype is None or binding.dtype == dtype)
        ):
            is_inside = block is None or any(node is binding.node for node in ast.walk(block))
            if is_inside and binding.node is not None and binding.node not in statements:
                statements.append(binding.node)
    return statements


def _entry_origin(frame: Frame, name: str, node: ast.AST, dtype: str) -> Origin | None:
    """Returns the step that determined the dtype of a variable before a branch or a loop."""
    probe = ast.Name(id=name, ctx=ast.Load(), lineno=getattr(node, "lineno", 1) - 1, col_offset=0)
    frame.dtypes[probe] = dtype
    return find_origin(frame, probe)


def _suggest_widening(
    name: str, entry_dtype: str, new_dtype: str, entry_origin: Origin | None, position: str
) -> str:
    wide_dtype = _wider_dtype(entry_dtype, new_dtype)
    if entry_origin and entry_origin.kind == "load":
        return f"widen at load, {position}: {name} = {entry_origin.source}.to(tl.{torch_dtype_name(wide_dtype)})"
    if entry_origin and entry_origin.kind == "constant":
        return (
            f"start it in {wide_dtype} {position}: a Python 0 is int32, so write {name} = 0.0 or"
            f" tl.zeros(..., tl.{torch_dtype_name(wide_dtype)})"
        )
    if entry_dtype == wide_dtype:
        return f"keep {name} in {entry_dtype}: cast what is assigned to it, .to(tl.{torch_dtype_name(entry_dtype)})"
    return f"give {name} its final dtype {position}: {name} = {name}.to(tl.{torch_dtype_name(wide_dtype)})"


def _wider_dtype(first: str, second: str) -> str:
    """Returns the dtype to which both values should be cast. If the wider dtype is fp64, the result
    is fp32, because fp64 is rarely intended.
    """
    order = ["bool", "int8", "int16", "int32", "int64", "fp16", "bf16", "fp32"]
    ordered = [dtype for dtype in (first, second) if dtype in order]
    if "fp64" in (first, second):
        return "fp32"
    return max(ordered, key=order.index) if ordered else second


# the functions that explain a failure; the first result is used
DIAGNOSES: tuple[Callable[[FailureSite], Fault | None], ...] = (
    diagnose_branch,
    diagnose_loop,
    diagnose_dot_operands,
    diagnose_math_dtype,
)


def diagnose(kernel_name: str, file: str, line: int, observation: Observation) -> Fault:
    """Returns the fault that explains a failed compilation.

    file, line  the location of the kernel, for failures outside any expression
    """
    assert observation.failed, "only failures are diagnosed"
    # the innermost function outside Triton's library
    failure = next(
        (failure for failure in observation.failures if not failure[0].is_triton_library),
        next(iter(observation.failures), None),
    )
    if failure is None:
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
    site = FailureSite(*failure, observation.message, kernel_name)
    for recogniser in DIAGNOSES:
        if (fault := recogniser(site)) is not None:
            return fault
    return _unrecognised_fault(site)


def _unrecognised_fault(site: FailureSite) -> Fault:
    text = ast.unparse(site.node).splitlines()[0]
    operands = find_typed_operands(site)
    type_list = ", ".join(f"{variable_name(n)} {site.frame.dtypes[n]}" for n in operands)
    facts = (("types here", type_list),) if type_list else ()
    is_independent = _is_independent_of_arguments(site)
    if is_independent:
        fix = f"no argument changes this: write `{text}` as Triton {version('triton')} has it"
    else:
        fix = "compare the types with Triton's message"
    return site.make_fault(
        "KN009",
        variable_name(site.node) if isinstance(site.node, ast.expr) else "",
        f"{site.kernel} does not compile at `{text}`",
        cause=site.message,
        fix=fix,
        facts=facts,
        is_dtype=False,
        is_independent=is_independent,
    )


def _is_independent_of_arguments(site: FailureSite) -> bool:
    """True if the failing expression uses no variable of the kernel, as `tl.float32(0.0)`, or names
    a function that this version of Triton does not have.
    """
    if re.search(r"\bbeen removed\b|^module '[\w.]+' has no attribute", site.message):
        return True
    if not isinstance(site.node, ast.expr):
        return False
    variables = {node.arg for node in site.frame.nodes() if isinstance(node, ast.arg)}
    variables |= {
        node.id
        for node in site.frame.nodes()
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    return not variables & set(find_names(site.node))


def find_low_precision_sums(kernel: str, observation: Observation) -> list[Fault]:
    """Returns a fault KN020 for each sum that a compiled kernel accumulates in bf16 or fp16. The
    sums are found from the dtypes of the expressions in the kernel's syntax tree.
    """
    frames = [
        frame
        for frame in observation.frames
        if not frame.is_triton_library and frame.tree is not None
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
        for node, name, dtype, message, cause, fix in _iterate_sums(frame)
    ]


def _iterate_sums(frame: Frame) -> Iterator[tuple[ast.AST, str, str, str, str, str]]:
    """Finds the sums that are accumulated in bf16 or fp16. For each sum, yields its node, its
    variable, its dtype, and the message, cause and fix of the fault.
    """
    for loop in [node for node in frame.nodes() if isinstance(node, (ast.For, ast.While))]:
        for statement in [node for part in loop.body for node in ast.walk(part)]:
            name = _accumulator_name(statement)
            if name is None or not _is_carried_across(frame, name, loop):
                continue
            dtype = next(
                (
                    binding.dtype
                    for binding in reversed(frame.bindings)
                    if binding.node is statement and binding.name == name
                ),
                None,
            )
            if dtype is not None and dtype in LOW_PRECISION:
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
        node
        for node in frame.nodes()
        if isinstance(node, ast.Call) and call_name(node) in ("sum", "cumsum")
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
            or dtype not in LOW_PRECISION
            or frame.dtypes.get(argument) not in LOW_PRECISION
        ):
            continue
        cause = (
            f"`{ast.unparse(call)}` adds in {dtype}: Triton's {call_name(call)} keeps its"
            " argument's dtype"
        )
        name = variable_name(argument)
        fix = f"widen first: {name}.to(tl.float32), and cast the result"
        yield call, name, dtype, f"{call_name(call)} of {name} is computed in {dtype}", cause, fix


def _accumulator_name(statement: ast.AST) -> str | None:
    """Returns the variable to which a statement adds, for example `x` in `x += y`, `x = x + y` or
    `x = tl.dot(a, b, x)`.
    """
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
                for a in [*value.args[2:], *(keyword.value for keyword in value.keywords)]
            ):
                return name
    return None


def _is_carried_across(frame: Frame, name: str, loop: ast.AST) -> bool:
    """True if the variable is assigned before the loop and is not initialised again inside the
    loop.
    """
    loop_nodes = set(ast.walk(loop))
    is_initialised_again = any(
        isinstance(node, ast.Assign)
        and is_assignment_to(node, name)
        and name not in find_names(node.value)
        for node in loop_nodes
    )
    is_bound_earlier = any(
        binding.name == name
        and binding.node not in loop_nodes
        and is_assignment_to(binding.node, name)
        for binding in frame.bindings
    )
    return is_bound_earlier and not is_initialised_again
