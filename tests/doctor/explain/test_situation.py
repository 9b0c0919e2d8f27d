# ruff: noqa: E501  real texts
"""The same text has another first cause in another situation, and the evidence is named."""

from __future__ import annotations

from isotype.doctor.explain import explain

MIXED = "RuntimeError: mat1 and mat2 must have the same dtype, but got Float and BFloat16"
LIB = "/env/lib/python3.11/site-packages"


def traceback(*frames: tuple[str, int, str, str], error: str = MIXED) -> list[str]:
    lines = ["Traceback (most recent call last):"]
    for file, line, function, code in frames:
        lines += [f'  File "{file}", line {line}, in {function}', f"    {code}"]
    return [*lines, error]


LINEAR = (
    f"{LIB}/torch/nn/modules/linear.py",
    125,
    "forward",
    "return F.linear(input, self.weight, self.bias)",
)


TRACEBACKS = [
        ([("/home/me/chat.py", 9, "main", "out = model.generate(**inputs)"), LINEAR], "generate outside autocast"),
        ([("/home/me/t.py", 9, "run", "trainer.evaluate()"), (f"{LIB}/transformers/trainer.py", 1, "evaluation_loop", "x"), LINEAR], "evaluation"),
        ([(f"{LIB}/torch/autograd/function.py", 307, "apply", "return user_fn(self, *args)"), ("/home/me/op.py", 30, "backward", "dW = x.t() @ dy")], "custom backward"),
        ([("/home/me/t.py", 5, "step", "loss.backward()"), (f"{LIB}/torch/_tensor.py", 1, "backward", "torch.autograd.backward(")], "backward"),
        ([("/home/me/m.py", 5, "forward", "logits = self.lm_head(hidden)"), LINEAR], "head"),
        ([("/home/me/m.py", 5, "forward", "y = self.fc(x)"), LINEAR], "activation promoted"),
]  # fmt: skip


def test_the_first_cause_follows_the_traceback(subtests):
    for frames, cause in TRACEBACKS:
        with subtests.test(cause):
            (finding,) = explain(traceback(*frames))
            assert cause in (finding.cause or "").partition(":")[0]
            user = next(f for f in reversed(frames) if "site-packages" not in f[0])
            assert (finding.place.file, finding.place.line) == (user[0], user[1])


def test_a_region_that_is_on_is_no_remedy():
    """decorate_autocast stands in the traceback: generation runs under autocast already."""
    frames = [
        ("/home/me/t.py", 3, "main", "model.generate(x)"),
        (f"{LIB}/torch/amp/autocast_mode.py", 44, "decorate_autocast", "return func("),
    ]
    for around, switched_on in ((frames[:1], True), (frames, False)):
        (finding,) = explain(
            traceback(
                *around,
                (f"{LIB}/torch/nn/functional.py", 9, "linear", "linear("),
                error=f"RuntimeError: {MIXED}",
            )
        )
        assert finding.fix.splitlines()[0].count("torch.autocast(") == switched_on


def test_the_odd_one_of_query_key_value():
    for q, k, v, cause in (
        ("float", "float", "c10::BFloat16", "rotary"),
        ("float", "c10::BFloat16", "c10::BFloat16", "KV cache"),
        ("c10::Half", "float", "c10::Half", "key"),
    ):
        text = f"Expected query, key, and value to have the same dtype, but got query.dtype: {q} key.dtype: {k} and value.dtype: {v} instead."
        (finding,) = explain([text])
        assert cause in (finding.cause or "")


SAID = [
        ("RuntimeError: expected scalar type Float but found BFloat16\ntorch.matmul(attn, v) under FSDP", "EX001", "operands of two dtypes", "attn.to(v.dtype)"),
        ("---> 67     return torch.layer_norm(\n     68         input,\n\nRuntimeError: expected scalar type BFloat16 but found Float", "EX004", "norm weight and input", "norm"),
        ("RuntimeError: Expected query, key, and value to have the same dtype,\nbut got query.dtype: c10::BFloat16 key.dtype: float and value.dtype: float instead.", "EX005", "KV cache", "cache"),
        ("RuntimeError: index_add_(): self (Half) and source (Float) must have the same scalar type\nAMP training", "EX007", "autocast made the source fp32", "src.to(dst.dtype)"),
        ("RuntimeError: expected m1 and m2 to have the same dtype, but got: c10::BFloat16 != float\ninference on a CPU", "EX001", "half-precision parameters on a CPU", "model.float()"),
        ("RuntimeError: expected m1 and m2 to have the same dtype, but got: c10::BFloat16 != float", "EX001", "half-precision parameters on a CPU", "model.float()"),
        (f"{MIXED}\nusing device_type: cpu", "EX001", "half-precision parameters on a CPU", "model.float()"),
        ("ValueError: Flash Attention 2.0 only supports torch.float16 and torch.bfloat16 dtypes, but the current dype in Qwen2 is torch.float32.", "EX006", "loaded in fp32", "dtype=torch.bfloat16"),
        ("NotImplementedError: \"mul_cuda\" not implemented for 'Float8_e4m3fn'", "EX026", "mul_cuda has no fp8_e4m3 kernel", "weight.to(x.dtype)"),
        ("fatal error: error in backend: not support bf16 type cast", "EX030", "bf16 where it is not taken", "fp32"),
        ("AssertionError: FSDP expects uniform original parameter dtype but got {torch.bfloat16, torch.float32}\nfirst forward", "EX014", "parts of the model", "before wrapping"),
        ("AssertionError: FSDP expects uniform original parameter dtype but got {torch.bfloat16, torch.float32}\nwith LoRA", "EX014", "fp32 adapters", "autocast_adapter_dtype=False"),
        ("RuntimeError: mat1 and mat2 must have the same dtype\nmodels converted to float16, GPU without bfloat16", "EX001", "input and weight in two dtypes", "layer.weight.dtype"),
        ("RuntimeError: masked_scatter: expected self and source to have same dtypes but got Float and Half\nwith video input", "EX007", "image or audio features", "features.to(inputs_embeds.dtype)"),
        ("CheckpointError: Recomputed values\nfor the following tensors have different metadata than during the forward pass.\nsaved metadata:  {'shape': ..., 'dtype': torch.bfloat16, 'device': cuda:0}\nrecomputed metadata:  {'shape': ..., 'dtype': torch.float32, 'device': cuda:0}\nwith FSDP2", "EX015", "FSDP casts a block's inputs", "cos.to(x.dtype)"),
        ("CheckpointError: Recomputed values for the following tensors have different metadata than during the forward pass.\nsaved metadata: {'shape': torch.Size([2]), 'dtype': torch.bfloat16}\nrecomputed metadata: {'shape': torch.Size([2]), 'dtype': torch.float32}\nfully_shard, under autocast", "EX015", "autocast differs", "autocast inside"),
        ("CheckpointError: Recomputed values for the following tensors have different metadata than during the forward pass.\nsaved metadata: {'shape': torch.Size([2]), 'dtype': torch.bfloat16}\nrecomputed metadata: {'shape': torch.Size([2]), 'dtype': torch.float32}", "EX015", "autocast differs", "autocast inside"),
        ("'mps.add' op requires the same element type for all operands and results\n%4 = \"mps.add\"(%1, %2) : (tensor<1xf32>, tensor<3x4xbf16>) -> tensor<*xf32>", "EX034", "does not promote", "scale.to(x.dtype)"),
        ("RuntimeError: attempting to assign a gradient with dtype 'c10::BFloat16' to a tensor with grad_dtype 'Float'.\nFSDP2: the first forward ran with requires_grad=False, then the weights were unfrozen", "EX011", "FSDP chose its dtypes", "no_grad"),
        (f"{MIXED}\nfully_shard, the input is a dataclass of tensors", "EX001", "an input that FSDP does not cast", "arguments"),
        (f"{MIXED}\nsharded with FSDP, compiled as well", "EX001", "activation promoted to fp32", "autocast"),
        (f"{MIXED}\nonly with torch.compile, eager runs", "EX001", "compiled code makes another dtype than eager", "aot_eager"),
        ("RuntimeError: Expected query, key, and value to have the same dtype\nwith a quantised KV cache", "EX005", "KV cache made or written", "cache.to"),
        ("RuntimeError: Expected query, key, and value to have the same dtype\nthe node hard-codes torch.bfloat16", "EX005", "a dtype written out in the code", "hidden.dtype"),
]  # fmt: skip


def test_what_a_report_quotes_or_says_decides_its_first_cause(subtests):
    for text, code, cause, fix in SAID:
        with subtests.test(text):
            (finding,) = explain(text.splitlines())
            assert finding.code == code
            assert cause in (finding.cause or "").partition(": ")[0]
            assert fix in (finding.fix or "")


def test_autocast_is_advised_for_the_device_that_the_text_names():
    for where, device in (("inference on a CPU", "cpu"), ("on MPS", "mps"), ("on an A100", "cuda")):
        (finding,) = explain(
            [
                f"RuntimeError: expected mat1 and mat2 to have the same dtype, but got: float != c10::BFloat16, {where}"
            ]
        )
        told = f"{finding.fix} {dict(finding.details).get('or', '')}"
        assert f'torch.autocast("{device}"' in told


def test_code_that_a_long_log_quotes_is_not_the_failing_call():
    log = [
        "torch.layer_norm(x, shape)",
        *["step"] * 50,
        "RuntimeError: expected scalar type BFloat16 but found Float",
    ]
    (finding,) = explain(log)
    assert finding.code == "EX001"


def test_nan_in_a_bf16_run_is_not_called_an_overflow_of_fp16():
    (finding,) = explain(["Loss is nan, bf16 training"])
    assert finding.code == "EX032"
    assert "weights that are nan already" in finding.cause
    (finding,) = explain(["Loss is nan, fp16 training"])
    assert "overflows fp16" in finding.cause


def test_a_product_of_activations_in_a_library_is_read_from_its_line():
    file = "/env/site-packages/diffusers/models/attention.py"
    for code, is_decided in (
        ("out = torch.bmm(probs, value)", True),
        ("out = torch.matmul(x, self.weight.t())", False),
        ("out = torch.matmul(X, W)", False),
    ):
        finding = explain(traceback((file, 9, "forward", code)))[0]
        assert ("operands of two dtypes" in finding.cause) == is_decided


def test_the_argument_of_lerp_tells_an_update_from_a_gradient():
    error = "RuntimeError: expected dtype c10::BFloat16 for `end` but got dtype float"
    file = "/env/site-packages/newopt/core.py"
    for argument, cause in (("update", "update computed"), ("grad", "gradient in another")):
        line = (file, 9, "apply", f"self.momentum.lerp_({argument}, 0.1)")
        finding = explain(traceback(line, error=error))[0]
        assert finding.code == "EX010"
        assert cause in finding.cause


def test_an_out_argument_is_not_the_cause_if_the_text_does_not_name_it():
    line = ("/home/me/kernels.py", 9, "backward", "dX = torch.mm(dY, W, out=X)")
    for error, is_buffer in (
        ("RuntimeError: Expected out tensor to have dtype c10::Half, but got c10::BFloat16", True),
        ("RuntimeError: expected scalar type Half but found BFloat16", False),
    ):
        finding = explain(traceback(line, error=error))[0]
        sure = dict(finding.details)["sure"]
        assert sure.startswith("decided") == is_buffer
        assert finding.cause.startswith("out= buffer") == is_buffer
