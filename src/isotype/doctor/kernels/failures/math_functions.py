"""A function of Triton's math or of libdevice on a dtype that it has no form for (KN004)."""

from __future__ import annotations

import ast
import re

from ..fault import Fault
from ..provenance import LOW, call_name, names_in, origin, source_text, variable_of
from .scene import Scene, origin_facts


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
