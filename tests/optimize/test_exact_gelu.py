"""A gated MLP with the exact gelu is left to the model on a CPU, where the op would be slower, and the manifest says so."""

from isotype.optimize import optimize
from tests.models import tiny


def test_is_left_alone_on_a_cpu_and_said():
    manifest = optimize(tiny("gemma2", hidden_activation="gelu", hidden_act="gelu"))
    mlps = [entry for entry in manifest.entries if entry.part == "gated mlp"]
    assert len(mlps) == 2
    assert all(entry.op is None and "faster" in entry.why for entry in mlps)
    assert all(entry.op == "gelu_mul tanh" for entry in optimize(tiny("gemma2")).entries if entry.part == "gated mlp")
