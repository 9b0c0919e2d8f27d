"""Atomics that a dtype has not (KN006), and stores of another dtype than the memory holds (KN007)."""

from __future__ import annotations

import ast
import re

from ....dtypes import torch_word
from ..fault import Fault
from ..provenance import call_name, names_in, source_text, variable_of
from .scene import Scene


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
