"""Dtype errors as users reported them: each has its code, a cause and a fix; the table says what was known before."""

from __future__ import annotations

from pathlib import Path

import pytest

from isotype.doctor.explain import explain
from isotype.finding import Severity

_TABLE = Path(__file__).with_name("field_errors.tsv")
ERRORS = [line.split("\t", 3) for line in _TABLE.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]


@pytest.mark.parametrize(("code", "first_look", "source", "text"), ERRORS, ids=[f"{row[2]}-{n}" for n, row in enumerate(ERRORS)])
def test_a_reported_error_is_known(code: str, first_look: str, source: str, text: str):
    finding = explain(text.replace("\\n", "\n").splitlines())[0]
    assert finding.code == code, finding.message
    assert finding.severity >= Severity.WARNING
    assert finding.cause
    assert finding.fix
    assert first_look in ("known", "vague", "wrong", "missed")


@pytest.mark.parametrize(
    "text",
    [
        "NotImplementedError: No operator found for `memory_efficient_attention_forward` with inputs:\n"
        "     query       : shape=(32, 4096, 1, 72) (torch.float32)\n     key         : shape=(32, 300, 1, 72) (torch.float32)\n"
        "`cutlassF` is not supported because:\n    xFormers wasn't build with CUDA support\n"
        "`flshattF` is not supported because:\n    dtype=torch.float32 (supported: {torch.bfloat16, torch.float16})",
        "[2026-01-01 10:00:00,000] [INFO] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, reducing to 32768",
        "ValueError: Precision and recall are invalid for an empty set",
        "error: argument --lr_scheduler: invalid choice: 'cosin' (choose from 'cosine', 'linear')",
        "UserWarning: Grad strides do not match bucket view strides. This may indicate grad was not created according to the gradient "
        "layout contract, or that the param's strides changed since DDP was constructed.",
        "RuntimeError: aten._foreach_mul_.Scalar: got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to DTensor",
        "NotImplementedError: No operator found for `memory_efficient_attention_forward` with inputs:\n"
        "     query       : shape=(4, 512, 32, 100) (torch.bfloat16)\n     key         : shape=(4, 512, 32, 100) (torch.bfloat16)\n"
        "`flshattF` is not supported because:\n    query.shape[-1] % 8 != 0\n"
        "`smallkF` is not supported because:\n    dtype=torch.bfloat16 (supported: {torch.float32})\n    unsupported embed per head: 100",
        "RuntimeError: Detected at least one parameter gradient is not the expected DDP bucket view with gradient_as_bucket_view=True.",
        "NotImplementedError: Cannot copy out of meta tensor; no data!",
        "  File \"train.py\", line 88, in step\n    with torch.autocast('cuda', dtype=torch.bfloat16):\n"
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.16 GiB.",
        "safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge",
        "RuntimeError: CUDA error: no kernel image is available for execution on the device",
        "FileNotFoundError: cannot open /models/flux-bf16/model-fp16.safetensors: not supported here",
        "We recommend bf16 rather than fp16 where the hardware supports it; float32 must be used for the optimizer states.",
        "INFO loss=1.234 grad_norm=inf is clipped to 1.0, infinity norm used",
        'RuntimeError: Error(s) in loading state_dict for FluxTransformer2DModel:\n\tUnexpected key in state_dict: "norm1.weight._data".',
        "RuntimeError: Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the moment.",
    ],
)
def test_texts_that_resemble_dtype_errors_are_not_explained(text: str):
    (finding,) = explain(text.splitlines())
    assert finding.code == "EX000", finding.message
