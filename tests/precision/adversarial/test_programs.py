"""Every program that breaks its declaration ends in a true violation, or in a line that says what cannot be seen."""

import pytest

from isotype.finding import Finding
from isotype.precision import PRESETS

from . import arithmetic, coarse, gradients, kept_casts, layouts, made_narrow, set_aside, storage, time_and_regions
from .program import PROGRAMS, Program
from .run import observed

assert all((arithmetic, coarse, gradients, kept_casts, layouts, made_narrow, set_aside, storage, time_and_regions))
# what happens there happens outside PyTorch's operators, or in the values of a table: a line is all that can be said
ONLY_SAID = {
    "ThroughNumpy", "WrittenByNumpy", "hook_through_numpy", "compiled_module", "CompiledMLP", "OutOfSight", "CustomOp", "FilledElsewhere",
    "BetweenThreads", "gradients_through_a_list", "ByTable", "ByBins", "ByNearest", "ByOneHot", "ByRemainder", "ByFmod",
    "SiluFromATable", "SiluFromBuckets", "SiluFromTheNearest", "custom_backward_of_two_values", *(made.__name__ for made in coarse.COARSE),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_broken_declaration_is_reported(name):
    looks = observed(PROGRAMS[name])
    violations = [finding for look in looks for finding in look.violations]
    lines = {place: why for look in looks for place, why in look.unobserved.items()}
    if name in ONLY_SAID:
        assert lines
    else:
        assert violations
    for finding in violations:
        assert_true_of(PROGRAMS[name], finding)


def assert_true_of(program: Program, finding: Finding) -> None:
    """What it says was declared was declared, what it says was observed differs, and what never changed is not called changed."""
    place, _, word = str(finding.declared).partition(": ")
    section, _, role = place.partition(".")
    assert section != "precision" or word == getattr(PRESETS[program.preset].but(**program.precision), role)
    assert word != finding.observed
    unchanged = program.prepare is Program.prepare and program.before_step is Program.before_step
    assert not (unchanged and "after the precision was put on" in str(finding.cause))


@pytest.mark.parametrize("preset", ["bf16-mixed", "fp32"])
@pytest.mark.parametrize("name", ["full", "tensor", "assigned", "linspace", "KeptInAnAttribute", "ScaledNorm", "InAFunction"])
def test_a_rounded_number_is_reported_once_with_module_and_line(name, preset):
    (violation,) = [finding for look in observed(PROGRAMS[f"{name}_in_{preset}"]) for finding in look.violations]
    assert violation.code == "DT003"
    assert {"ScaledNorm": "layers.1.norm1", "InAFunction": "backward"}.get(name, "layers.1.mlp") in violation.message
    assert violation.place.file == made_narrow.__file__
    assert violation.place.line
