"""Finds arithmetic in fp64 that a kernel does only under torch.compile (KN021).

Triton passes a Python float such as `eps=1e-6` to a kernel as fp32. If the same launch is compiled
with torch.compile, Inductor passes it as fp64 (torch 2.11 to 2.13). If a block is combined with
this scalar, the result is fp64 too. fp64 has half the speed of fp32 on an A100 or H100, and 1/64 on
consumer GPUs. If the result is assigned to a variable of a loop, or is an operand of `tl.dot`, the
kernel does not compile at all.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from ...finding import Severity, join_names
from .compile_inputs import Combination, Reach
from .observe import Fault, Frame, Observation, call_name, find_names

LABEL = "with fp64 scalars"


def add_fp64_combinations(combinations: Sequence[Combination]) -> list[Combination]:
    """For each combination with fp32 scalars, adds the combination for which Inductor compiles the
    same launch. Returns all combinations.
    """
    result = []
    for combination in combinations:
        result.append(combination)
        if not combination.is_traced_by_compile:
            continue
        types = {
            name: "fp64" if type_name == "fp32" else type_name
            for name, type_name in combination.types.items()
        }
        if types != combination.types:
            compiled = replace(
                combination,
                label=f"{combination.label} {LABEL}",
                types=types,
                reach=min(combination.reach, Reach.COMPILED),
                counterpart=combination.label,
            )
            result.append(compiled)
    return result


def drop_repeated_failures(observations: Sequence[Observation]) -> list[Observation]:
    """Removes the observations with fp64 scalars if the same launch fails with fp32 scalars too."""
    failing = {
        (observation.combination.label, observation.target)
        for observation in observations
        if observation.failed
    }
    return [
        observation
        for observation in observations
        if (observation.combination.counterpart, observation.target) not in failing
    ]


def find_fp64_blocks(kernel: str, observation: Observation) -> list[Fault]:
    """Returns a fault for each function of a kernel in which an fp64 scalar promotes a block."""
    if not observation.combination.counterpart:
        return []
    faults = []
    frames = [
        frame
        for frame in observation.frames
        if not frame.is_triton_library and frame.tree is not None
    ]
    names = {frame.name for frame in frames}
    for frame in frames:
        # the promotion inside a called function is reported there
        promotions = [
            (line, node) for line, node in _find_promotions(frame) if call_name(node) not in names
        ]
        if promotions:
            faults.append(_build_fault(kernel, frame, promotions))
    return faults


def _find_promotions(frame: Frame) -> Iterator[tuple[int, ast.expr]]:
    """Yields the expressions that return an fp64 block although no operand is an fp64 block, with
    their lines.
    """
    for node, dtype in frame.dtypes.items():
        if dtype != "fp64" or not frame.shapes.get(node):
            continue
        operands = _find_operands(node)
        has_fp64_block = any(
            frame.dtypes.get(operand) == "fp64" and frame.shapes.get(operand)
            for operand in operands
        )
        has_fp64_scalar = any(
            frame.dtypes.get(operand) == "fp64" and not frame.shapes.get(operand)
            for operand in operands
        )
        if has_fp64_scalar and not has_fp64_block:
            assert isinstance(node, ast.expr)
            # the node that Triton creates for `x *= scale` has no line, but its operands have one
            line = min(frame.line(part) for part in [*operands, node] if hasattr(part, "lineno"))
            yield line, node


def _find_operands(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.BinOp):
        return [node.left, node.right]
    if isinstance(node, ast.UnaryOp):
        return [node.operand]
    if isinstance(node, ast.IfExp):
        return [node.body, node.orelse]
    if isinstance(node, ast.Call):
        operands = [*node.args, *(keyword.value for keyword in node.keywords)]
        if isinstance(node.func, ast.Attribute):
            operands.append(node.func.value)
        return operands
    return []


def _build_fault(kernel: str, frame: Frame, promotions: list[tuple[int, ast.expr]]) -> Fault:
    line, node = promotions[0]
    text = ast.unparse(node)
    scalars = _find_fp64_parameters(frame, find_names(node))
    names = join_names(scalars) or "a scalar"
    cause = (
        f"under torch.compile, Inductor passes a Python float as fp64 (a plain launch passes fp32)."
        f" `{text}` then promotes a block to fp64, and so does what follows"
    )
    first = scalars[0] if scalars else "scale"
    casts = "; ".join(f"{name} = {name}.to(tl.float32)" for name in scalars or [first])
    lines = dict.fromkeys(str(line) for line, _ in promotions)
    facts = [("scalars", names)]
    if len(lines) > 1:
        facts.append(("lines", ", ".join(lines)))
    return Fault(
        "KN021",
        frame.file,
        line,
        kernel,
        names,
        f"{names} makes `{text}` fp64 under torch.compile",
        cause,
        f"cast the scalar at the top of the kernel, which also changes nothing in a plain launch: {casts}",
        dtypes=("fp64", "fp32"),
        facts=tuple(facts),
        severity=Severity.WARNING,
    )


def _find_fp64_parameters(frame: Frame, names: Iterable[str]) -> list[str]:
    """Returns the fp64 parameters from which these variables are computed."""
    values: dict[str, list[ast.AST]] = {}
    for binding in frame.bindings:
        if binding.value is not None:
            values.setdefault(binding.name, []).append(binding.value)
    reached = list(names)
    for name in reached:
        for value in values.get(name, []):
            reached += [other for other in find_names(value) if other not in reached]
    return [name for name in dict.fromkeys(reached) if frame.parameters.get(name) == "fp64"]
