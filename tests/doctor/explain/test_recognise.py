# ruff: noqa: E501  a table of real texts
"""One mistake has many texts: CPU and CUDA, old and new, each gives the same family and dtypes."""

from __future__ import annotations

import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isotype.doctor.explain import explain
from isotype.doctor.explain.recognise import FORMS, _hinted, dtype_word, recognise
from isotype.doctor.explain.situation import Situation

TEXTS = [
    ("EX008", "gather(): Expected dtype int32/int64 for index", ""),
    ("EX008", "index_select(): Expected dtype int32 or int64 for index", ""),
    ("EX008", "index_add_(): Expected dtype int32/int64 for index but got: BFloat16", "bf16"),
    ("EX008", "torch.take_along_dim(): dtype of indices should be Long but got BFloat16", "bf16"),
    ("EX008", "IndexError: tensors used as indices must be long, int, byte or bool tensors", ""),
    ("EX008", "one_hot is only applicable to index tensor of type LongTensor.", ""),
    ("EX008", "expected target dtype to be Long or Byte, but got Char", "int8"),
    ("EX008", "Expected floating point type for target with class probabilities, got Long", "int64"),
    ("EX017", "TypeError: zeros(): argument 'dtype' must be torch.dtype, not str", ""),
    ("EX017", "TypeError: set_autocast_dtype(): argument 'dtype' (position 2) must be torch.dtype, not str", ""),
    ("EX017", "RuntimeError: Invalid device string: 'bfloat16'", ""),
    ("EX026", "linalg.inv: Low precision dtypes not supported. Got BFloat16", "bf16"),
    ("EX026", "Expected both inputs to be Half, Float or Double tensors but got BFloat16 and BFloat16", "bf16"),
    ("EX029", "This function doesn't handle types other than float and double", ""),
    ("EX034", "AssertionError: The values for attribute 'dtype' do not match: torch.bfloat16 != torch.float32.", "bf16 fp32"),
    ("EX034", "RuntimeError: Float did not match BFloat16", "fp32 bf16"),
    (
        "EX034",
        "linalg.solve: Expected A and B to have the same dtype, but found A of type Float and B of type BFloat16 instead",
        "fp32 bf16",
    ),
    ("EX034", "All tensors must have the same dtype, got input1: float, input2: c10::BFloat16, weight: float", "fp32 bf16"),
    ("EX034", "prelu: Type promoting not supported. Got BFloat16 and Float", "bf16 fp32"),
    ("EX034", "Expected both inputs to be Half, Float or Double tensors but got Float and BFloat16", "fp32 bf16"),
    ("EX034", "both inputs should have same dtype", ""),
    ("EX034", "Could not set tensor of type c10::BFloat16 to a tensor of type float", "bf16 fp32"),
    ("EX035", "TypeError: Object of type dtype is not JSON serializable", ""),
    ("EX035", "yaml.representer.RepresenterError: ('cannot represent an object', torch.bfloat16)", ""),
    ("EX035", "TypeError: Cannot handle this data type: (1, 1, 3), <f2", ""),
    ("EX035", "TypeError: array type float16 is unsupported in linalg", "fp16"),
    (
        "EX035",
        "TypeError: can't convert np.ndarray of type ml_dtypes.bfloat16. The only supported types are: float64, float32, float16.",
        "bf16",
    ),
    ("EX035", "pyarrow.lib.ArrowNotImplementedError: Function 'add' has no kernel matching input types (halffloat, halffloat)", "fp16"),
    ("EX036", "RuntimeError: Invalid scalar type", ""),
    ("EX036", "Input tensor data type is not supported for NCCL process group: Float8_e5m2", "fp8_e5m2"),
    ("EX001", "RuntimeError: expected mat1 and mat2 to have the same dtype, but got: float != c10::BFloat16", "fp32 bf16"),
    ("EX001", "RuntimeError: expected m1 and m2 to have the same dtype, but got: c10::Half != float", "fp16 fp32"),
    ("EX001", "RuntimeError: expected m1 and m2 to have the same dtype, but got: float != struct c10::BFloat16", "fp32 bf16"),
    ("EX001", "mat1 and mat2 must have the same dtype, but got BFloat16 and Float", "bf16 fp32"),
    ("EX001", "mat1 and mat2 must have the same dtype, but got Half and BFloat16", "fp16 bf16"),
    ("EX001", "self and mat2 must have the same dtype, but got Float and BFloat16", "fp32 bf16"),
    ("EX001", "Input dtypes must be the same, got: input float, batch1: c10::BFloat16, batch2: c10::BFloat16", "fp32 bf16 bf16"),
    ("EX001", "addmv input tensors must have the same dtype, but got BFloat16, Float, and BFloat16", "bf16 fp32 bf16"),
    ("EX001", "dot : expected both vectors to have same dtype, but found Float and Half", "fp32 fp16"),
    ("EX001", "expected scalar type Half but found Float", "fp16 fp32"),
    ("EX002", "Expected out tensor to have dtype float, but got c10::BFloat16 instead", "fp32 bf16"),
    ("EX002", "result type Float can't be cast to the desired out= type Long", "fp32 int64"),
    ("EX003", "Input type (c10::Half) and bias type (float) should be the same", "fp16 fp32"),
    ("EX003", "Input type (torch.cuda.HalfTensor) and weight type (torch.cuda.FloatTensor) should be the same", "fp16 fp32"),
    ("EX003", "Input type (struct c10::BFloat16) and bias type (struct c10::Half) should be the same", "bf16 fp16"),
    (
        "EX003",
        "Expected tensor for argument #1 'grad_output' to have the same type as tensor for argument #2 'weight'; but type CUDABFloat16Type does not equal torch.cuda.HalfTensor (while checking arguments for cudnn_convolution_backward_input)",
        "bf16 fp16",
    ),
    (
        "EX003",
        "RNN input dtype (torch.bfloat16) does not match weight dtype (torch.float32). Convert input: input.to(torch.float32)",
        "bf16 fp32",
    ),
    ("EX003", "input must have the type torch.float32, got type torch.float16", "fp32 fp16"),
    ("EX004", "mixed dtype (CPU): expect parameter to have scalar type of Float", "fp32"),
    (
        "EX004",
        "UserWarning: Mismatch dtype between input and weight: input dtype = c10::Half, weight dtype = float, Cannot dispatch to fused implementation. (Triggered internally)",
        "fp16 fp32",
    ),
    (
        "EX005",
        "Expected query, key, and value to have the same dtype, but got query.dtype: struct c10::Half key.dtype: float and value.dtype: float instead.",
        "fp16 fp32 fp32",
    ),
    (
        "EX005",
        "ValueError: Query/Key/Value should either all have the same dtype, or (in the quantized case) Key/Value should have dtype torch.int32\n  query.dtype: torch.float32\n  key.dtype  : torch.float32\n  value.dtype: torch.float16",
        None,
    ),
    (
        "EX005",
        "Expected attn_mask dtype to be bool or float or to match query dtype, but got attn_mask.dtype: long int and  query.dtype: c10::BFloat16 instead.",
        "int64 bf16",
    ),
    ("EX005", "invalid dtype for bias - should match query's dtype", ""),
    ("EX006", "RuntimeError: FlashAttention only support fp16 and bf16 data type", ""),
    ("EX006", "FlashAttention only supports fp16, and bf16, and fp8_e4m3 data type", ""),
    (
        "EX007",
        "Index put requires the source and destination dtypes match, got Half for the destination and Float for the source.",
        "fp16 fp32",
    ),
    ("EX007", "scatter(): Expected self.dtype to be equal to src.dtype", ""),
    ("EX007", "index_add_(): self (Float) and source (BFloat16) must have the same scalar type", "fp32 bf16"),
    ("EX007", "index_add(): self (Float) and source (Half) must have the same dtype", "fp32 fp16"),
    ("EX007", "index_copy_(): self and source expected to have the same dtype, but got (self) BFloat16 and (source) Float", "bf16 fp32"),
    ("EX007", "masked_scatter: expected self and source to have same dtypes but gotHalf and Float", "fp16 fp32"),
    (
        "EX008",
        "Expected tensor for argument #1 'indices' to have one of the following scalar types: Long, Int; but got torch.cuda.BFloat16Tensor instead (while checking arguments for embedding)",
        "bf16",
    ),
    ("EX008", "expected scalar type Long but found Float", "int64 fp32"),
    ("EX010", "expected dtype c10::BFloat16 for `end` but got dtype float", "bf16 fp32"),
    ("EX010", "expected dtype float for `weight` but got dtype c10::Half", "fp32 fp16"),
    ("EX010", "AssertionError: params, grads, exp_avgs, and exp_avg_sqs must have same dtype, device, and layout", ""),
    (
        "EX011",
        "attempting to assign a gradient with dtype 'float' to a tensor with grad_dtype 'BFloat16'. The gradient must match",
        "fp32 bf16",
    ),
    ("EX011", "Found dtype Float but expected Half", "fp32 fp16"),
    ("EX011", "RuntimeError: Expected BFloat16, got Float", "bf16 fp32"),
    ("EX012", "ValueError: Attempting to unscale FP16 gradients.", ""),
    ("EX013", "RuntimeError: \"_amp_foreach_non_finite_check_and_unscale_cuda\" not implemented for 'BFloat16'", "bf16"),
    ("EX014", "ValueError: Must flatten tensors with uniform dtype but got torch.uint8 and torch.float32", "uint8 fp32"),
    ("EX014", "ValueError: FlatParameter requires uniform dtype but got torch.float16 and torch.float32", "fp16 fp32"),
    ("EX014", "AssertionError: FSDP expects uniform reduce dtype but got {torch.bfloat16, torch.float32}", None),
    ("EX014", "RuntimeError: output tensor must have the same type as input tensor", ""),
    ("EX014", "ValueError: Invalid usage of tensors with different dtypesFound torch.float32 and  torch.bfloat16", "fp32 bf16"),
    (
        "EX015",
        "Recomputed values for the following tensors have different metadata than during the forward pass.\ntensor at position 5:\nsaved metadata: {'shape': torch.Size([4, 4]), 'dtype': torch.float16, 'device': device(type='cuda', index=0)}\nrecomputed metadata: {'shape': torch.Size([4, 4]), 'dtype': torch.float32, 'device': device(type='cuda', index=0)}",
        "fp16 fp32",
    ),
    ("EX016", "NotImplementedError: Model data type and gradient accumulation data type must be equal to use ZeRO", ""),
    ("EX016", "- ds bf16.enabled=True vs hf bf16|bf16_full_eval=False", ""),
    ("EX016", "ValueError: `--mixed_precision` arg cannot be set to `bf16` when `fp16` is set in the DeepSpeed config file.", ""),
    ("EX017", "ValueError: At most one of fp16 and bf16 can be True, but not both", ""),
    ("EX017", "bfloat16 and fp16 modes cannot be simultaneously enabled", ""),
    ("EX017", "ValueError: You cannot use the Prodigy optimizer with fp32 gradients.", ""),
    ("EX017", "ValueError: Unknown mixed_precision mode: fp32. Choose between ['no', 'fp8', 'fp16', 'bf16']", ""),
    ("EX017", "AttributeError: module 'torch' has no attribute 'torch.bfloat16'", ""),
    (
        "EX017",
        "TypeError: Unsloth: Model is in float16 precision but you want to use bfloat16 precision. Set fp16 to `True` and bf16 to `False`",
        "fp16 bf16",
    ),
    ("EX018", "ValueError: Your setup doesn't support bf16/gpu. You need torch>=1.10, using Ampere GPU with cuda>=11.0", ""),
    (
        "EX018",
        "ValueError: Bfloat16 is only supported on GPUs with compute capability of at least 8.0. Your Tesla T4 GPU has compute capability 7.5.",
        "",
    ),
    ("EX019", "RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn", ""),
    (
        "EX020",
        "AssertionError('initial value for `acc` is of type bf16[constexpr[64]], but the else block redefines it as fp32[constexpr[64]]')",
        "bf16 fp32",
    ),
    ("EX020", "Mismatched type for y between then block (<['64'], fp32>) and else block (<['64'], bf16>)", "fp32 bf16"),
    ("EX020", "initial value for `x` is of type <[65536], bf16>, but the then block redefines it as <[65536], fp32>", "bf16 fp32"),
    (
        "EX021",
        "Loop-carried variable m has initial type fp32 but is re-assigned to fp64 in loop! Please make sure that the type stays consistent.",
        "fp32 fp64",
    ),
    ("EX022", "AssertionError('Both operands must be same dtype. Got fp32 and fp16')", "fp32 fp16"),
    ("EX022", "AssertionError: First input (fp16) and second input (fp32) must have the same dtype!", "fp16 fp32"),
    ("EX023", "ValueError(\"Expected dtype ['fp32', 'fp64'] but got bf16\")", "bf16"),
    ("EX024", "AssertionError('Block element type(bf16) and value element type(fp32) mismatch')", "bf16 fp32"),
    ("EX024", "ValueError(\"type fp8e4nv not supported in this architecture. The supported fp8 dtypes are ('fp8e4b15', 'fp8e5')\")", None),
    ("EX025", "ValueError: Blockwise quantization only supports 16/32-bit floats, but got torch.uint8", "uint8"),
    ("EX025", "Gradient+optimizer bit data type combination not supported: grad torch.bfloat16, optimizer torch.uint8", "bf16 uint8"),
    ("EX026", "RuntimeError: \"addmm_impl_cpu_\" not implemented for 'Half'", "fp16"),
    ("EX026", "RuntimeError: \"linalg_qr_cuda\" not implemented for 'BFloat16'", "bf16"),
    ("EX026", "TypeError: Got unsupported ScalarType BFloat16", "bf16"),
    ("EX027", "RuntimeError: value cannot be converted to type at::Half without overflow", "fp16"),
    ("EX028", "RuntimeError: Unexpected floating ScalarType in at::autocast::prioritize", ""),
    ("EX001", "RuntimeError: self and mat2 must have the same dtype", ""),
    ("EX014", "ValueError: Cannot flatten integer dtype tensors", ""),
    ("EX016", "AssertionError: bfloat16 is not enabled but one or several model parameters have dtype of bfloat16", ""),
    ("EX017", "TypeError: LlamaForCausalLM.__init__() got an unexpected keyword argument 'dtype'", ""),
    (
        "EX018",
        "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx( handle, opa, a, CUDA_R_16BF, lda, b)`",
        "",
    ),
    (
        "EX026",
        "RuntimeError: Promotion for Float8 Types is not supported, attempted to promote BFloat16 and Float8_e4m3fn",
        "bf16 fp8_e4m3",
    ),
    ("EX030", "ValueError: bfloat16 weights are unsupported by the foo backend", "bf16"),
    ("EX031", "FloatingPointError: Minimum loss scale reached (0.0001).", ""),
    ("EX032", "RuntimeError: Function 'LogSoftmaxBackward0' returned nan values in its 0th output.", ""),
    ("EX030", "AssertionError: my_op: x is torch.bfloat16, w must match but is torch.float32", "bf16 fp32"),
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


@pytest.mark.parametrize(("code", "text", "dtypes"), TEXTS)
def test_recognised(code: str, text: str, dtypes: str | None):
    finding = explain(text.splitlines())[0]
    assert finding.code == code, finding.message
    assert finding.cause
    assert finding.fix
    seen = recognise(text, Situation())
    assert seen is not None
    if dtypes is not None:
        assert list(seen.dtypes.values()) == dtypes.split()


@pytest.mark.parametrize("text", NOT_DTYPE)
def test_not_a_dtype_error(text: str):
    (finding,) = explain(text.splitlines())
    assert finding.code == "EX000"
    assert str(finding.severity) == "note"


@pytest.mark.parametrize(
    ("word", "canonical"),
    [
        ("struct c10::BFloat16", "bf16"),
        ("torch.cuda.HalfTensor", "fp16"),
        ("CUDABFloat16Type", "bf16"),
        ("<['64'], fp32>", "fp32"),
        ("bf16[constexpr[64]]", "bf16"),
        ("unsigned char", "uint8"),
        ("long int", "int64"),
        ("Float.", "fp32"),
    ],
)
def test_a_dtype_in_any_spelling(word: str, canonical: str):
    assert dtype_word(word) == canonical


@pytest.mark.full
@pytest.mark.parametrize(("operator", "form"), FORMS)
def test_every_form_matches_its_texts(operator: str, form: str):
    """The quick check before the forms lets every text of every form through."""
    texts = st.from_regex(re.compile(re.sub(r"(?<!\?P)<(\w+)>", "BFloat16", form), re.ASCII), fullmatch=True)

    @settings(max_examples=10, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(texts)
    def holds(text: str) -> None:
        assert _hinted(text), operator

    holds()


def test_an_assertion_without_words_is_read_from_its_line():
    log = """Traceback (most recent call last):
  File "/env/site-packages/triton/language/semantic.py", line 1609, in dot
    assert acc.type.shape == ret_ty.shape and acc.type.element_ty == out_dtype
AssertionError
"""
    assert explain(log.splitlines())[0].code == "EX022"


def test_a_log_of_nan_losses_is_one_finding_at_its_first():
    lines = ["{'loss': 1.2, 'grad_norm': 0.5}", *["{'loss': 0.0, 'grad_norm': nan, 'learning_rate': 1e-05}"] * 200]
    (finding,) = explain(lines, source="train.log")
    assert (finding.code, finding.place.line) == ("EX032", 2)


def test_what_names_a_dtype_is_not_called_no_dtype_error():
    (finding,) = explain(["RuntimeError: the bfloat16 frobnicator broke"])
    assert finding.code == "EX000"
    assert "not a dtype error" not in finding.message
    assert "bf16" in finding.cause


def test_what_a_refusal_lists_as_taken_is_not_what_it_refuses():
    listed = "The only supported types are: float64, float32, float16, complex64, int64, uint8, and bool."
    assert explain([f"TypeError: can't convert np.ndarray of type numpy.object_. {listed}"])[0].code == "EX000"
    complex_view = "view_as_complex is only supported for half, float and double tensors, but got a tensor of scalar type: Float8_e5m2"
    assert "fp8_e5m2 is refused" in explain([f"RuntimeError: {complex_view}"])[0].message
