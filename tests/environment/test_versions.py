"""A run can be repeated from its records, and known find_faults of an environment are found."""

from __future__ import annotations

import subprocess

import pytest

from isotype import pages
from tests.api import find_faults
from tests.warm import interpreter


def test_the_record_of_a_process_that_set_tf32_by_its_new_name():
    """PyTorch raises when the old name is read then; in a process of its own, since the setting
    cannot be taken back whole.
    """
    code = (
        "import torch; torch.backends.cuda.matmul.fp32_precision = 'tf32'; "
        "from isotype.environment.versions import environment; assert environment()['torch']['tf32_matmul'] is True"
    )
    ended = subprocess.run([interpreter(), "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


HEALTHY = {
    "distributions": {}, "variables": {},
    "torch": {"version": "2.13.0+cpu", "cuda": None, "hip": None}, "devices": [{"kind": "cpu", "generation": "cpu-avx2"}],
}  # fmt: skip
HOPPER = {
    "devices": [{"kind": "cuda", "generation": "hopper"}],
    "torch": {"version": "2.13.0+cu130", "cuda": "13.0", "hip": None},
}
BF16_CPU = [{"kind": "cpu", "generation": "cpu-avx512-bf16"}]


@pytest.mark.parametrize(
    ("changes", "code", "word"),
    [
        ({"distributions": {"bitsandbytes": "0.50.2"}, "devices": BF16_CPU}, "EV002", "repacked"),
        ({"distributions": {"bitsandbytes": "0.49.0"}, "devices": BF16_CPU}, "EV002", "repacked"),
        ({"distributions": {"torch": "2.13.0+cu130"}, **HOPPER}, "EV002", "NaN"),
        (
            {"distributions": {"triton": "3.9.0"}, "variables": {"TRITON_INTERPRET": "1"}},
            "EV002",
            "interpreter",
        ),
        ({"torch": {}}, "EV003", "not installed"),
        (
            {"torch": {"version": "2.13.0+cu128", "cuda": "12.8", "hip": None}},
            "EV003",
            "sees no GPU",
        ),
        (
            {
                "devices": [
                    *BF16_CPU,
                    {"kind": "unknown", "name": "gfx1", "reason": "not in the table"},
                ]
            },
            "EV003",
            "table of hardware",
        ),
        ({"variables": {"ACCELERATE_MIXED_PRECISION": "fp16"}}, "EV004", "overrides"),
    ],
)
def test_each_fault_is_found_and_mended(changes, code, word):
    (finding,) = find_faults({**HEALTHY, **changes})
    assert finding.code == code
    assert word in finding.message
    assert finding.fix
    assert pages.page(code)


@pytest.mark.parametrize(
    "changes",
    [{"distributions": {"torch": "2.13.0"}}, {"distributions": {"torch": "2.14.0"}, **HOPPER},
     {"distributions": {"bitsandbytes": "0.50.2"}}, {"distributions": {"bitsandbytes": "0.48.2"}, "devices": BF16_CPU},
     {"distributions": {"bitsandbytes": "main"}, "devices": BF16_CPU}, {"distributions": {"triton": "3.9.0"}},
     {"distributions": {"triton": "3.9.0"}, "variables": {"TRITON_INTERPRET": "0"}}],
)  # fmt: skip
def test_a_known_fault_that_does_not_apply_is_not_reported(changes):
    assert find_faults({**HEALTHY, **changes}) == []
