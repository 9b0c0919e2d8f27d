"""A value that has to be known when compiling and reaches the kernel at run time (KN005)."""

from __future__ import annotations

import ast
import re

from ..fault import Fault
from ..observe import Frame
from ..provenance import assigns, names_in, source_text
from .scene import Scene


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
