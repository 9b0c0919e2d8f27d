"""Without C++ kernels, norms, rotary functions and gated MLPs are no faster than the model's own: they stay, and the manifest says why."""

import types

import pytest
import torch

from isotype.ops import cpp
from isotype.ops.attention import cpu as attention
from isotype.ops.gated import op as gated
from isotype.ops.rms_norm import op as norm
from isotype.ops.rope import op as rope
from isotype.optimize import optimize
from tests.models import tiny


def test_row_ops_are_not_placed_without_kernels_and_the_reason_is_noted(monkeypatch):
    monkeypatch.setattr(cpp, "cpu_compiler", lambda: None)
    monkeypatch.setattr(cpp, "_fallbacks", {})
    for op in (gated, norm, rope, attention):
        monkeypatch.setattr(op.KERNELS, "library", None)
    manifest = optimize(tiny("llama"))
    assert {entry.op for entry in manifest.entries if entry.op} == {"generate", "linear_cross_entropy"}
    assert any(note.startswith("no C++ compiler (g++ or clang++) was found: norms, rotary") for note in manifest.notes)


@pytest.mark.parametrize("kept", ["on the GPU", "in host memory"])
def test_a_triton_that_cannot_run_is_a_line_of_the_manifest(kept, monkeypatch):
    """Also where the weights come to the GPU later: blocks in host memory, a model that processes share."""
    from isotype.optimize import place

    model = tiny("llama")
    monkeypatch.setattr(place, "why_no_kernels", lambda device: "Triton cannot run a kernel: RuntimeError: no compiler")
    if kept == "on the GPU":
        on_cuda = [types.SimpleNamespace(is_cuda=True, device=torch.device("cuda:0"))]
        monkeypatch.setattr(model, "parameters", lambda *a, **k: iter(on_cuda))
    else:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr("isotype.optimize.attention.back_ends", lambda module: "")
    notes = optimize(model, device_type="cuda").notes
    assert any(note.startswith("cuda:0: Triton cannot run a kernel: RuntimeError: no compiler: norms, rotary") for note in notes), notes
