"""Which origin decided a dtype, and the fix that follows it."""

from __future__ import annotations

import torch

from isotype.doctor.trace.operands import Operand, fix_of
from isotype.doctor.trace.origin import Origin
from isotype.observe.origin import Site


def round_trip(up, down, x):
    wide = up(x).float()
    back = wide.to(x.dtype)
    return down(back.to(wide.dtype))


def origins():
    """Of a value that leaves bf16, is cast back, and then follows the wide tensor: the first departure, and the last cast."""
    first_line = round_trip.__code__.co_firstlineno
    left, back, last = (Site(round_trip.__code__, first_line + n) for n in (1, 2, 3))
    departure = Origin(torch.float32, "cast", ".float()", site=left, via=Origin(torch.bfloat16, "parameter", "up.bias"))
    returned = Origin(torch.bfloat16, "cast", ".to()", site=back, via=departure)
    return departure, Origin(torch.float32, "cast", ".to()", site=last, via=returned)


def test_the_first_departure_of_a_round_trip_decided():
    departure, last = origins()
    assert last.follows
    assert last.decider() is departure


def test_the_fix_names_the_place_of_the_first_departure():
    departure, last = origins()
    weight = Operand("mat2", torch.bfloat16, (8, 8), Origin(torch.bfloat16, "parameter", "down.weight"))
    fix = fix_of(
        Operand("mat1", torch.float32, (2, 8), last),
        [weight],
        "addmm",
        autocast_on=False,
        autocast_before=False,
        device="cpu",
        generate=False,
    )
    assert f"drop the cast at {departure.site}" in fix
