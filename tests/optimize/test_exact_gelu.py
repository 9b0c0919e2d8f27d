"""A gated MLP with the exact gelu and one with the tanh gelu each get their own op."""

from isotype.optimize import optimize
from tests.models import tiny


def test_each_gelu_gets_its_op():
    for activation, op in (("gelu", "gelu_mul exact"), ("gelu_pytorch_tanh", "gelu_mul tanh")):
        manifest = optimize(tiny("gemma2", hidden_activation=activation, hidden_act=activation))
        assert [entry.op for entry in manifest.entries if entry.part == "gated mlp"] == [op, op]
