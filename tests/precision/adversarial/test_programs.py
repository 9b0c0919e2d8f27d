"""Every program that breaks its declaration ends in a violation, or in a line that says what cannot be seen."""

import pytest

from . import arithmetic, coarse, gradients, set_aside, storage, time_and_regions
from .program import PROGRAMS
from .run import observed

assert all((arithmetic, coarse, gradients, set_aside, storage, time_and_regions))
# what happens there happens outside PyTorch's operators, or in the values of a table: a line is all that can be said
ONLY_SAID = {
    "ThroughNumpy", "WrittenByNumpy", "hook_through_numpy", "compiled_module", "CompiledMLP", "OutOfSight", "CustomOp", "FilledElsewhere",
    "BetweenThreads", "gradients_through_a_list", "ByTable", "ByBins", "ByNearest", "ByRemainder", "ByFmod",
    "SiluFromATable", "SiluFromBuckets", "SiluFromTheNearest", "custom_backward_of_two_values", *(made.__name__ for made in coarse.COARSE),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_broken_declaration_is_reported(name):
    looks = observed(PROGRAMS[name])
    violations = [finding.message for look in looks for finding in look.violations]
    lines = {place: why for look in looks for place, why in look.unobserved.items()}
    if name in ONLY_SAID:
        assert lines
    else:
        assert violations
