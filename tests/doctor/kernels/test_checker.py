"""Each kind of dtype fault is found, named, explained and absent from the repaired form."""
# ruff: noqa: E501

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import pytest

triton = pytest.importorskip("triton")

from isotype.finding import Finding, Severity  # noqa: E402
from tests.api import kernels_check as check  # noqa: E402

from . import fault_kernels as kernels  # noqa: E402


def low(**types: str) -> dict[str, dict[str, str]]:
    """The signature with every `*F` pointer in each float dtype."""
    return {
        word: {n: t.replace("F", word) for n, t in types.items()}
        for word in ("fp32", "bf16", "fp16")
    }


@dataclass(frozen=True)
class Case:
    name: str
    code: str
    variable: str
    signatures: dict[str, dict[str, str]]
    constexprs: dict[str, Any] = field(default_factory=dict)
    words: tuple[str, ...] = ()  # that cause and fix must hold
    severity: Severity = Severity.ERROR


XO = {"x_ptr": "*F", "out_ptr": "*F"}
CASES = [
    Case("loop_fp64_scalar", "KN002", "m", {"eager": {"x_ptr": "*bf16", "out_ptr": "*fp32", "scale": "fp32", "n": "i32"}, "inductor": {"x_ptr": "*bf16", "out_ptr": "*fp32", "scale": "fp64", "n": "i32"}}, {"BLOCK": 64}, ("fp64", "Inductor", "scale.to(tl.float32)")),
    Case("while_sum", "KN002", "total", low(**XO, n="i32"), {}, ("loop", "tl.float32")),
    Case("branch_else", "KN001", "y", low(**XO, causal="i32", n="i32"), {"BLOCK": 64}, ("branch", "causal: tl.constexpr", "float32")),
    Case("branch_in_helper", "KN001", "x", low(**XO, scale="fp32"), {"BLOCK": 64}, ("branch", "fp32")),
    Case("dot_probabilities", "KN003", "p", low(q_ptr="*F", k_ptr="*F", v_ptr="*F", out_ptr="*F"), {"N": 32}, ("tl.dot", "p.to(v.dtype)")),
    Case("log_of_mean", "KN004", "square", low(**XO, n="i32"), {"BLOCK": 64}, ("sqrt", ".to(tl.float32)")),
    Case("tanh_low", "KN004", "x", low(**XO), {"BLOCK": 64}, ("tanh", "libdevice", ".to(tl.float32)")),
    Case("low_sum_loop", "KN020", "acc", low(**XO, n="i32"), {"BLOCK": 64}, ("bf16", "tl.float32"), Severity.WARNING),
    Case("low_block_sum", "KN020", "x", low(**XO, n="i32"), {"BLOCK": 64}, ("bf16", ".to(tl.float32)"), Severity.WARNING),
]  # fmt: skip


def loud(findings: list[Finding]) -> list[Finding]:
    return [f for f in findings if f.severity > Severity.NOTE]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_the_fault_is_found_named_and_explained_and_its_repaired_form_is_quiet(case: Case) -> None:
    kernel = getattr(kernels, case.name)
    (finding,) = loud(check(kernel, case.signatures, {**case.constexprs, "FIXED": False}).findings)
    text = finding.render()
    assert (finding.code, finding.severity, dict(finding.details)["variable"]) == (
        case.code,
        case.severity,
        case.variable,
    ), text
    assert [word for word in case.words if word not in text] == [], text
    assert finding.fix
    # in the kernel or in the function of its file that it calls
    lines = [
        first + i
        for f in (kernel, kernels._scaled)
        for source, first in [inspect.getsourcelines(f.fn)]
        for i, t in enumerate(source)
        if "# fault" in t
    ]
    assert any(abs((finding.place.line or 0) - line) <= 1 for line in lines), text
    assert not loud(check(kernel, case.signatures, {**case.constexprs, "FIXED": True}).findings)


def test_a_block_through_one_pointer_is_no_matter_of_dtypes() -> None:
    assert {
        f.code for f in check(kernels.block_through_one_pointer, low(**XO), {"BLOCK": 64}).findings
    } == {"KN009"}


# kernel, words, signature, constexprs, target, and constexprs and a target for which it is quiet
BINARY = [
    ("tanh_by_ptx", "machine code", {"x_ptr": "*bf16", "out_ptr": "*bf16"}, {"BLOCK": 256}, "sm_80", {"BLOCK": 256}, "sm_90"),
    ("three_rows_in_one_warp", "spills", {"x_ptr": "*bf16", "out_ptr": "*bf16", "n": "i32"}, {"BLOCK": 4096}, "sm_90", {"BLOCK": 256}, "sm_90"),
]  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "words", "types", "values", "target", "fine", "there"),
    BINARY,
    ids=[row[1] for row in BINARY],
)
def test_machine_code(name, words, types, values, target, fine, there, capfd) -> None:
    kernel = getattr(kernels, name)
    (found,) = loud(check(kernel, {"bf16": types}, values, [target], binary=True).findings)
    assert (found.code, words in found.message, target in found.message) == ("KN010", True, True)
    assert not check(kernel, {"bf16": types}, fine, [there], binary=True).findings
    assert capfd.readouterr().out == ""
