"""`--skip` wants a known code and a reason."""

from __future__ import annotations

import pytest

from isotype.errors import UsageError
from isotype.training.preflight.codes import parse_skips


def test_a_reason_may_stand_with_its_code_or_apart():
    assert parse_skips(["PF004=shared disk", "pf011"], "measured before") == {"PF004": "shared disk", "PF011": "measured before"}
    assert parse_skips(["PF004=a=b"]) == {"PF004": "a=b"}
    assert parse_skips([]) == {}


@pytest.mark.parametrize(
    ("given", "why", "said"),
    [
        (["PF004"], None, "a reason is needed"),
        (["PF004="], "x", "a reason is needed"),
        (["PF004"], "  ", "a reason is needed"),
        (["PF04=x"], None, "did you mean PF0"),
        (["nonsense=x"], None, "one of: PF001"),
        (["PF004=x", "PF004=y"], None, "given twice"),
        (["PF004=x"], "y", "--why has no effect"),
        (["PF008=x"], None, "cannot be skipped"),
    ],
)
def test_anything_else_is_a_usage_error(given, why, said):
    with pytest.raises(UsageError, match=said):
        parse_skips(given, why)
