"""`tl.dot` with operands of two dtypes, or with an accumulator that it does not take (KN003)."""

from __future__ import annotations

import ast
import re

from ..fault import Fault
from ..provenance import call_name, origin, variable_of
from .scene import Scene


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
