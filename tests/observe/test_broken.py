"""Every program that breaks its declaration ends in a true violation; what an operator's own kernel
hides is said.
"""

import pytest

from isotype.finding import Finding
from isotype.precision import PRESETS

from . import broken
from .run import PROGRAMS, Program, observed

HIDDEN = {"CompiledMLP", "CustomOp"}


def test_a_broken_declaration_is_reported(subtests):
    for name, program in PROGRAMS.items():
        with subtests.test(name):
            looks = observed(program)
            violations = [finding for look in looks for finding in look.violations]
            if name in HIDDEN:
                assert any(look.unobserved for look in looks)
            else:
                assert violations
            for finding in violations:
                assert_true_of(program, finding)


def assert_true_of(program: Program, finding: Finding) -> None:
    """What it says was declared was declared, what it says was observed differs, and what never
    changed is not called changed.
    """
    place, _, word = str(finding.declared).partition(": ")
    section, _, role = place.partition(".")
    assert section != "precision" or word == getattr(PRESETS[program.preset], role)
    assert word != finding.observed
    unchanged = program.prepare is Program.prepare and program.before_step is Program.before_step
    assert not (unchanged and "after the precision was put on" in str(finding.cause))


@pytest.mark.parametrize("name", ["full_in_fp32", "tensor_in_fp32", "linspace_in_fp32"])
def test_a_rounded_number_is_reported_once_with_module_and_line(name):
    (violation,) = [finding for look in observed(PROGRAMS[name]) for finding in look.violations]
    assert violation.code == "DT003"
    assert "layers.1.mlp" in violation.message
    assert violation.place.file == broken.__file__
    assert violation.place.line
