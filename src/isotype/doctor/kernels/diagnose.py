"""A failed compilation as a fault: which variable, which two dtypes, why, and what to change."""

from __future__ import annotations

import ast
from collections.abc import Callable

from .failures.constexpr import lost_constexpr
from .failures.control_flow import inconsistent_returns, inconsistent_ternary, reassigned_in_loop, redefined_in_branch
from .failures.dot import dot_accumulator, dot_operands
from .failures.math_functions import math_on_low_precision
from .failures.memory import refused_atomic, refused_store
from .failures.operands import refused_operands, typed_operands
from .failures.scene import Scene
from .fault import Fault
from .observe import Frame, Observation
from .provenance import source_text, variable_of

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
