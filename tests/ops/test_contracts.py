"""Every op passes the doctor's own check of its contract: all dtypes and autocasts, long sums,
aliasing, checkpointing.
"""

from typing import Any

import pytest

from isotype.ops import cpp
from isotype.ops.backend import force_backend
from isotype.testing import ampcheck
from tests.api import numerics
from tests.gpu import DEVICE, kernels, on_a_gpu
from tests.ops.cases import CASES, LONG, OPTIONAL, Case


def without_a_finding(case: Case, inputs: Any) -> int:
    report = ampcheck(
        case.op, inputs, reference=case.reference, contract=case.contract, raises=False
    )
    assert not report.findings, report.render()
    assert not report.refused
    assert not report.skipped
    return report.tried


CPP = pytest.param(
    "cpp", marks=pytest.mark.skipif(cpp.cpu_compiler() is None, reason="no C++ compiler")
)


# `make test` runs each op's own case on the C++ kernels; its options, and plain PyTorch, are left
# to the whole matrix
@pytest.mark.parametrize("backend", [pytest.param("eager", marks=pytest.mark.full), CPP])
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.full] if name.endswith(OPTIONAL) else [])
        for name, case in CASES.items()
    ],
    ids=CASES,
)
def test_keeps_its_contract(case, backend):
    with force_backend(backend):
        assert without_a_finding(case, [case.inputs(6), case.inputs(LONG)]) >= 32
    assert not cpp.fallback_reasons()


# One of each kernel: what its other flags, chunks and an addition before it compute is held by
# test_kernels to plain PyTorch, whose contract is checked above
ON_KERNELS = [
    "cross_entropy-every-option",
    "rms_norm",
    "silu_mul",
    "gelu_mul",
    "rope-interleaved",
    "modulated_layer_norm",
    "gated_residual",
]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("rms_norm", "silu_mul") else pytest.mark.full)
        for name in ON_KERNELS
    ],
)
def test_its_kernels_keep_it_in_the_interpreter(name, monkeypatch):
    pytest.importorskip("triton")
    from isotype.testing.interpreter import interpreted

    # an interpreted program takes about a millisecond, and rows are programs of their own
    monkeypatch.setattr(numerics, "SOME_ROWS", 16)
    # and a rotation sums nothing
    monkeypatch.setattr(numerics, "MANY_ROWS", 4 if "rope" in name else 32)
    with interpreted(), force_backend("triton"):
        without_a_finding(CASES[name], CASES[name].inputs(2 if "rope" in name else 3))


@on_a_gpu
@pytest.mark.parametrize("name", CASES)
def test_keeps_its_contract_on_a_gpu(name, monkeypatch):
    case, long = CASES[name], 160
    if DEVICE == "cpu":
        monkeypatch.setattr(numerics, "SOME_ROWS", 4)
        monkeypatch.setattr(numerics, "MANY_ROWS", 4)
        long = 3
    with kernels():
        inputs = tuple(t.to(DEVICE) for t in case.inputs(long))
        report = ampcheck(
            case.op, inputs, reference=case.reference, contract=case.contract, raises=False
        )
    assert not report.findings, report.render()
