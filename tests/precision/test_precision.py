import pytest
from hypothesis import given
from hypothesis import strategies as st

from isotype.errors import UsageError
from isotype.precision import PRESETS, ROLES, Precision

halves = st.sampled_from(["fp32", "bf16", "fp16"])
precisions = st.builds(
    Precision,
    base=st.sampled_from(["fp32", "bf16", "fp16", "nf4"]),
    **{role: halves for role in ROLES if role not in ("base", "save")},
    save=st.one_of(halves, st.builds("model {}, adapter {}".format, halves, halves)),
    rounding=st.sampled_from(["nearest", "stochastic"]),
    loss_scaling=st.sampled_from(["none", "dynamic"]),
)


@given(precisions)
def test_text_form_round_trips(precision):
    assert Precision.parse(str(precision)) == precision
    assert [str(preset) for preset in PRESETS.values()] == list(PRESETS)
    assert all(Precision.parse(precision.text(name)) == precision for name in PRESETS)


def test_save_has_a_dtype_for_model_and_for_adapter():
    precision = PRESETS["bf16-mixed"]
    assert (precision.save_model, precision.save_adapter) == ("bf16", "fp32")
    assert Precision(save="adapter fp32").save == "fp32"
    assert Precision(base="bfloat16").base == "bf16"


def test_refuses_a_word_a_role_cannot_have():
    for bad in (
        {"base": "bf17"},
        {"grads": "nf4"},
        {"save": "model bf16, tokenizer fp32"},
        {"save": "nf4"},
        {"lr": "fp32"},
    ):
        with pytest.raises(UsageError, match="PR000"):
            PRESETS["fp32"].but(**bad)
