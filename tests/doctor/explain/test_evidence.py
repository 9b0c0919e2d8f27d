# ruff: noqa: E501  real texts
"""What a text shows decides its cause, and nothing else does: frames, a card's name, printed
settings, and names that only look like evidence.
"""

from __future__ import annotations

import pytest

from isotype.doctor.explain import explain

MIXED = "RuntimeError: mat1 and mat2 must have the same dtype, but got Float and BFloat16"
LIB = "/env/lib/python3.11/site-packages"


def explain_traceback(*frames: tuple[str, int, str, str], error: str = MIXED, before: str = ""):
    lines = [*before.splitlines(), "Traceback (most recent call last):"]
    for file, line, function, code in frames:
        lines += [f'  File "{file}", line {line}, in {function}', f"    {code}"]
    return explain([*lines, error])[0]


LINEAR = (
    f"{LIB}/torch/nn/modules/linear.py",
    125,
    "forward",
    "return F.linear(input, self.weight, self.bias)",
)


def test_own_function_named_generate_is_no_generation():
    finding = explain_traceback(
        ("/home/me/data.py", 9, "main", "pairs = generate(model, rows)"),
        ("/home/me/data.py", 4, "generate", "return model(rows)"),
        LINEAR,
    )
    assert "generate" not in finding.cause
    assert (
        "situation" not in dict(finding.details)
        or "generate" not in dict(finding.details)["situation"]
    )
    finding = explain_traceback(
        ("/home/me/data.py", 9, "main", "pairs = self.sampler.generate(rows)"),
        ("/home/me/data.py", 4, "generate", "return model(rows)"),
        LINEAR,
    )
    assert "generate outside autocast" not in finding.cause


def test_own_function_named_on_something_is_no_callback():
    frames = (
        ("/home/me/serve.py", 9, "main", "reply = on_request(text)"),
        ("/home/me/serve.py", 4, "on_request", "return model.generate(**inputs)"),
        (f"{LIB}/transformers/generation/utils.py", 2, "generate", "outputs = self(**x)"),
        LINEAR,
    )
    assert "callback" not in explain_traceback(*frames).render()
    handler = (f"{LIB}/transformers/trainer_callback.py", 5, "call_event", "result = getattr(...)")
    called = (
        frames[0],
        handler,
        ("/home/me/s.py", 4, "on_request", "model.generate(x)"),
        *frames[2:],
    )
    assert "from the callback on_request" in explain_traceback(*called).render()


def test_backward_under_custom_bwd_is_not_told_to_decorate():
    inner = ("/home/me/op.py", 30, "backward", "dw = torch.matmul(x.t(), dy, out=buffer)")
    bwd = (f"{LIB}/torch/amp/autocast_mode.py", 5, "decorate_bwd", "return bwd(*args, **kwargs)")
    apply = (f"{LIB}/torch/autograd/function.py", 307, "apply", "return user_fn(self, *args)")
    assert "custom_bwd(device_type" in explain_traceback(apply, inner).fix
    finding = explain_traceback(apply, bwd, inner)
    assert "custom_bwd(device_type" not in finding.fix
    assert "cast next to the product" in finding.fix


def test_printed_setting_of_zero_decides():
    error = "RuntimeError: expected mat1 and mat2 to have the same dtype, but got: c10::BFloat16 != c10::Half"
    filler = "\n".join(f"step {i}" for i in range(600))
    for before in (
        '{"zero_quantized_weights": true}',
        f"  zero_quantized_weights ...... True\n{filler}",
    ):
        before = before.replace(" ...... ", ": ")
        finding = explain_traceback(LINEAR, error=error, before=before)
        assert finding.cause.startswith("ZeRO widens quantised weights to fp16")
        assert '"zero_quantized_weights": false' in finding.fix
        assert dict(finding.details)["sure"].startswith("decided")
    finding = explain_traceback(LINEAR, error=error, before='{"zero_quantized_weights": false}')
    assert "zero_quantized_weights" not in finding.render()


ERRORS = [
    MIXED,
    "RuntimeError: expected m1 and m2 to have the same dtype, but got: float != c10::Half",
    "RuntimeError: FlashAttention only support fp16 and bf16 data type",
    "ValueError: Attempting to unscale FP16 gradients.",
    "RuntimeError: \"_amp_foreach_non_finite_check_and_unscale_cuda\" not implemented for 'BFloat16'",
    "RuntimeError: Found dtype Float but expected BFloat16",
    "ValueError: Your setup doesn't support bf16/gpu. You need torch>=1.10, using Ampere GPU",
    "RuntimeError: Index put requires the source and destination dtypes match, got Float for the destination and BFloat16 for the source.",
    "RuntimeError: probability tensor contains either `inf`, `nan` or element < 0, fp16",
]


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("card", ["GPU: Tesla T4, 15 GB", "running on a V100", "NVIDIA GTX 1660"])
def test_advice_names_no_dtype_that_the_card_lacks(error, card):
    finding = explain([card, *["step"] * 500, error])[0]
    advice = f"{finding.fix}\n{dict(finding.details).get('or', '')}".partition("(seen")[0]
    for name in ("torch.bfloat16", "bf16=True", "bfloat16"):
        assert name not in advice
    finding = explain(["GPU: A100", error])[0]
    assert "has no bf16" not in finding.fix


def test_advice_for_a_card_without_bf16_keeps_its_other_parts():
    (finding,) = explain(["Tesla T4", "ValueError: Attempting to unscale FP16 gradients."])
    assert "p.data = p.data.float()" in finding.fix
    assert "bf16" not in finding.fix


UNSCALE = "_amp_foreach_non_finite_check_and_unscale_cuda"


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (
            f"NotImplementedError: \"{UNSCALE}\" not implemented for 'BFloat16'",
            "load the weights in fp32 (dtype=torch.float32), and keep fp16=True",
        ),
        (
            "ValueError: At most one of fp16 and bf16 can be True, but not both",
            "keep one: fp16=True, bf16=False",
        ),
        (
            "RuntimeError: probability tensor contains either `inf`, `nan` or element < 0, fp16",
            "fp32; isotype doctor trace names the first value",
        ),
    ],
)
def test_advice_for_a_card_without_bf16_does_not_contradict_itself(error, fix):
    finding = explain(["GPU: Tesla T4", error])[0]
    assert finding.fix.startswith(fix)
    assert "no GradScaler" not in finding.fix


def test_a_resumed_run_does_not_decide_alone():
    error = "RuntimeError: expected dtype float for `end` but got dtype c10::BFloat16"
    step = (f"{LIB}/torch/optim/adamw.py", 300, "step", "exp_avg.lerp_(grad, 1 - beta1)")
    filler = "\n".join(f"step {i}" for i in range(600))
    finding = explain_traceback(step, error=error, before=f"Resuming from checkpoint-500\n{filler}")
    assert finding.cause.startswith("optimizer state loaded in another dtype: perhaps")
    assert "open between 3 causes" in dict(finding.details)["sure"]


NEW_KINDS = [
    ("TypeError: Trying to convert Float8_e4m3fn to the MPS backend but it does not have support for that dtype.", "EX018", "fp8 weights moved", 'to(torch.float16).to("mps")'),
    ("TypeError: Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64. Please use float32 instead.", "EX018", "fp64 moved", "torch.float32"),
    ("ValueError: The model you are trying to fine-tune is quantized with QuantizationMethod.MXFP4 but that quantization method do not support training. Please open an issue", "EX025", "a quantised kind without a backward", "Mxfp4Config(dequantize=True)"),
    ("ValueError: The model you are trying to fine-tune is quantized with awq but that quantization method do not support training.", "EX025", "a quantised kind without a backward", "load_in_4bit=True"),
    ("NotImplementedError: \"copy_\" not implemented for 'Float8_e8m0fnu'", "EX026", "e8m0 is the format of scales", "torch.exp2"),
    ("AttributeError: module 'torch' has no attribute 'float8_e8m0fnu'", "EX017", "a torch without e8m0", "2.7"),
    ("RuntimeError: cuFFT only supports dimensions whose sizes are powers of two when computing in half precision, but got a signal size of[62, 62]", "EX026", "an FFT in half precision", "power of two"),
    ("RuntimeError: MKL FFT doesn't support tensors of type: Half", "EX026", "an FFT in half precision", "x.float()"),
    ("transformers version: 5.2.0\nValueError: Attempting to unscale FP16 gradients.", "EX012", "trainable weights are fp16", "dtype=torch.float32"),
]  # fmt: skip


def test_new_kinds_are_known(subtests):
    for text, code, cause, fix in NEW_KINDS:
        with subtests.test(text):
            finding = explain(text.splitlines())[0]
            assert finding.code == code
            assert finding.cause.startswith(cause)
            assert fix in finding.fix


FLASH = "RuntimeError: FlashAttention only support fp16 and bf16 data type"


@pytest.mark.parametrize(
    ("frame", "cause"),
    [
        (("/home/me/t.py", 3, "main", "out = model.generate(**x)"), "generate outside autocast"),
        ((f"{LIB}/transformers/trainer.py", 3, "compute_loss", "x"), "no mixed precision flag"),
        (("/home/me/m.py", 3, "forward", "q = self.q_norm(q)"), "norms of queries and keys"),
        ((f"{LIB}/peft/tuners/lora/layer.py", 3, "forward", "x"), "fp32 adapters"),
        (("/home/me/m.py", 3, "forward", "y = flash_attn_func(q, k, v)"), "fp32 norms or rotary"),
    ],
)
def test_causes_of_flash_attention(frame, cause):
    finding = explain_traceback(frame, error=FLASH)
    assert finding.cause.startswith(cause)
    if cause != "generate outside autocast":
        assert "isotype doctor run SCRIPT.py decides" in dict(finding.details)["sure"]


def test_what_the_text_does_not_decide_is_open():
    (finding,) = explain([MIXED])
    assert "perhaps" in finding.cause
    sure = dict(finding.details)["sure"]
    assert sure.startswith("open")
    assert "isotype doctor run SCRIPT.py decides" in sure
    assert "likely" not in finding.render()


QKV = (
    "RuntimeError: Expected query, key, and value to have the same dtype, but got query.dtype: float"
    " key.dtype: float and value.dtype: c10::Half instead."
)


def is_decided(finding) -> bool:
    return dict(finding.details)["sure"].startswith("decided")


def test_queries_and_keys_in_fp32_do_not_decide_between_rotary_and_norm():
    (finding,) = explain([QKV])
    assert not is_decided(finding)
    assert "norms of queries and keys" in finding.render()
    attention = ("/home/me/net.py", 30, "attend", "return F.scaled_dot_product_attention(q, k, v)")
    for code, cause in (
        ("q, k = self.q_norm(q), self.k_norm(k)", "norms of queries and keys"),
        ("q, k = apply_rotary_emb(q, k, cos, sin)", "rotary table promotes q and k"),
    ):
        caller = ("/home/me/net.py", 20, "forward", code)
        finding = explain_traceback(caller, attention, error=QKV)
        assert finding.cause.startswith(cause)
        assert not is_decided(finding)
        assert "print(" in dict(finding.details)["sign"]


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        ("scatter(): Expected self.dtype to be equal to src.dtype", "router and hidden states"),
        (
            "index_add_(): self (Float) and source (BFloat16) must have the same scalar type",
            "router and hidden states",
        ),
        (
            "index_add_(): self (BFloat16) and source (Float) must have the same scalar type",
            "routing weights promote the source",
        ),
    ],
)
def test_a_write_among_experts_is_explained_by_the_wider_side(error, cause):
    frame = ("/home/me/moe.py", 8, "forward", "out.scatter_(1, index, weights)")
    finding = explain_traceback(frame, error=f"RuntimeError: {error}")
    assert finding.cause.startswith(cause)


@pytest.mark.parametrize(
    "error",
    [
        "RuntimeError: mat1 and mat2 must have the same dtype, but got BFloat16 and Char",
        "RuntimeError: expected mat1 and mat2 to have the same dtype, but got: float != unsigned char",
        "RuntimeError: Input type (c10::Half) and weight type (unsigned char) should be the same",
    ],
)
def test_integer_weight_is_a_quantised_one(error):
    (finding,) = explain([error])
    assert "quantised" in finding.cause
    assert "autocast" not in finding.fix


def test_text_that_does_not_order_its_operands_lists_both_causes():
    (finding,) = explain(["RuntimeError: expected scalar type BFloat16 but found Float"])
    sure = dict(finding.details)["sure"]
    assert "activation promoted to fp32" in sure
    assert "weight left in a wider dtype" in sure


def test_a_narrow_activation_before_wide_weights_may_be_a_cast_in_the_code():
    (finding,) = explain(["mat1 and mat2 must have the same dtype, but got Half and Float"])
    assert "an activation of a narrower part, or cast by hand" in finding.render()


@pytest.mark.parametrize(
    ("code", "is_first"),
    [
        ("emb = self.time_embedding(sinusoidal_embedding_1d(256, t))", True),
        ("temb = self.timestep_embedder(timesteps_proj)", True),
        ("x = self.block(x, t_emb)", False),
    ],
)
def test_a_time_embedding_at_the_failing_line_is_listed_first(code, is_first):
    finding = explain_traceback(("/home/me/net.py", 20, "forward", code), LINEAR)
    assert finding.cause.startswith("a timestep embedding in fp32") is is_first
    assert not is_decided(finding)


def test_the_first_layer_of_a_processors_output_is_listed_first():
    conv = (f"{LIB}/torch/nn/modules/conv.py", 5, "_conv_forward", "return F.conv2d(")
    error = "RuntimeError: Input type (float) and bias type (c10::Half) should be the same"
    embed = ("/home/me/vit.py", 3, "forward", "x = self.patch_embed(pixel_values)")
    finding = explain_traceback(embed, conv, error=error)
    assert finding.cause.startswith("inputs of a processor are fp32: perhaps")
    later = ("/home/me/vit.py", 3, "forward", "x = self.neck(x)")
    assert "processor" not in explain_traceback(later, conv, error=error).cause


def recomputed(shape: str, *before: str):
    return explain(
        [
            *before,
            "torch.utils.checkpoint.CheckpointError: torch.utils.checkpoint: Recomputed values for the"
            " following tensors have different metadata than during the forward pass.\n",
            "tensor at position 9:\n",
            f"saved metadata: {{'shape': torch.Size([{shape}]), 'dtype': torch.bfloat16, 'device': 'cuda'}}\n",
            f"recomputed metadata: {{'shape': torch.Size([{shape}]), 'dtype': torch.float32, 'device': 'cuda'}}\n",
        ]
    )[0]


def test_words_about_autocast_and_sharding_order_the_causes_of_a_recomputation():
    finding = recomputed("8, 2048")
    assert not is_decided(finding)
    assert finding.cause.startswith("autocast differs")
    assert "FSDP casts" in finding.render()
    table = recomputed("2, 4096, 128")
    assert table.cause.startswith("FSDP casts")
    assert "rotary tables" in table.cause
    assert not is_decided(table)
    with_autocast = recomputed("8, 2048", "with torch.autocast('cuda'): model(x)\n")
    assert with_autocast.cause.startswith("autocast differs")
    assert recomputed("8, 2048", "FSDP2\n").cause.startswith("FSDP casts")


def test_scales_that_a_model_does_not_use_are_an_error():
    lines = [
        "LlamaForCausalLM LOAD REPORT from: saved\n",
        "Key                                       | Status     |\n",
        "model.layers.0.mlp.up_proj.weight_scale_inv | UNEXPECTED |\n",
    ]
    (finding,) = explain(lines)
    assert (finding.code, finding.severity.name) == ("EX025", "ERROR")
    assert "quantization_config" in finding.fix
    lines[2] = lines[2].replace("weight_scale_inv", "inv_freq")
    assert explain(lines)[0].code == "EX000"


def test_packed_experts_in_nvfp4_are_a_cause_of_nan():
    loss = "{'loss': nan, 'grad_norm': nan, 'epoch': 0.1}\n"
    assert (
        "packed experts" in explain(["nvfp4-pack-quantized, dequantize=True\n", loss])[0].render()
    )
    assert "packed experts" not in explain([loss])[0].render()


def test_advice_about_fp8_on_an_older_card_is_kept():
    error = "ValueError(\"type fp8e4nv not supported in this architecture. The supported fp8 dtypes are ('fp8e5')\")"
    (finding,) = explain(["Tesla V100", error])
    assert "e5m2" in finding.fix


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        ("\"bitwise_or_cpu\" not implemented for 'BFloat16'", "EX026", "mask"),
        ("\"log_softmax_lastdim_kernel_impl\" not implemented for 'Long'", "EX026", "x.float()"),
        ("Unsupported conversion from bf16 to f16", "EX018", "Ampere"),
        ("steps: 1%| 12/1200 [00:31<51:02, avr_loss=nan]", "EX032", "65504"),
        ("LLVM ERROR: Cannot select: t12: v2bf16 = bf16 fma", "EX018", "bf16"),
        ("ValueError: Undefined Operation encountered!", "EX025", "unquantised"),
        ("AssertionError: All tensors must have the same dtype.", "EX034", "dtype"),
        (
            "AssertionError: Input and cos/sin must have the same dtype, got torch.float32 and"
            " torch.bfloat16",
            "EX034",
            "cos.to(q.dtype)",
        ),
        ("AssertionError: torch.bfloat16 == torch.float32", "EX034", "buffer"),
        (
            "input types 'tensor<2x640xf32>' and 'tensor<640xf16>' are not broadcast compatible",
            "EX034",
            "MPS",
        ),
        ("\"upsample_weights_cpu\" not implemented for 'BFloat16'", "EX026", "x.float()"),
        (
            "\"nll_loss_forward_reduce_cuda_kernel_2d_index\" not implemented for 'Float'",
            "EX008",
            "labels.long()",
        ),
        (
            "Expected object of scalar type Long but got scalar type Float for argument #2 'target'",
            "EX008",
            "labels.long()",
        ),
        (
            "mean(): could not infer output dtype. Input dtype must be either a floating point or complex dtype. Got: Short",
            "EX026",
            "x.float()",
        ),
        (
            "Data type must be one of [float32, float64, int16, int32], not float16",
            "EX035",
            "x.float()",
        ),
        ("bf16 is only supported on A100+ GPUs", "EX018", "fp16=True"),
        (
            "AttributeError: module 'torch' has no attribute 'float8_e4m3fn'",
            "EX017",
            "pip install -U torch",
        ),
    ],
)
def test_known_message(error, code, words):
    (finding,) = explain([error])
    assert finding.code == code
    assert words in f"{finding.cause} {finding.fix}"


def test_tensors_of_sage_attention_are_query_key_and_value():
    sage = (f"{LIB}/sageattention/core.py", 80, "sageattn", "assert q.dtype == k.dtype, message")
    error = "AssertionError: All tensors must have the same dtype."
    assert explain_traceback(sage, error=error).code == "EX005"


HALVES = "RuntimeError: mat1 and mat2 must have the same dtype, but got Half and BFloat16"


def test_two_half_formats_may_be_a_loading_or_a_mixed_precision():
    details = dict(explain([HALVES])[0].details)
    assert details["sure"].startswith("open")
    assert "mixed precision" in details["or"]
    (finding,) = explain(["ACCELERATE_MIXED_PRECISION unset, load_in_4bit=False\n", HALVES])
    assert "mixed precision is fp16" in finding.cause
    (finding,) = explain(["model = AutoModel.from_pretrained(path, dtype=dtype)\n", HALVES])
    assert finding.cause.startswith("bf16 and fp16 in one model: perhaps")


@pytest.mark.parametrize(
    ("self", "weight", "sure", "cause"),
    [
        ("BFloat16", "Float", "open", "one of the two was cast"),
        ("Float", "BFloat16", "open", "one of the two was cast"),
        ("BFloat16", "Float8_e4m3fn", "open", "storage format"),
    ],
)
def test_a_narrow_bias_beside_a_wide_weight_is_open(self, weight, sure, cause):
    (finding,) = explain([f"self and mat2 must have the same dtype, but got {self} and {weight}"])
    assert cause in finding.cause
    assert dict(finding.details)["sure"].startswith(sure)


@pytest.mark.parametrize(
    ("warning", "error", "is_decided"),
    [
        ("bfloat16 is not supported, falling back to float32.", MIXED, False),
        (
            "bfloat16 is not supported, falling back to float32.",
            "mat1 and mat2 must have the same dtype, but got BFloat16 and Float",
            True,
        ),
        (
            "RMSNorm falls back to float32",
            MIXED.replace("Float and BFloat16", "BFloat16 and Float"),
            False,
        ),
        (
            "No torch.bfloat16 here. Falling back to torch.float16 for compatibility.",
            "Input type (c10::BFloat16) and bias type (c10::Half) should be the same",
            True,
        ),
    ],
)
def test_a_fallback_decides_when_the_weights_have_its_dtype(warning, error, is_decided):
    (finding,) = explain([f"{warning}\n", error])
    assert ("fell back" in finding.cause) == is_decided
    assert dict(finding.details)["sure"].startswith("decided") == is_decided


def test_a_head_cast_to_fp32_is_cast_back_by_a_sharding_policy():
    head = ("/home/me/model.py", 7, "forward", "logits = self.lm_head(hidden_states)")
    sharded = "GRPOConfig(cast_lm_head_to_fp32=True), FSDP2"
    assert "policy" in explain_traceback(head, LINEAR, before=sharded).cause
    assert "policy" not in explain_traceback(head, LINEAR, before="FSDP2").cause


def test_fp32_master_weights_need_autocast():
    error = "RuntimeError: mat1 and mat2 must have the same dtype, but got BFloat16 and Float"
    (finding,) = explain(["fp32_master_weights=True, validation\n", error])
    assert "masters" in finding.cause
    assert dict(finding.details)["sure"].startswith("open")


def test_the_argument_of_an_embedding_is_ids():
    error = (
        "Expected tensor for argument #1 'indices' to have one of the following scalar types: Long, Int;"
        " but got CUDABFloat16Type instead (while checking arguments for embedding)"
    )
    details = dict(explain([error])[0].details)
    assert details["sure"].startswith("decided")
    assert "or" not in details


INDEX_PUT = "RuntimeError: Index put requires the source and destination dtypes match, got Half for the destination and Float for the source."


@pytest.mark.parametrize(
    ("file", "function", "code", "cause"),
    [
        ("/home/me/moe-project/data.py", "scatter", "buffer[rows] = values", "source fp32"),
        ("/home/me/gen.py", "sample_top_k", "logits[rows] = filtered", "source fp32"),
        ("/home/me/.cache/huggingface/x.py", "add", "buffer[rows] = values", "source fp32"),
        ("/home/me/moe.py", "forward", "out[rows] = values", "routing weights"),
        ("/home/me/x.py", "forward", "inputs_embeds[rows] = image_features", "features of a tower"),
        ("/home/me/x.py", "update", "self.cache[rows] = values", "KV cache"),
    ],
)
def test_an_indexed_write_is_explained_by_its_line(file, function, code, cause):
    finding = explain_traceback((file, 3, function, code), error=INDEX_PUT)
    assert cause in finding.cause
    assert not is_decided(finding)


def test_the_word_image_somewhere_does_not_decide_an_indexed_write():
    frame = (f"{LIB}/torchvision/ops/poolers.py", 3, "_roi_align", "result[level] = pooled")
    train = ("/home/me/train.py", 9, "<module>", "loss = model(images, targets)")
    assert not is_decided(explain_traceback(train, frame, error=INDEX_PUT))


def test_frame_of_a_trainer_is_no_fused_function():
    trainer = (f"{LIB}/unsloth/models/_utils.py", 9, "_unsloth_training_step", "self.step(model)")
    own = ("/home/me/model.py", 4, "forward", "return self.proj(features)")
    assert "fused" not in explain_traceback(trainer, own, LINEAR).cause
    fused = (f"{LIB}/unsloth/kernels/utils.py", 9, "matmul_lora", "out = torch_matmul(X, W.t())")
    assert "fused" in explain_traceback(trainer, fused).cause


def test_generation_without_a_trainer_does_not_decide():
    generate = (f"{LIB}/transformers/generation/utils.py", 9, "generate", "self._sample(")
    own = ("/home/me/infer.py", 4, "<module>", "model.generate(**inputs)")
    finding = explain_traceback(own, generate, LINEAR)
    assert "trainer" not in finding.cause
    assert not is_decided(finding)


def test_recomputation_in_a_backward_is_no_product_of_gradients():
    backward = ("/home/me/checkpoint.py", 9, "backward", "(output,) = ctx.function(hidden)")
    forward = ("/home/me/model.py", 4, "forward", "return self.mlp(hidden)")
    assert "hand-written" not in explain_traceback(backward, forward, LINEAR).cause
    product = ("/home/me/lora.py", 9, "backward", "grad = grad_output @ weight")
    assert "hand-written" in explain_traceback(product).cause


def test_name_of_a_folder_is_no_vae():
    error = "RuntimeError: Input type (float) and bias type (c10::BFloat16) should be the same"
    unet = ("/home/me/vae-diffusion/train.py", 3, "<module>", "y = unet(x)")
    assert "VAE" not in explain_traceback(unet, error=error).cause
    codec = ("/home/me/tts.py", 3, "<module>", "wav = self.codec.decode(codes)")
    assert "VAE" not in explain_traceback(codec, error=error).cause
    vae = ("/home/me/train.py", 3, "<module>", "latents = self.vae.encode(pixels)")
    assert "VAE" in explain_traceback(vae, error=error).cause


@pytest.mark.parametrize(
    "text",
    [
        "{'eval_precision': 0.71}\n{'loss': nan, 'grad_norm': nan}",
        "Expected query, key, and value to have the same dtype, but got query.dtype: c10::BFloat16"
        " key.dtype: float and value.dtype: float instead.",
        "Expected attn_mask dtype to be bool or to match query dtype, but got attn_mask.dtype: c10::BFloat16"
        " and query.dtype: float instead.",
    ],
)
def test_text_that_fits_two_causes_is_open(text):
    (finding,) = explain(text.splitlines(keepends=True))
    assert not is_decided(finding)
    assert "or" in dict(finding.details)


@pytest.mark.parametrize(
    ("function", "code", "words"),
    [
        ("_grouped_linear", "logits = self.router(x)", "grouped_mm"),
        ("forward", "y = self.time_proj(series)", "sinusoidal"),
        ("forward", "y = self.time_embed(batch)", "sinusoidal"),
    ],
)
def test_name_that_only_resembles_a_cause_does_not_decide(function, code, words):
    finding = explain_traceback(("/home/me/model.py", 4, function, code), LINEAR)
    assert words not in finding.cause
    assert not is_decided(finding)


def test_folder_named_fft_is_no_transform():
    error = "RuntimeError: \"cdist_cuda\" not implemented for 'Half'"
    frame = ("/home/me/fft_utils/a.py", 4, "distance", "y = torch.cdist(a, b)")
    assert "FFT" not in explain_traceback(frame, error=error).message
    assert "cuFFT" not in explain_traceback(frame, error=error).cause
    frame = ("/home/me/a.py", 4, "spectrum", "y = torch.fft.rfft(a)")
    assert "cuFFT" in explain_traceback(frame, error=error).cause


@pytest.mark.parametrize(
    ("operands", "is_activation"),
    [
        ("mat1 and mat2 must have the same dtype, but got Double and Float", True),
        ("mat1 and mat2 must have the same dtype, but got Float and Double", False),
        ("expected scalar type Double but found Float", False),
    ],
)
def test_fp64_is_numpys_only_if_the_activation_has_it(operands, is_activation):
    (finding,) = explain([f"RuntimeError: {operands}"])
    assert not is_decided(finding)
    others = f"{finding.cause} {dict(finding.details).get('or', '')}"
    assert ("double on purpose" in others or "for an fp64 model" in others) != is_activation


def test_an_integer_of_a_triton_loop_is_no_accumulator():
    (finding,) = explain(
        [
            "AssertionError: Loop-carried variable i has initial type int32 but is re-assigned to int64 in loop!"
        ]
    )
    assert "name of its own" in finding.fix
    assert "float32" not in finding.fix
    (finding,) = explain(
        [
            "AssertionError: Loop-carried variable acc has initial type bf16 but is re-assigned to fp32 in loop!"
        ]
    )
    assert "float32" in finding.fix


@pytest.mark.parametrize(
    ("types", "is_promoted"),
    [("fp16 and bf16", False), ("bf16 and fp16", False), ("fp32 and bf16", True)],
)
def test_two_half_formats_in_a_triton_product_were_not_promoted(types, is_promoted):
    (finding,) = explain([f"AssertionError('Both operands must be same dtype. Got {types}')"])
    assert ("promoted one side to fp32" in finding.cause) == is_promoted


@pytest.mark.parametrize(
    ("kernel", "is_algebra"),
    [
        ("compute_index_ranges_weights", False),
        ("rsqrt_cpu", False),
        ("geqrf_cuda", True),
        ("linalg_eigh_cuda", True),
        ("lu_factor_cublas", True),
    ],
)
def test_letters_inside_a_kernels_name_are_no_linear_algebra(kernel, is_algebra):
    (finding,) = explain([f"RuntimeError: \"{kernel}\" not implemented for 'BFloat16'"])
    assert ("linear algebra" in finding.cause) == is_algebra


@pytest.mark.parametrize(
    ("code", "fix"),
    [
        ('t = x.to(device="cpu", dtype=torch.float64)', "x.cpu()"),
        ("t = x.to(torch.float64)", "torch.float32"),
    ],
)
def test_a_cast_to_fp64_on_the_way_from_mps_to_the_cpu(code, fix):
    error = "TypeError: Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64."
    assert fix in explain_traceback(("/home/me/a.py", 4, "f", code), error=error).fix


def test_a_product_inside_attention_is_explained_by_its_mask():
    code = "y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)"
    finding = explain_traceback(("/home/me/a.py", 4, "f", code))
    assert "mask" in finding.cause
    finding = explain_traceback(
        ("/home/me/a.py", 4, "f", "y = F.scaled_dot_product_attention(self.q(x), k, v)"), LINEAR
    )
    assert "mask in fp32 is allowed" not in finding.cause


FP8_LIST = "type {} not supported in this architecture. The supported fp8 dtypes are ({})"


@pytest.mark.parametrize(
    ("error", "wrong", "right"),
    [
        (FP8_LIST.format("fp8e4b15", "'fp8e4nv', 'fp8e5'"), "older architecture", "float8_e4m3fn"),
        (FP8_LIST.format("fp8e4nv", "'fp8e4b8', 'fp8e5b16'"), "older architecture", "e4m3fnuz"),
        (
            "Radeon RX 7900 XTX\nRuntimeError: torch._scaled_mm is only supported on CUDA devices with"
            " compute capability >= 9.0 or 8.9, or ROCm MI300+",
            "30xx",
            "MI300",
        ),
        (
            "RuntimeError: mat1 and mat2 must have the same dtype, but got Long and Float",
            "autocast",
            "not converted",
        ),
        (
            "AssertionError: Loop-carried variable x has initial type fp32 but is re-assigned to bf16 in"
            " loop!",
            "start the accumulator",
            "narrow",
        ),
        (
            "AssertionError('Both operands must be same dtype. Got int8 and bf16')",
            "autocast",
            "scale",
        ),
        (
            "RuntimeError: value cannot be converted to type int64_t without overflow",
            "fp32",
            "iinfo",
        ),
        (
            "Expected query, key, and value to have the same dtype, but got query.dtype: c10::BFloat16"
            " key.dtype: c10::BFloat16 and value.dtype: float instead.",
            "fp32 cos/sin",
            "v.to(q.dtype)",
        ),
    ],
)
def test_the_side_that_is_odd_tells_the_cause(error, wrong, right):
    (finding,) = explain(error.splitlines(keepends=True))
    said = f"{finding.cause} {finding.fix.partition('; or run')[0]}"
    assert wrong not in said
    assert right in said


@pytest.mark.parametrize(
    "error",
    [
        "\"addmm_cuda\" not implemented for 'Char'",
        "mat1 and mat2 must have the same dtype, but got Float8_e4m3fn and BFloat16",
        "mat1 and mat2 must have the same dtype, but got Byte and BFloat16",
        "Expected attn_mask dtype to be bool or float or to match query dtype, but got attn_mask.dtype:"
        " c10::BFloat16 and  query.dtype: c10::Half instead.",
    ],
)
def test_a_stored_format_or_two_half_formats_do_not_decide(error):
    (finding,) = explain([f"RuntimeError: {error}"])
    assert not is_decided(finding)


MISMATCHES = [
    "RuntimeError: mat1 and mat2 must have the same dtype, but got BFloat16 and Char",
    "RuntimeError: mat1 and mat2 must have the same dtype, but got BFloat16 and Float8_e4m3fn",
    "RuntimeError: mat1 and mat2 must have the same dtype, but got Double and Float",
    MIXED,
    HALVES,
    QKV,
    INDEX_PUT,
    "RuntimeError: self and mat2 must have the same dtype, but got Float and BFloat16",
    "RuntimeError: Input type (float) and bias type (c10::Half) should be the same",
    "RuntimeError: mixed dtype (CPU): expect parameter to have scalar type of Float",
    "RuntimeError: expected scalar type BFloat16 but found Float",
    "RuntimeError: Expected attn_mask dtype to be bool or float or to match query dtype, but got"
    " attn_mask.dtype: float and  query.dtype: c10::BFloat16 instead.",
    "RuntimeError: expected dtype float for `end` but got dtype c10::BFloat16",
    "RuntimeError: Expected BFloat16, got Float",
    "RuntimeError: Found dtype Float but expected BFloat16",
    "ValueError: Must flatten tensors with uniform dtype but got torch.bfloat16 and torch.float32",
    "AssertionError: Both operands must be same dtype. Got fp32 and bf16",
    "RuntimeError: FlashAttention only support fp16 and bf16 data type",
]
SUGGESTIVE_LINES = [
    "hidden = self.time_embedding(sinusoidal_embedding_1d(256, t))",
    "scores = torch.matmul(probs.float(), value)",
    "inputs_embeds[mask] = image_features",
    "q, k = apply_rotary_emb(self.q_norm(q), k, cos, sin)",
    "latents = self.vae.encode(pixel_values)",
    "past_key_values.update(k, v)",
    "out = model.generate(**inputs)",
]


@pytest.mark.parametrize("error", MISMATCHES)
def test_no_frame_and_no_word_decides_a_mismatch_of_two_operands(error):
    words = "FSDP2, LoRA, AMP, resumed, KV cache, from_pretrained(path), trained on CPU, hard-coded"
    for code in SUGGESTIVE_LINES:
        frames = (("/home/me/moe_cache_vae.py", 8, "forward", code), LINEAR)
        for finding in (
            explain_traceback(*frames, error=error),
            explain_traceback(*frames[:1], error=error, before=words),
        ):
            details = dict(finding.details)
            assert details["sure"].startswith("open")
            assert "perhaps" in finding.cause
            assert code in details["certain"]
            assert "sign" in details
            assert details.get("or", "").count("\n") <= 1


CUBLAS = "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx( handle, a, CUDA_R_16BF"


@pytest.mark.parametrize(
    ("text", "is_decided"),
    [
        (CUBLAS, False),
        (f"Using device: NVIDIA GeForce GTX 1080\n{CUBLAS}", True),
        (f"Error during upscale on GTX Titan X\n{CUBLAS}", True),
        (f"Using device: NVIDIA GeForce RTX 3090\n{CUBLAS}", False),
        ("TypeError: LayerNorm.__init__() got an unexpected keyword argument 'dtype'", False),
        ("TypeError: LlamaForCausalLM.__init__() got an unexpected keyword argument 'dtype'", True),
        ("TypeError: from_pretrained() got multiple values for keyword argument 'dtype'", True),
    ],
)
def test_a_refusal_is_its_own_cause_only_if_it_names_who_refuses(text, is_decided):
    finding = explain(text.splitlines(keepends=True))[0]
    assert dict(finding.details)["sure"].startswith("decided") == is_decided
