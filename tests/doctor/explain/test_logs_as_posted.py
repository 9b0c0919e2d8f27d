"""Whole logs as people post them: where the fault is, in which words, and nothing said of faults
that are none of dtypes.
"""

from __future__ import annotations

from pathlib import Path

from isotype.doctor.explain import explain

LOGS = Path(__file__).with_name("logs")
# log, code, line of the user's code, the first cause's name, words of the cause or the fix
FAULTS = [
    (
        "average_of_weights_on_windows",
        "EX034",
        20,
        "the average and the model have two dtypes",
        "EMA",
    ),
    (
        "grid_sample_without_its_top",
        "EX034",
        9,
        "arguments of two dtypes",
        "ref_points.to(feat.dtype)",
    ),
    ("labels_of_a_multilabel_loss", "EX002", 11, "labels are integers", "labels.float()"),
    ("fp8_in_a_collective_under_torchrun", "EX036", 5, "a dtype without a collective", "x.float()"),
    (
        "model_cast_after_the_first_step",
        "EX010",
        15,
        "optimizer state loaded in another dtype",
        "cast the model before making the",
    ),
    (
        "embedding_bag_in_a_container_log",
        "EX034",
        5,
        "arguments of two dtypes",
        "per_sample_weights.to(weight.dtype)",
    ),
    ("pytest_allclose", "EX034", 5, "values of two dtypes compared", "allclose"),
    ("index_cast_with_the_batch", "EX008", 5, "indices are floating", "index.long()"),
    ("dot", "EX001", 17, "operands of two dtypes", "d.to(g.dtype)"),
    ("sparse_product", "EX001", 4, "operands of two dtypes", "adj.to(x.dtype)"),
    ("eigenvectors_in_an_optimizer", "EX026", 10, "linalg_eigh_cpu has no fp16 kernel", ".float()"),
    (
        "rich_index_reduce",
        "EX007",
        4,
        "source and destination differ",
        "destination is fp32 and the source bf16",
    ),
    ("rich_with_locals", "EX001", 13, "operands of two dtypes", "probs.to(h.dtype)"),
    (
        "hidden_state_of_a_gru",
        "EX001",
        5,
        "a recurrent layer's input or hidden state in another dtype",
        "torch.zeros(..., dtype=x.dtype)",
    ),
    (
        "lerp_with_a_tensor_weight",
        "EX034",
        4,
        "interpolation weight in another dtype",
        "a Python number",
    ),
    (
        "in_place_product_in_a_backward",
        "EX001",
        10,
        "bias or in-place buffer in another dtype",
        "addbmm_",
    ),
    ("nan_in_a_distribution", "EX032", 3, "the model overflows fp16", "65504"),
    ("buffer_of_a_gather", "EX014", 6, "a collective's buffers have two dtypes", "dtype=x.dtype"),
    (
        "bf16_on_an_old_gpu_behind_a_progress_bar",
        "EX018",
        412,
        "bf16 instructions on an older GPU",
        "fp16",
    ),
    (
        "gradients_of_two_dtypes_in_fsdp2",
        "EX014",
        176,
        "accumulated gradients beside fresh ones",
        "every micro-batch",
    ),
    (
        "attention_in_an_engines_log",
        "EX005",
        227,
        "rotary, norm or cache promoted one operand",
        "KV cache",
    ),
    (
        "fused_adam",
        "EX010",
        9,
        "gradient in another dtype than the parameter",
        "a gradient or a state is fp32",
    ),
    (
        "scaler_told_by_a_logger_too",
        "EX013",
        1064,
        "fp16=True with bf16 weights",
        "bf16=True, fp16=False",
    ),
    ("bf16_metric_over_gloo", "EX036", 90, "a dtype without a collective", "gloo"),
    (
        "numpy_in_a_pool",
        "EX026",
        31,
        "numpy() of a half-precision tensor",
        "x.float().cpu().numpy()",
    ),
    ("pytest_in_two_files", "EX001", 88, "bias or in-place buffer in another dtype", "addmm_"),
    ("loguru", "EX001", 17, "weight left in a wider dtype", "autocast"),
    ("exception_group", "EX003", 5, "input and convolution in two dtypes", "fp16"),
    (
        "quoted_in_a_mail",
        "EX001",
        12,
        "fp32 adapter on a half-precision base",
        "autocast_adapter_dtype",
    ),
    ("tensorflow", "EX034", 44, "arguments of two dtypes", "tf.cast"),
    ("jax", "EX034", 71, "arguments of two dtypes", "b.astype(a.dtype)"),
    (
        "attention_in_compiled_code",
        "EX005",
        5,
        "KV cache in another dtype",
        "key and value are fp32 and the query bf16",
    ),
    ("rich_on_windows", "EX003", 501, "VAE or image encoder in another dtype", "vae"),
]


def findings_of(log: Path):
    return explain(log.read_text(encoding="utf-8").splitlines())


def test_a_posted_log_is_explained(subtests):
    for name, code, line, cause, words in FAULTS:
        with subtests.test(name):
            (finding,) = findings_of(LOGS / f"{name}.txt")
            assert (finding.code, finding.place.line) == (code, line)
            assert (finding.cause or "").startswith(cause + ": ")
            assert words in f"{finding.cause} {finding.fix}"
            assert "%|" not in dict(finding.details)["error"]


def test_errors_unrelated_to_dtypes_are_not_explained(subtests):
    for log in LOGS.glob("none_*.txt"):
        with subtests.test(log.stem):
            (finding,) = findings_of(log)
            assert finding.code == "EX000", finding.message


def test_every_log_is_used():
    assert {path.stem for path in LOGS.glob("*.txt") if not path.stem.startswith("none_")} == {
        row[0] for row in FAULTS
    }
