# ruff: noqa: E501  a table of real texts
"""One mistake has many texts: CPU and CUDA, old and new, and as users reported them; each gives its
family, dtypes, a cause and a fix.
"""

from __future__ import annotations

from pathlib import Path

from isotype.doctor.explain import explain
from isotype.finding import Severity


def table(name: str, columns: int) -> list[list[str]]:
    lines = Path(__file__).with_name(name).read_text(encoding="utf-8").splitlines()
    return [
        line.replace("\\n", "\n").split("\t", columns - 1)
        for line in lines
        if not line.startswith("#")
    ]


NOT_DTYPE = [
    "mat1 and mat2 shapes cannot be multiplied (8x512 and 1024x32)",
    "self and mat2 must have the same number of tensors",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.64 GiB",
    "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
    "RuntimeError: Input type (torch.cuda.FloatTensor) and weight type (torch.FloatTensor) should be the same",
    "The size of tensor a (4) must match the size of tensor b (5) at non-singleton dimension 1",
    "CUDA error: device-side assert triggered",
    "NameError: name 'bf16' is not defined",
    "RuntimeError: CUDA error: HIPBLAS_STATUS_NOT_SUPPORTED when calling `hipblasGemmEx(handle)`",
    "AssertionError: found 0 shards in models/bf16/f16",
    "epoch 3 train loss: 0.31 val loss: 0.29 grad norm: 1.2",
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
]


def test_every_text_of_a_mistake_is_known(subtests):
    for code, dtypes, text in table("texts.tsv", 3):
        with subtests.test(text):
            finding = explain(text.splitlines())[0]
            assert finding.code == code, finding.message
            assert finding.cause
            assert finding.fix
            told = dict(finding.details).get("dtypes", "")
            assert dtypes in ("?", " ".join(part.split()[-1] for part in told.split(", ") if part))


def test_every_reported_error_is_known(subtests):
    for code, _, source, text in table("field_errors.tsv", 4):
        with subtests.test(f"{source}: {text}"):
            finding = explain(text.splitlines())[0]
            assert finding.code == code, finding.message
            assert finding.severity >= Severity.WARNING
            assert finding.cause
            assert finding.fix


def test_texts_that_are_no_dtype_errors_are_not_explained(subtests):
    for text in NOT_DTYPE:
        with subtests.test(text):
            (finding,) = explain(text.splitlines())
            assert (finding.code, finding.severity) == ("EX000", Severity.NOTE)


def test_a_log_of_nan_losses_is_one_finding_at_its_first():
    lines = [
        "{'loss': 1.2, 'grad_norm': 0.5}",
        *["{'loss': 0.0, 'grad_norm': nan, 'learning_rate': 1e-05}"] * 200,
    ]
    (finding,) = explain(lines, source="train.log")
    assert (finding.code, finding.place.line) == ("EX032", 2)


def test_what_names_a_dtype_is_not_called_no_dtype_error():
    (finding,) = explain(["RuntimeError: the bfloat16 frobnicator broke"])
    assert finding.code == "EX000"
    assert "not a dtype error" not in finding.message
    assert "bf16" in finding.cause
