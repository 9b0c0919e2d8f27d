# ruff: noqa: E501  a table of real texts
"""One mistake has many texts: CPU and CUDA, old and new, each gives the same family and dtypes."""

from __future__ import annotations

from pathlib import Path

import pytest

from isotype.doctor.explain import explain

_TABLE = Path(__file__).with_name("texts.tsv").read_text(encoding="utf-8")
TEXTS = [line.split("\t") for line in _TABLE.splitlines() if not line.startswith("#")]

NOT_DTYPE = [
    "mat1 and mat2 shapes cannot be multiplied (8x512 and 1024x32)",
    "self and mat2 must have the same number of tensors",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.64 GiB",
    "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
    "RuntimeError: Input type (torch.cuda.FloatTensor) and weight type (torch.FloatTensor) should be the same",
    "The size of tensor a (4) must match the size of tensor b (5) at non-singleton dimension 1",
    "CUDA error: device-side assert triggered",
    "NameError: name 'bf16' is not defined",
    "KeyError: 'lm_head.weight'",
    "FlashAttention only supports Ampere GPUs or newer.",
    "RuntimeError: output tensor size must be equal to world_size times input tensor size",
    "Must flatten tensors with uniform requires_grad when use_orig_params=False",
    "AssertionError('Loop-carried variable acc has initial type fp32[constexpr[64]] but is re-assigned to fp32[constexpr[128]] in loop!')",
    "Recomputed values for the following tensors have different metadata than during the forward pass.\ntensor at position 46:\nsaved metadata: {'shape': torch.Size([965, 5120]), 'dtype': torch.bfloat16, 'device': device(type='xpu', index=3)}\nrecomputed metadata: {'shape': torch.Size([964, 5120]), 'dtype': torch.bfloat16, 'device': device(type='xpu', index=3)}",
    "Loading model in torch.bfloat16; optimizer state in torch.float32",
    "{'loss': 1.2, 'grad_norm': 0.5, 'learning_rate': 2e-05, 'epoch': 0.1}",
    "ValueError: invalid literal for int() with base 10: 'bf16'",
    "KeyError: 'bf16'",
    "FileNotFoundError: [Errno 2] No such file or directory: 'model-bf16.safetensors'",
    "ImportError: cannot import name 'float8_linear' from 'torchao.float8'",
    "error: unrecognized arguments: --bf16",
    "ValueError: Expected input batch_size (4) to match target batch_size (5).",
]


@pytest.mark.parametrize(("code", "dtypes", "text"), TEXTS)
def test_recognised(code: str, dtypes: str, text: str):
    finding = explain(text.replace("\\n", "\n").splitlines())[0]
    assert finding.code == code, finding.message
    assert finding.cause
    assert finding.fix
    if dtypes != "?":
        told = dict(finding.details).get("dtypes", "")
        assert [part.split()[-1] for part in told.split(", ") if part] == dtypes.split()


@pytest.mark.parametrize("text", NOT_DTYPE)
def test_not_a_dtype_error(text: str):
    (finding,) = explain(text.splitlines())
    assert finding.code == "EX000"
    assert str(finding.severity) == "note"


def test_a_log_of_nan_losses_is_one_finding_at_its_first():
    lines = ["{'loss': 1.2, 'grad_norm': 0.5}", *["{'loss': 0.0, 'grad_norm': nan, 'learning_rate': 1e-05}"] * 200]
    (finding,) = explain(lines, source="train.log")
    assert (finding.code, finding.place.line) == ("EX032", 2)


def test_what_names_a_dtype_is_not_called_no_dtype_error():
    (finding,) = explain(["RuntimeError: the bfloat16 frobnicator broke"])
    assert finding.code == "EX000"
    assert "not a dtype error" not in finding.message
    assert "bf16" in finding.cause
