"""Every faulty program is found, its culprit named and a fix given; every repaired twin stays
quiet.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from isotype.finding import Severity
from tests.api import trace

from . import programs

# program -> code, words that the finding must hold (place, cause), words of which the fix must hold
# one
FAULTS = {
    "alibi_slopes": ("TR001", ("torch.tensor", "promoted", "alibi_slopes"), ("`.to(", "dtype=")),
    "xpos_scale_buffer": ("TR001", ("decay", "fp32", "promoted"), (".to(x.dtype)",)),
    "fp32_head_on_bf16_trunk": ("TR001", ("v_head", "fp32", "bf16"), ("cast", "autocast")),
    "conv_bias_dtype": ("TR001", ("fp32", "bf16", "conv"), (".to(torch.bfloat16)", "cast")),
    "scatter_into_bf16": ("TR001", ("scatter", ".float()", "sigmoid"), (".to(out.dtype)",)),
    "image_features_into_embeddings": (
        "TR001",
        ("post_norm", ".float()", "index_put"),
        (".to(out.dtype)",),
    ),
    "fused_adamw_gradient_dtype": ("TR001", ("grads[0]", "bf16", "fp32"), ("cast", ".to(")),
    "embedding_ids_cast_with_the_batch": ("TR001", ("embedding", "bf16", ".to()"), ("cast",)),
    "python_check_in_a_library": (
        "TR001",
        ("scaled_dot_product", "fp16", "bf16"),
        (".to(", "dtype="),
    ),
    "default_dtype_in_generator": ("TR001", ("set_default_dtype", "building_in"), ("finally",)),
    "recompute_under_global_switch": ("TR003", ("recompute", "autocast", "Layer"), ("same",)),
    "own_attention_check_after_fp32_norm": (
        "TR002",
        ("q_norm", "fp32", "fused_attention"),
        (".to(",),
    ),
    "fill_value_of_another_dtype": (
        "TR001",
        ("masked_fill", "fp16", "torch.finfo"),
        ("finfo(x.dtype)",),
    ),
    "validation_leaves_fp16_for_the_scaler": (
        "TR002",
        ("log_validation", "fp16", "weight"),
        ("fp32",),
    ),
    "feed_forward_overflows_fp16": ("TR023", ("1.wo", "fp16", "65504"), ("bf16",)),
    "loader_returns_early_in_bf16": (
        "TR017",
        ("load", "set_default_dtype", "restor"),
        ("finally",),
    ),
    "adapter_output_left_in_fp32": ("TR010", ("fp32", "promote"), (".to(x.dtype)",)),
    "ema_in_bf16": ("TR018", ("bf16", "lerp_", "EMA"), ("fp32",)),
    "sgd_by_hand_in_bf16": (
        "TR012",
        ("weight", "bf16", "rounding"),
        ("fp32 master", "stochastic rounding"),
    ),
    "weight_decay_in_bf16": ("TR012", ("weight decay", "bf16"), ("fp32",)),
    "copied_back_from_fp32": ("TR012", ("bf16", "rounding"), ("stochastic rounding",)),
    "one_autocast_around_the_loop": (
        "TR014",
        ("stale", "weight", "autocast"),
        ("clear_autocast_cache",),
    ),
    "rotary_by_autocast_product": ("TR015", ("angle", "bf16", "autocast"), ("fp32",)),
    "positions_made_in_bf16": ("TR015", ("arange", "bf16", "256"), ("fp32",)),
    "timesteps_rounded": ("TR015", ("whole numbers", "bf16"), ("fp32",)),
    "inv_freq_rounded_with_the_model": ("TR015", ("inv_freq", "bf16"), ("fp32",)),
    "gradient_rounded_in_backward": ("TR013", ("RoundingBackward", "bf16", "fp32"), ("dtype",)),
    "validation_casts_the_live_model": (
        "TR011",
        ("log_validation", "fp16", "weight"),
        ("autocast", "deepcopy"),
    ),
    "double_from_numpy": ("TR010", ("fp64", "promote"), (".to(x.dtype)",)),
    "gradients_accumulated_in_bf16": ("TR024", ("weight", "bf16", "additions"), ("fp32",)),
    "metric_summed_in_bf16": ("TR024", ("metric_summed_in_bf16", "bf16"), ("float32",)),
    "builder_never_restores": ("TR017", ("build", "not restored", "linspace"), ("finally",)),
    "timestep_in_the_models_dtype": ("TR015", ("999", "bf16", ".to()"), ("fp32",)),
    "log_probs_gathered_in_bf16": ("TR027", ("bf16", "nats", "sequence"), ("float32",)),
    "compensated_summation": ("TR012", ("weight", "bf16", "rounding"), ("Kahan",)),
    "activations_rounded_without_a_gradient": (
        "TR025",
        ("1 frozen layer: 1.base", "no_grad"),
        ("dequantize=True", "isotype train"),
    ),
    "activations_rounded_by_a_flat_operator": (
        "TR025",
        ("1.base", "derivative is zero"),
        ("weight-only",),
    ),
    "quantised_model_in_bf16": (
        "TR026",
        ("compressed-tensors", "2 frozen", "bf16"),
        ("isotype train",),
    ),
}


@pytest.fixture(autouse=True)
def _default_dtype():
    yield
    torch.set_default_dtype(torch.float32)


def findings_of(name: str, *, broken: bool) -> list:
    with_error = None
    seen = trace()
    try:
        with seen:
            getattr(programs, name)(broken)
    except Exception as error:
        with_error = error
    assert broken or with_error is None, f"the repaired program fails: {with_error}"
    return [finding for finding in seen.findings if finding.severity >= Severity.WARNING]


RIGHT = (
    "logits_gathered_in_bf16",
    "scale_in_python_is_fine",
    "residual_stream_in_place",
    "a_copy_evaluated_in_bf16",
    "sine_of_values_scaled_by_a_bf16_buffer",
)


@pytest.mark.parametrize("name", [*FAULTS, *RIGHT])
def test_fault_is_reported_with_place_cause_and_fix_and_its_repaired_program_is_quiet(name):
    if name in FAULTS:
        code, words, fixes = FAULTS[name]
        found = findings_of(name, broken=True)
        assert [f.code for f in found] == [code], "\n".join(f.render() for f in found)
        text = found[0].render()
        assert [word for word in words if word not in text] == [], text
        assert any(word in found[0].fix for word in fixes), text
        assert Path(programs.__file__).name in text
        torch.set_default_dtype(torch.float32)
    assert [f.render() for f in findings_of(name, broken=False)] == []
