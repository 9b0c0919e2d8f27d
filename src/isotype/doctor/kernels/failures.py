"""A failed compilation as a fault: which variable, which two dtypes, why, and what to change.

Each function recognises one kind of refusal in Triton's message: a lost `tl.constexpr` (KN005), mathematics (KN004), `tl.dot` (KN003),
atomics (KN006), stores (KN007), operands (KN008). One name with two dtypes (KN001, KN002) is in control_flow.py.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable

from ...dtypes import torch_word
from .control_flow import inconsistent_returns, inconsistent_ternary, reassigned_in_loop, redefined_in_branch
from .observe import Frame, Observation
from .provenance import LOW, Fault, Scene, assigns, call_name, names_in, origin, origin_facts, source_text, variable_of


def lost_constexpr(scene: Scene) -> Fault | None:
    if not re.search(
        r"must be of type `?(?:tl\.)?constexpr|must have type `?constexpr|did you forget .*constexpr|constexpr\[int\]|tl\.constexpr",
        scene.message,
    ):
        return None
    nodes = [*getattr(scene.node, "args", []), *(k.value for k in getattr(scene.node, "keywords", []))] or [scene.node]
    suspects = [p for node in nodes for p in _runtime_parameters_behind(scene.frame, node)]
    suspects = [p for p in dict.fromkeys(suspects) if not scene.frame.parameters[p].startswith("*")]
    if not suspects:
        return None
    name = suspects[0]
    got = scene.frame.parameters[name]
    cause = (
        f"`{source_text(scene.node)}` needs a value known when compiling, and {name} is a run-time {got}: its `: tl.constexpr` is missing"
    )
    return scene.fault(
        "KN005",
        name,
        f"{name} must be a constexpr and is a run-time {got}",
        cause=cause,
        fix=f"declare it {name}: tl.constexpr in {scene.frame.name}",
        dtypes=(got, "constexpr"),
    )


def _runtime_parameters_behind(frame: Frame, node: ast.AST, depth: int = 0) -> list[str]:
    found = []
    for name in names_in(node):
        if name in frame.parameters:
            if not frame.parameters[name].startswith("constexpr"):
                found.append(name)
        elif depth < 4:
            for bound in frame.bindings:
                if bound.name == name and assigns(bound.node, name):
                    found += _runtime_parameters_behind(frame, getattr(bound.node, "value", ast.Pass()), depth + 1)
    return found


def math_on_low_precision(scene: Scene) -> Fault | None:
    found = re.search(r"Expected dtype (\[.*?\]) but got (\w+)", scene.message)
    call = scene.node
    arguments = [*call.args, *(k.value for k in call.keywords)] if isinstance(call, ast.Call) else []
    kind = _math_function(scene)
    wrong = [a for a in arguments if scene.frame.dtypes.get(a) in (*LOW, "int32", "int64")]
    if not found and not (kind and wrong):
        return None
    # libdevice's table of functions by dtype has no entry: its message is the dtypes it was asked for
    argument = next((a for a in wrong if not found or scene.frame.dtypes[a] == found[2]), arguments[0] if arguments else None)
    function = call_name(call) or "the function"
    name = variable_of(argument) if argument is not None else function
    got = found[2] if found else scene.frame.dtypes[wrong[0]]
    wanted = " or ".join(re.findall(r"fp\d+", found[1])) if found else "fp32 or fp64"
    where = origin(scene.frame, argument) if argument is not None else None
    cause = f"Triton's {kind or 'math'} function {function} takes {wanted} only, and {name} is {got}"
    cause += f": {where.text}{scene.at(where)}" if where else ""
    text = source_text(argument) if argument is not None else "x"
    wrapped = text if isinstance(argument, (ast.Name, ast.Call, ast.Subscript)) else f"({text})"
    fix = f"upcast before the call: {function}({wrapped}.to(tl.float32))"
    if where and where.kind == "load":
        fix += f", or once at load: {where.source}.to(tl.float32)"
    facts = origin_facts(scene, where)
    return scene.fault("KN004", name, f"{function} on {name}, which is {got}", cause=cause, fix=fix, dtypes=(got, "fp32"), facts=facts)


def _math_function(scene: Scene) -> str | None:
    """`math` or `libdevice` when the node calls one of their functions."""
    if not isinstance(scene.node, ast.Call):
        return None
    value: object = scene.frame.scope.get(names_in(scene.node.func)[0]) if names_in(scene.node.func) else None
    for attribute in source_text(scene.node.func).split(".")[1:]:
        value = getattr(value, attribute, None)
    module = str(getattr(value, "__module__", ""))
    return "libdevice" if "libdevice" in module else "math" if module.endswith("language.math") else None


def dot_operands(scene: Scene) -> Fault | None:
    found = re.search(r"same dtype\. Got (\w+) and (\w+)", scene.message) or re.search(
        r"First input \((\w+)\) and second input \((\w+)\) must have the same dtype", scene.message
    )
    if not found:
        return None
    left, right = found[1], found[2]
    call = scene.node
    if not isinstance(call, ast.Call) or len(call.args) < 2:
        return scene.fault(
            "KN003",
            "tl.dot",
            f"tl.dot got {left} and {right}",
            cause="the operands of tl.dot must have one dtype",
            fix="cast one operand to the other's dtype",
            dtypes=(left, right),
        )
    a, b = call.args[:2]
    name_a, name_b = variable_of(a), variable_of(b)
    from_a, from_b = origin(scene.frame, a), origin(scene.frame, b)
    cause = f"tl.dot does not promote: its operands {name_a} ({left}) and {name_b} ({right}) must have one dtype"
    cause += "".join(f"; {n}: {o.text}{scene.at(o)}" for n, o in ((name_a, from_a), (name_b, from_b)) if o)
    promoted = next(((n, o) for n, o in ((name_a, from_a), (name_b, from_b)) if o and o.kind == "scalar"), None)
    cast = f"cast one operand: {name_b}.to({name_a}.dtype) keeps {left}, {name_a}.to({name_b}.dtype) keeps {right}"
    if promoted:
        name, step = promoted
        other = name_b if name == name_a else name_a
        fix = f"apply {step.name} after the dot (to its fp32 result), or cast back before it: {name} = (...).to({other}.dtype)"
        message = f"a scalar promotes {name} before tl.dot, which then gets {left} and {right}"
    else:
        fix, message = cast, f"tl.dot got {name_a} in {left} and {name_b} in {right}"
    computed = [n for n, o in ((name_a, from_a), (name_b, from_b)) if o and o.kind not in ("load", "parameter")]
    variable = promoted[0] if promoted else computed[0] if len(computed) == 1 else name_b
    return scene.fault(
        "KN003", variable, message, cause=cause, fix=fix, dtypes=(left, right), facts=(("operands", f"{name_a} {left}, {name_b} {right}"),)
    )


def dot_accumulator(scene: Scene) -> Fault | None:
    if call_name(scene.node) != "dot" or (
        "acc" not in scene.message and "out_dtype" not in scene.message and "Unsupported" not in scene.message
    ):
        return None
    call = scene.node
    assert isinstance(call, ast.Call)
    accumulator = next((k.value for k in call.keywords if k.arg == "acc"), call.args[2] if len(call.args) > 2 else None)
    name = variable_of(accumulator) if accumulator is not None else variable_of(call.args[0]) if call.args else "tl.dot"
    seen = [scene.frame.dtypes.get(n, "?") for n in (*call.args[:2], *([accumulator] if accumulator is not None else []))]
    cause = f"tl.dot refuses these dtypes ({', '.join(seen)}): {scene.message}"
    fix = "start the accumulator as tl.zeros(..., dtype=tl.float32) and cast operands to a dtype that tl.dot takes"
    return scene.fault("KN003", name, f"tl.dot refuses the dtype of {name}", cause=cause, fix=fix, dtypes=tuple(seen[:2]))


def refused_atomic(scene: Scene) -> Fault | None:
    found = re.search(r"atomic_(\w+) (?:does not support|not supported for dtype|only supports) (.+)", scene.message)
    if not found:
        return None
    call = scene.node
    pointer = variable_of(call.args[0]) if isinstance(call, ast.Call) and call.args else "the pointer"
    parameters = [n for n in names_in(call) if scene.frame.parameters.get(n, "").startswith("*")]
    pointer = parameters[0] if parameters else pointer
    got = scene.frame.parameters.get(pointer, "*?").removeprefix("*")
    cause = f"tl.atomic_{found[1]} does not take {got}: the hardware or Triton has no such atomic, and {pointer} points to {got}"
    fix = f"accumulate into an fp32 buffer ({pointer} as *fp32, atomics in fp32) and cast once after the kernel"
    return scene.fault("KN006", pointer, f"atomic_{found[1]} on {pointer}, which holds {got}", cause=cause, fix=fix, dtypes=(got, "fp32"))


def refused_store(scene: Scene) -> Fault | None:
    found = re.search(r"element type ?\((\w+)\) and value element type ?\((\w+)\) mismatch", scene.message)
    if not found and (call_name(scene.node) != "store" or not re.search(r"dtype|element type|cast|convert", scene.message)):
        return None  # a block stored through one pointer, a mask of another shape: no matter of dtypes
    call = scene.node
    method = isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and names_in(call.func.value) != ["tl"]
    value = call.args[1] if isinstance(call, ast.Call) and len(call.args) > 1 else None
    name = variable_of(value) if value is not None else "value"
    got = scene.frame.dtypes.get(value, "?") if value is not None else "?"
    wanted = found[1] if found else "?"
    got = found[2] if found else got
    if not found and method is False and got not in ("fp64", "fp32", "bf16", "fp16"):
        return None
    cause = f"`{source_text(call)}` stores {got} where the memory holds {wanted}: {scene.message}"
    stored = name if value is None or isinstance(value, ast.Name) else f"({source_text(value)})"
    fix = (
        f"cast before the store: {stored}.to(tl.{torch_word(wanted)})"
        if found
        else f"cast {name} to the pointer's element type before the store: .to(ptr.dtype.element_ty)"
    )
    return scene.fault(
        "KN007",
        name,
        f"{name} is {got} and is stored as {wanted}" if found else f"storing {name} is refused",
        cause=cause,
        fix=fix,
        dtypes=(wanted, got),
    )


_REFUSED = re.compile(
    r"invalid operands? of type|unexpected type|[Ii]ncompatible|Unexpected dtype|cannot (?:convert|cast|be)|wrong type argument|dtype|"
    r"[Mm]ust be (?:an )?int|should be (?:an )?int|integer|element type|Unsupported (?:lhs|rhs)|not support|must all be ints|type mismatch|"
    r"Invalid argument .*cast|bitcast|precision"
)


def refused_operands(scene: Scene) -> Fault | None:
    """An operation that does not take these dtypes: `%` on floats, `&` on a float, a float index, pointer arithmetic with a float."""
    if not _REFUSED.search(scene.message) or re.search(r"block type|shape", scene.message):
        return None
    parts = typed_operands(scene)
    seen = [(variable_of(n), scene.frame.dtypes[n]) for n in parts if not scene.frame.dtypes[n].startswith("constexpr")]
    if not seen:
        return None
    odd = next((pair for pair in seen if pair[1] in ("fp64", "fp32", "bf16", "fp16")), seen[0])
    text = source_text(scene.node).splitlines()[0]
    listed = ", ".join(f"{name} {word}" for name, word in seen)
    where = next((origin(scene.frame, n) for n in parts if variable_of(n) == odd[0]), None)
    cause = f"`{text}` does not take {listed}: {scene.message}"
    cause += f"; {odd[0]}: {where.text}{scene.at(where)}" if where else ""
    fix = f"cast {odd[0]} before it, or change the dtype that {where.name if where and where.name else odd[0]} is passed in"
    return scene.fault("KN008", odd[0], f"`{text}` refuses {listed}", cause=cause, fix=fix, dtypes=tuple(w for _, w in seen[:2]))


def typed_operands(scene: Scene) -> list[ast.AST]:
    """The typed operands of the expression or loop at which Triton stopped."""
    node = scene.node.iter if isinstance(scene.node, ast.For) else scene.node
    return [n for n in ast.walk(node) if n in scene.frame.dtypes and n is not scene.node and not _inside_other(n, node, scene)]


def _inside_other(part: ast.AST, whole: ast.AST, scene: Scene) -> bool:
    typed = [n for n in ast.walk(whole) if n in scene.frame.dtypes and n is not whole and n is not part]
    return any(part in ast.walk(other) for other in typed)


RECOGNISERS: tuple[Callable[[Scene], Fault | None], ...] = (
    redefined_in_branch,
    reassigned_in_loop,
    inconsistent_ternary,
    inconsistent_returns,
    dot_operands,
    dot_accumulator,
    math_on_low_precision,
    lost_constexpr,
    refused_atomic,
    refused_store,
    refused_operands,
)


def diagnose(kernel_name: str, file: str, line: int, observation: Observation) -> Fault:
    """The fault behind a failed observation; `file` and `line` are the kernel's own, for failures outside any expression."""
    assert observation.failed, "only failures are diagnosed"
    found = _innermost_of_the_user(observation)
    if found is None:
        cause = f"Triton stopped before the kernel's body: {observation.message}"
        fix = "look at the signature and the constexprs of this combination"
        return Fault("KN009", file, line, kernel_name, "", f"{kernel_name} does not compile", cause, fix, is_dtype=False)
    scene = Scene(*found, observation.message, kernel_name)
    for recognise in RECOGNISERS:
        if (fault := recognise(scene)) is not None:
            return fault
    return _unrecognised(scene)


def _innermost_of_the_user(observation: Observation) -> tuple[Frame, ast.AST] | None:
    own = [(frame, node) for frame, node in observation.failures if not frame.in_triton]
    return own[0] if own else (observation.failures[0] if observation.failures else None)


def _unrecognised(scene: Scene) -> Fault:
    text = source_text(scene.node).splitlines()[0]
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
