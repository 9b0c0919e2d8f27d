"""A run can be repeated from its records, and known faults of an environment are found."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from packaging.requirements import Requirement

from isotype import pages
from isotype.environment.versions import environment, faults, mismatched_pairs, requirements
from isotype.errors import UsageError
from isotype.finding import Severity


def test_a_run_can_be_repeated_from_its_records(tmp_path):
    recorded = environment()
    (tmp_path / "env.json").write_text(json.dumps(recorded))
    lines = [line for line in requirements(tmp_path).splitlines() if not line.startswith(("#", "--"))]
    pins = {Requirement(line).name: Requirement(line) for line in lines}
    assert str(pins["torch"].specifier) == f"=={recorded['packages']['torch']}"
    assert len(pins) >= len(recorded["packages"])
    assert "isotype" not in pins or "isotype" not in recorded["sources"]


def test_sources_outside_an_index(tmp_path):
    recorded = {"python": "3.12.1", "distributions": {"a": "1", "b": "2", "torch": "2.13.0+cu128"},
                "sources": {"a": "git+https://example.org/a@0123", "b": "a local folder"}}  # fmt: skip
    (tmp_path / "env.json").write_text(json.dumps(recorded))
    text = requirements(tmp_path)
    assert "a @ git+https://example.org/a@0123\n" in text
    assert "# b==2 was installed from a local folder\n" in text
    assert "--extra-index-url https://download.pytorch.org/whl/cu128\n" in text


@pytest.mark.parametrize("content", [None, "", "[]", "{}", '{"distributions": 3, "python": "3"}'])
def test_what_is_no_env_json(tmp_path, content):
    if content is not None:
        (tmp_path / "env.json").write_text(content)
    with pytest.raises(UsageError, match="--requirements"):
        requirements(tmp_path)


def test_the_record_of_a_process_that_set_tf32_by_its_new_name():
    """PyTorch raises when the old name is read then; in a process of its own, since the setting cannot be taken back whole."""
    code = (
        "import torch; torch.backends.cuda.matmul.fp32_precision = 'tf32'; "
        "from isotype.environment.versions import environment; assert environment()['torch']['tf32_matmul'] is True"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


HEALTHY = {
    "distributions": {}, "variables": {},
    "torch": {"version": "2.13.0+cpu", "cuda": None, "hip": None}, "devices": [{"kind": "cpu", "generation": "cpu-avx2"}],
}  # fmt: skip
HOPPER = {"devices": [{"kind": "cuda", "generation": "hopper"}], "torch": {"version": "2.13.0+cu130", "cuda": "13.0", "hip": None}}
BF16_CPU = [{"kind": "cpu", "generation": "cpu-avx512-bf16"}]


@pytest.mark.parametrize(
    ("changes", "code", "word"),
    [
        ({"distributions": {"bitsandbytes": "0.50.2"}, "devices": BF16_CPU}, "EV002", "repacked"),
        ({"distributions": {"bitsandbytes": "0.49.0"}, "devices": BF16_CPU}, "EV002", "repacked"),
        ({"distributions": {"torch": "2.13.0+cu130"}, **HOPPER}, "EV002", "NaN"),
        ({"distributions": {"triton": "3.9.0"}, "variables": {"TRITON_INTERPRET": "1"}}, "EV002", "interpreter"),
        ({"distributions": {"transformers": "5.23.0"}}, "EV002", "checkpoint"),
        ({"distributions": {"trl": "0.7.8"}}, "EV002", "autocast"),
        ({"torch": {}}, "EV003", "not installed"),
        ({"torch": {"version": "2.13.0+cu128", "cuda": "12.8", "hip": None}}, "EV003", "sees no GPU"),
        ({"devices": [*BF16_CPU, {"kind": "unknown", "name": "gfx1", "reason": "not in the table"}]}, "EV003", "table of hardware"),
        ({"variables": {"ACCELERATE_MIXED_PRECISION": "fp16"}}, "EV004", "overrides"),
    ],
)
def test_each_fault_is_found_and_mended(changes, code, word):
    (finding,) = faults({**HEALTHY, **changes})
    assert finding.code == code
    assert word in finding.message
    assert finding.fix
    assert pages.page(code)


@pytest.mark.parametrize(
    "changes",
    [{"distributions": {"torch": "2.13.0"}}, {"distributions": {"torch": "2.14.0"}, **HOPPER},
     {"distributions": {"bitsandbytes": "0.50.2"}}, {"distributions": {"bitsandbytes": "0.48.2"}, "devices": BF16_CPU},
     {"distributions": {"bitsandbytes": "main"}, "devices": BF16_CPU}, {"distributions": {"triton": "3.9.0"}},
     {"distributions": {"triton": "3.9.0"}, "variables": {"TRITON_INTERPRET": "0"}},
     {"distributions": {"transformers": "4.57.0"}}, {"distributions": {"trl": "1.16.0"}}],
)  # fmt: skip
def test_a_known_fault_that_does_not_apply_is_not_reported(changes):
    assert [f for f in faults({**HEALTHY, **changes}) if f.code != "EV001"] == []


def test_a_pair_that_does_not_go_together_names_the_command():
    findings = [f for f in mismatched_pairs({"tokenizers": "0.1.0", "transformers": "5.23.0"}) if f.place.symbol == "tokenizers"]
    assert findings
    assert findings[0].severity == Severity.ERROR
    assert findings[0].fix.startswith("pip install 'tokenizers")
    assert "0.1.0 is installed" in findings[0].message
