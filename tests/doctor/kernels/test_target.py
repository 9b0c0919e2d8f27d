"""What TARGET may be, and what is said when it is something else."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

pytest.importorskip("triton")

from typer.testing import CliRunner

from isotype.cli.app import build_app
from isotype.errors import UsageError
from isotype.finding import Severity
from isotype.pages import page
from tests.api import check_target, signature
from tests.api import kernels_check as check

from . import fault_kernels

KERNEL = """
import torch, triton
import triton.language as tl

@triton.jit
def row_lse(logits_ptr, stride, lse_ptr, labels_ptr, n_cols, scale, DO_SCALE{flag}, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    label = tl.load(labels_ptr + row)
    x = tl.load(logits_ptr + row * stride + cols, mask=cols < n_cols, other=-float("inf"))
    if DO_SCALE:
        x = scale.to(tl.float32) * x.to(tl.float32)
    x = x.to(tl.float32)
    m = tl.max(x, 0)
    if label != -100:
        tl.store(lse_ptr + row, m + tl.log(tl.sum(tl.exp(x - m), 0)))

def lse(logits, labels):
    out = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    row_lse[(logits.shape[0],)](logits, logits.stride(0), out, labels, logits.shape[1], 2.0, True, BLOCK=64)
    return out

def with_inputs():
    return lse, (torch.randn(4, 64), torch.zeros(4, dtype=torch.int64))
"""
BROKEN, RIGHT = KERNEL.format(flag=""), KERNEL.format(flag=": tl.constexpr")


def written(folder: Path, text: str, name: str = "rows.py") -> str:
    file = folder / name
    file.write_text(text)
    return str(file)


def loud(findings: list) -> list[str]:
    return [f"{f.severity} {f.code}" for f in findings if f.severity > Severity.NOTE]


def test_a_file_is_inferred_from_its_source_and_launches(tmp_path: Path) -> None:
    report = check_target(written(tmp_path, BROKEN))
    assert report.kernels == ["row_lse"]
    # no caller is known to pass these dtypes
    assert [f"{f.severity} {f.code}" for f in report.findings] == ["note KN001"]
    finding = report.findings[0]
    assert "DO_SCALE: tl.constexpr" in str(finding.fix)
    assert "lse_ptr *fp32" in dict(finding.details)["signature"]
    assert "labels_ptr *i64" in dict(finding.details)["signature"]


def test_a_build_with_its_matrix(tmp_path: Path) -> None:
    text = (
        RIGHT
        + """
MATRIX = {"bf16": {"logits_ptr": "*bf16", "stride": "i32", "lse_ptr": "*fp32", "labels_ptr": "*i64", "n_cols": "i32", "scale": "fp32"}}
CONSTEXPRS = {"DO_SCALE": 1, "BLOCK": 64}
TARGETS = [80, 90]
def build():
    return row_lse, [("bf16", 90)]
"""
    )
    report = check_target(written(tmp_path, text) + ":build")
    assert loud(report.findings) == []
    assert report.compiled == 2


REFUSED = {
    "absent.py": "no such file",
    "no_such_package_anywhere": "no such file or module",
    "syntax.py": "syntax.py:2",
    "empty.py": "no @triton.jit kernel",
    "empty.py:nothing": "has no 'nothing'",
    "empty.py:number": "is a int",
    "empty.py:idle": "launched no Triton kernel",
    "empty.py:wants": "wants needs inputs",
    "raising.py": "RuntimeError: at import",
}


def test_what_cannot_be_checked_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, "x = 1\ndef f(:\n", "syntax.py")
    written(
        tmp_path, "number = 1\ndef idle():\n    return 1\ndef wants(x):\n    return x\n", "empty.py"
    )
    written(tmp_path, "raise RuntimeError('at import')\n", "raising.py")
    for target, message in REFUSED.items():
        with pytest.raises(UsageError, match=message) as caught:
            check_target(target)
        assert len(str(caught.value).split("\n  fix ")[0].splitlines()) == 1


def test_folder_with_files_that_cannot_be_imported(tmp_path: Path) -> None:
    """A missing package, a skipped test file and an error do not hide the other kernels. Files that
    fail for the same reason share one remark.
    """
    unusable = {
        "missing.py": "import triton, no_such_package\n",
        "missing_too.py": "import triton, no_such_package\n",
        "skipped.py": "import triton, pytest\npytest.skip('no GPU', allow_module_level=True)\n",
        "leaving.py": "import triton\nraise SystemExit(3)\n",
        "raising.py": "import triton\nraise RuntimeError('no driver')\n",
    }
    for name, text in unusable.items():
        written(tmp_path, text, name)
    with pytest.raises(UsageError, match="no file of it can be imported"):
        check_target(str(tmp_path))
    written(tmp_path, "import triton\n", "without_kernels.py")
    with pytest.raises(UsageError, match=r"no @triton.jit kernel in it: .*no_such_package"):
        check_target(str(tmp_path))
    # unsloth reads the device of the GPU when it is imported
    needs_gpu = "import torch\nassert torch.cuda.is_available() and torch.cuda.device(0).idx == 0\n"
    written(tmp_path, needs_gpu + RIGHT, "usable_rows.py")
    report = check_target(str(tmp_path))
    assert report.kernels == ["row_lse"]
    assert len(report.remarks) == 4
    remarks = "\n".join(report.remarks)
    assert [name for name in unusable if name not in remarks] == []
    assert "2 files not checked, ModuleNotFoundError: No module named 'no_such_package'" in remarks


def test_an_interrupted_check_reports_what_it_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`timeout` ends a command with SIGTERM, which has the effect of Ctrl-C."""
    checked = []

    def check_until_sigterm(kernel, **options):
        checked.append(kernel)
        if len(checked) == 2:
            signal.raise_signal(signal.SIGTERM)
        return check(kernel, **options)

    monkeypatch.setattr("isotype.doctor.kernels.target.check", check_until_sigterm)
    monkeypatch.setattr("isotype.cli.doctor._SECONDS_BETWEEN_LINES", 0.0)
    written(tmp_path, BROKEN, "broken_rows.py")
    written(tmp_path, RIGHT, "right_rows.py")
    result = CliRunner().invoke(build_app(), ["doctor", "kernels", str(tmp_path)])
    assert result.exit_code == 130, result.output
    assert "KN001" in result.stdout
    assert "interrupted: 1 of 2 kernels were checked" in result.stdout
    first, second = result.stderr.splitlines()
    assert first == "kernel 1/2  0 findings  0.0 s  broken_rows.py"
    assert second.startswith("kernel 2/2  0 findings  ")
    assert "  ETA " in second


GUESSED = """
import triton
import triton.language as tl

@triton.jit
def prefix_sums(counts_ptr, out_ptr, n):
    total = 0
    for i in range(n):
        tl.store(out_ptr + i, total)
        total += tl.load(counts_ptr + i)

@triton.jit
def load_described(x_desc, out_ptr):
    x = x_desc.load([0, 0])
    tl.store(out_ptr + tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :], x)

@triton.jit
def call_a_dtype(x_ptr, out_ptr, n):
    top = tl.float32(0.0)
    tl.store(out_ptr, tl.load(x_ptr) + top)

@triton.jit
def add_with_lock(x_ptr, lock_ptr, out_ptr, scale, HAS_SCALE: tl.constexpr, EVICT: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, 64), eviction_policy=EVICT)
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:
        pass
    if HAS_SCALE:
        scaled = scale_block(x, scale)
    tl.store(out_ptr + tl.arange(0, 64), scaled)
    tl.atomic_xchg(lock_ptr, 0)

@triton.jit
def scale_block(x, scale):
    return x * scale
"""


def test_failures_of_guessed_arguments(tmp_path: Path) -> None:
    """If a kernel compiles with no guess, only a failure that no argument changes is a fault.

    Cases: the prefix sums of Liger-Kernel's MoE router are of integers, its MLP kernels take tensor
    descriptors, and its softmax of long rows calls `tl.float32`. Cut Cross-Entropy has locks.
    """
    report = check_target(written(tmp_path, GUESSED))
    assert [(f.place.symbol, str(f.severity), f.code) for f in report.findings] == [
        ("call_a_dtype", "warning", "KN009"),
        # only where `scale_block` multiplies, and not for `scaled`, which has flags
        ("add_with_lock", "note", "KN021"),
    ]
    assert "`x * scale`" in report.findings[1].message
    assert "whatever its arguments are" in report.findings[0].render()
    remark, advice = report.remarks
    assert "FILE.py:build" in advice
    assert remark.startswith("load_described: not checked")
    assert "rows.py:14" in remark


def test_an_unsupported_triton_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signature, "version", lambda name: "3.2.0")
    with pytest.raises(
        UsageError, match=r"Triton 3\.2\.0 is installed; Isotype supports Triton 3\.4 to 3\.9"
    ):
        check(fault_kernels.branch_else)


def test_signatures_that_do_not_fit_the_kernel() -> None:
    with pytest.raises(UsageError, match="names y_ptr"):
        check(fault_kernels.branch_else, {"a": {"y_ptr": "*fp32"}})
    with pytest.raises(UsageError, match="says nothing of causal"):
        check(
            fault_kernels.branch_else,
            {"a": {"x_ptr": "*fp32", "out_ptr": "*fp32", "n": "i32"}},
            {"BLOCK": 64},
        )
    with pytest.raises(UsageError, match=r"no @triton.jit kernel"):
        check(print)


def test_the_command_line(tmp_path: Path) -> None:
    run = CliRunner().invoke(
        build_app(), ["doctor", "kernels", written(tmp_path, BROKEN) + ":with_inputs", "--json"]
    )
    assert run.exit_code == 1
    answer = json.loads(run.stdout)
    assert answer["findings"][0]["code"] == "KN001"
    assert answer["kernels"] == ["row_lse"]
    assert page("KN001")
    run = CliRunner().invoke(
        build_app(),
        ["doctor", "kernels", written(tmp_path, RIGHT, "r.py"), "--arch", "sm_90,gfx942"],
    )
    assert run.exit_code == 0
    assert "no findings" in run.stdout
