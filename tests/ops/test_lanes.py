"""lanes.h: every narrow value is widened and narrowed as PyTorch does it, and a source is built
once.
"""

import math
from pathlib import Path

import pytest
import torch

from isotype.ops import cpp as ops_cpp

pytestmark = pytest.mark.skipif(ops_cpp.cpu_compiler() is None, reason="no C++ compiler")


class Probe(ops_cpp.CppKernels):
    def __init__(self) -> None:
        super().__init__(__file__, convert="ddppi")
        self.source = Path(__file__).parent / "lanes_probe.cpp"


@pytest.fixture(scope="module")
def probe():
    made = Probe()
    assert made.loaded(), ops_cpp.fallbacks()
    return made


def same(got, want):
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(0.0), want.nan_to_num(0.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_narrow_value_is_widened_exactly_and_narrowing_is_pytorchs_to_nearest_even(
    probe, dtype
):
    narrow = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    y = torch.empty(narrow.shape)
    probe("convert", dtype, torch.float32, narrow, y, narrow.numel())
    same(y, narrow.float())
    exact = narrow.float()
    ordered = exact[exact.isfinite()].sort().values
    ties = (ordered[1:].double() + ordered[:-1].double()).div(2).float()
    special = torch.tensor(
        [
            65504.0,
            65519.99,
            65520.0,
            65536.0,
            3.4e38,
            math.inf,
            -math.inf,
            math.nan,
            1e-45,
            -0.0,
            6e-8,
            2.9e-8,
            3e-8,
        ]
    )
    random = torch.randint(-(2**31), 2**31, (2**16,)).to(torch.int32).view(torch.float32)
    x = torch.cat(
        (
            exact,
            ties,
            ties.nextafter(torch.tensor(math.inf)),
            ties.nextafter(torch.tensor(-math.inf)),
            special,
            -special,
            random,
        )
    )
    y = torch.empty(x.shape, dtype=dtype)
    probe("convert", torch.float32, dtype, x, y, x.numel())
    same(y, x.to(dtype))


def test_a_source_is_built_once_and_a_long_build_prints_a_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ISOTYPE_CACHE", str(tmp_path / "new" / "folder"))
    monkeypatch.setattr(ops_cpp, "PATIENCE_S", 0.0)
    source = Path(__file__).parent / "lanes_probe.cpp"
    ops_cpp.library(source)
    (built,) = (tmp_path / "new" / "folder").glob("*.so")
    assert built.parent.stat().st_mode & 0o077 == 0
    assert (
        f"compiling C++ kernels for this processor, once; they are kept in {built.parent}"
        in capsys.readouterr().err
    )
    before = built.stat().st_ino
    ops_cpp.library(source)
    assert built.stat().st_ino == before
    assert not list(built.parent.glob("*.tmp"))
    assert capsys.readouterr().err == ""
