"""Meta tensors inside `planned_for` take the planned device's paths and follow an autocast of their own; outside nothing changes."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from isotype.environment import planned
from isotype.ops.backend import autocast_dtype, autocast_off
from isotype.ops.linear_cross_entropy.chunked import result_dtype

META, CPU = torch.device("meta"), torch.device("cpu")


def test_meta_tensors_stand_for_the_planned_device_only_inside():
    assert planned.stands_for(META) == "meta"
    with planned.planned_for("cuda"):
        assert (planned.stands_for(META), planned.stands_for(CPU)) == ("cuda", "cpu")
        assert result_dtype(torch.bfloat16, META) == torch.float32
        assert result_dtype(torch.bfloat16, CPU) == torch.bfloat16
    assert planned.stands_for(META) == "meta"


def test_products_follow_the_planned_autocast():
    x, w = torch.empty(3, 4, device=META), torch.empty(5, 4, device=META)
    with planned.planned_for("cuda"), planned.autocast("cuda", torch.bfloat16):
        assert autocast_dtype(x) == torch.bfloat16
        assert F.linear(x, w).dtype == (x @ w.t()).dtype == torch.bfloat16
        assert (x + x).dtype == torch.float32
        assert F.linear(x.double(), w.double()).dtype == torch.float64
        assert F.linear(torch.zeros(3, 4), torch.zeros(5, 4)).dtype == torch.float32  # a real tensor of the CPU
        with autocast_off(x):
            assert autocast_dtype(x) is None
            assert F.linear(x, w).dtype == torch.float32
        assert autocast_dtype(x) == torch.bfloat16
    assert autocast_dtype(x) is None
    assert F.linear(x, w).dtype == torch.float32
