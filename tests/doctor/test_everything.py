import json

import pytest
from typer.testing import CliRunner

from isotype.cli.app import build_app
from isotype.doctor.everything import visit
from isotype.errors import UsageError

KERNEL = """
import triton
import triton.language as tl


@triton.jit
def scale(x_ptr, out_ptr, factor, do_scale, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    if do_scale != 0:
        x = x.to(tl.float32) * factor
    tl.store(out_ptr + i, x, mask=i < n)
"""
DEFAULT_DTYPE = """
import torch


def load(path):
    torch.set_default_dtype(torch.bfloat16)
    return torch.load(path)
"""


@pytest.fixture
def project(tmp_path):
    (tmp_path / "args.yaml").write_text("output_dir: out\nfp16: true\nbf16: true\nlogging_steps: 10\n")
    (tmp_path / "loader.py").write_text(DEFAULT_DTYPE)
    (tmp_path / "kernels.py").write_text(KERNEL)
    (tmp_path / "run.log").write_text("RuntimeError: expected mat1 and mat2 to have the same dtype, but got: float != c10::BFloat16\n")
    return tmp_path


def test_every_part_looks_at_what_is_its(project):
    found = {one.part: one.findings for one in visit(project)}
    assert set(found) == {"check", "lint", "explain", "kernels"}
    assert all(found.values())
    assert {f.code[:2] for findings in found.values() for f in findings} == {"CF", "LT", "EX", "KN"}


def test_static_imports_nothing(project):
    (project / "kernels.py").write_text(KERNEL + "\nraise SystemExit('imported')\n")
    assert not {one.part: one.findings for one in visit(project, static=True)}["kernels"]


def test_one_summary_and_an_exit_status(project, tmp_path):
    done = CliRunner().invoke(build_app(), ["doctor", str(project), "--json"])
    assert done.exit_code == 1
    answer = json.loads(done.stdout)
    assert {part["part"] for part in answer["parts"]} == {"check", "lint", "explain", "kernels"}
    text = CliRunner().invoke(build_app(), ["doctor", str(project)]).stdout
    assert "kernels  1 Triton kernels in 1 files" in text
    (tmp_path / "clean").mkdir()
    (tmp_path / "clean/a.py").write_text("x = 1\n")
    assert CliRunner().invoke(build_app(), ["doctor", str(tmp_path / "clean")]).exit_code == 0


def test_a_missing_path_is_one_line():
    with pytest.raises(UsageError, match="no such file"):
        visit(__import__("pathlib").Path("nowhere"))
