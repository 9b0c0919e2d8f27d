"""Norms: what is called an op is one."""

import pytest
import torch
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNorm, Zamba2RMSNormGated

from isotype.optimize.norms import place


@pytest.mark.parametrize(
    "norm", [Zamba2RMSNormGated(16, group_size=16), MambaRMSNormGated(16, group_size=16)], ids=lambda norm: type(norm).__name__
)
def test_a_gated_norm_is_left_alone(norm):
    """Without its gate, which a model always gives, it is an RMSNorm."""
    placed = place("norm", norm, None)
    assert placed.op is None
    assert placed.reason == "its forward takes gate beside its input"
    assert "forward" not in vars(norm)


def test_a_norm_of_one_input_is_placed():
    norm = Zamba2RMSNorm(16)
    assert place("norm", norm, None).op == "rms_norm"
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(norm(x), Zamba2RMSNorm(16)(x))
