"""Every rule against its fixtures: `expected.txt` holds what `bad.py` must give, `good.py` must give nothing from any rule."""

from pathlib import Path

import pytest

from isotype.doctor.lint.config import LintConfig
from isotype.doctor.lint.grade import Grade
from isotype.doctor.lint.pages import codes, page
from isotype.doctor.lint.rule import SECTIONS, FixSafety, all_rules
from isotype.doctor.lint.run import Found, lint_text

FIXTURES = Path(__file__).parent / "fixtures"
ON = LintConfig().active(by_name=True)


def lint(file: Path, active: list[str]) -> list[Found]:
    """As a file alone: its folder is none of a repository."""
    return lint_text(file.read_text(), Path("/nowhere") / file.name, active=active)


@pytest.mark.parametrize("code", all_rules())
def test_finds_what_is_bad(code):
    found = [f.finding for f in lint(FIXTURES / code / "bad.py", [code])]
    told = [f"{f.place.line} {f.severity} {f.place.symbol}: {f.message}" for f in found]
    assert told == (FIXTURES / code / "expected.txt").read_text().splitlines()
    assert told, "a rule without a bad example"
    assert all(f.cause and f.fix for f in found)


@pytest.mark.parametrize("code", all_rules())
def test_is_quiet_about_what_is_good(code):
    active = [*ON, *([] if code in ON else [code])]
    found = [f for f in lint(FIXTURES / code / "good.py", active) if f.evidence.grade is not Grade.POSSIBLE]
    assert [str(f.finding.place) + " " + f.finding.message for f in found] == []


@pytest.mark.parametrize("code", codes())
def test_has_a_page(code):
    text = page(code)
    assert text.startswith(f"# {code}")
    if code in all_rules():
        assert [line.removeprefix("## ") for line in text.splitlines() if line.startswith("## ")] == list(SECTIONS)


@pytest.mark.parametrize("code", [c for c, r in all_rules().items() if r.fix_safety is not FixSafety.NONE])
def test_its_fix_silences_it(code, tmp_path):
    from isotype.doctor.lint.command import lint_command

    file = tmp_path / "bad.py"
    file.write_bytes((FIXTURES / code / "bad.py").read_bytes())
    safe = all_rules()[code].fix_safety is FixSafety.SAFE
    before = lint(file, [code])
    run = lint_command([file], select=[code], fix="safe" if safe else "unsafe")
    assert run.fixed == sum(f.edit is not None for f in before) > 0
    assert len(run.findings) == len(before) - run.fixed
    compile(file.read_text(), str(file), "exec")
    if not safe:
        untouched = tmp_path / "untouched.py"
        untouched.write_bytes((FIXTURES / code / "bad.py").read_bytes())
        assert lint_command([untouched], select=[code], fix="safe").fixed == 0


def test_default_dtype_left_for_good(tmp_path):
    """A file of its own: where other code sets the default too, nothing is said."""
    file = tmp_path / "load.py"
    source = """import torch
def load(path, build):
    torch.set_default_dtype({dtype})
    model = build()
    model.load_state_dict(torch.load(path))
    return model
"""
    for dtype, told in (("torch.bfloat16", True), ("torch.float64", False)):
        file.write_text(source.format(dtype=dtype))
        assert [f.finding.place.line for f in lint(file, ["LT006"])] == ([3] if told else [])
    file.write_text(source.format(dtype="torch.bfloat16") + "def reset():\n    torch.set_default_dtype(torch.float32)\n")
    assert not lint(file, ["LT006"])
