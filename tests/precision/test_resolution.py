import pytest

from isotype.errors import UsageError
from isotype.precision import PRESETS, Precision, resolve
from tests.api import OVERFLOWS_IN_FP16, page
from tests.api import contradictions_RULES as RULES


def test_every_preset_resolves_without_a_finding(h100):
    for name in PRESETS:
        resolved = resolve(
            {"preset": name}, device=h100, adapter="lora" if "lora" in name else "none"
        )
        assert resolved.precision == PRESETS[name]
        assert not resolved.warnings
        assert set(resolved.reasons.values()) == {f"preset {name}"}


def test_auto_reports_its_choice_and_the_reason(h100, t4, old_cpu):
    assert resolve(device=h100).preset == "bf16-lora"
    assert resolve(device=h100, adapter="none").preset == "bf16-mixed"
    assert "native bf16" in resolve(device=h100).reasons["compute"]
    on_t4 = resolve(device=t4)
    assert on_t4.preset == "fp16-mixed"
    assert on_t4.precision.trainable == "fp32"
    assert on_t4.precision.loss_scaling == "dynamic"
    assert "65504" in on_t4.reasons["compute"]
    assert resolve(device=old_cpu).preset == "fp32"


def test_an_override_records_its_line(h100):
    resolved = resolve(
        {"preset": "bf16-pure", "rounding": "nearest"},
        device=h100,
        adapter="none",
        sources={"precision.rounding": "run.yaml:9"},
    )
    assert resolved.reasons["rounding"] == "run.yaml:9"
    assert resolved.reasons["grads"] == "preset bf16-pure"
    assert [f.code for f in resolved.warnings] == ["PR008"]
    # and no word of the stochastic rounding that the preset has
    assert resolved.preset_reason == "preset bf16-pure; changed: rounding"
    assert resolve(
        {"preset": "bf16-pure", "rounding": "stochastic"}, device=h100, adapter="none"
    ).preset_reason.endswith("stochastic rounding")


def test_generate_follows_compute_where_it_is_not_set(h100):
    resolved = resolve({"preset": "fp32", "base": "bf16", "compute": "bf16"}, device=h100)
    assert (resolved.precision.generate, resolved.reasons["generate"]) == (
        "bf16",
        "follows compute",
    )


def test_bf16_without_hardware_is_refused_with_both_ways_out(t4):
    with pytest.raises(UsageError, match=r"PR001(.|\n)*Tesla T4(.|\n)*fp16-mixed(.|\n)*fp32"):
        resolve({"preset": "bf16-lora"}, device=t4, sources={"precision.preset": "run.yaml:3"})


def test_a_vae_in_bf16_without_hardware_is_refused(t4):
    with pytest.raises(UsageError, match=r"PR027(.|\n)*Tesla T4(.|\n)*precision.vae: fp32"):
        resolve(
            {"preset": "fp32", "vae": "bf16"},
            device=t4,
            sources={"precision.vae": "run.yaml:3"},
            task_roles={"vae": "fp32"},
        )


def test_roles_of_a_task_are_there_only_with_it(h100):
    assert "vae" not in resolve({"preset": "bf16-lora"}, device=h100).to_dict()
    roles = {"vae": "fp32", "text_encoder": "compute"}
    resolved = resolve({"preset": "bf16-lora"}, device=h100, task_roles=roles)
    assert resolved.to_dict()["vae"] == {"value": "fp32", "reason": "default"}
    assert resolved.to_dict()["text_encoder"] == {"value": "bf16", "reason": "follows compute"}
    assert Precision.parse(str(resolved.precision)) == resolved.precision


def test_base_is_a_setting_where_some_weights_are_frozen_without_an_adapter(h100):
    settings = {"preset": "bf16-mixed", "base": "fp32"}
    assert resolve(settings, device=h100, adapter="none", frozen=True).precision.base == "fp32"
    with pytest.raises(UsageError, match="PR029"):
        resolve(settings, device=h100, adapter="none", frozen=False)


@pytest.mark.parametrize(("adapter", "fix"), [("lora", "precision.base: fp16"), ("none", None)])
def test_two_half_formats_are_refused_with_a_fix_that_is_accepted(h100, adapter, fix):
    settings = {"preset": "bf16-mixed", "compute": "fp16", "loss_scaling": "dynamic"}
    if fix is not None:
        with pytest.raises(UsageError, match=f"PR009(.|\n)*fix +{fix}\n"):
            resolve(settings, device=h100, adapter=adapter)
        settings |= {"base": "fp16"}
    assert resolve(settings, device=h100, adapter=adapter).precision.compute == "fp16"


# code -> settings that break the rule, adapter, optimizer
BROKEN = {
    "PR002": ({"preset": "fp32", "grads": "bf16"}, "lora", "adamw"),
    "PR003": ({"preset": "nf4-lora"}, "none", "adamw"),
    "PR004": ({"preset": "fp16-mixed", "trainable": "fp16"}, "none", "adamw"),
    "PR005": ({"preset": "fp16-mixed", "loss_scaling": "none"}, "none", "adamw"),
    "PR006": ({"preset": "bf16-mixed", "loss_scaling": "dynamic"}, "none", "adamw"),
    "PR007": ({"preset": "fp32", "rounding": "stochastic"}, "none", "adamw"),
    "PR008": ({"preset": "bf16-pure", "rounding": "nearest"}, "none", "adamw"),
    "PR009": ({"preset": "bf16-mixed", "base": "fp16"}, "lora", "adamw"),
    "PR010": ({"preset": "bf16-lora", "loss": "bf16"}, "lora", "adamw"),
    "PR011": ({"preset": "bf16-lora", "optimizer": "bf16"}, "lora", "adamw8bit"),
    "PR012": ({"preset": "bf16-lora"}, "none", "adamw"),
    "PR013": ({"preset": "bf16-lora", "generate": "fp32"}, "lora", "adamw"),
    "PR014": ({"preset": "bf16-lora", "norms": "bf16"}, "lora", "adamw"),
    "PR015": ({"preset": "bf16-lora", "reduce": "bf16"}, "lora", "adamw"),
    "PR016": ({"preset": "bf16-lora", "base": "fp32"}, "lora", "adamw"),
    "PR018": ({"preset": "bf16-pure"}, "none", "muon"),
    "PR017": ({"preset": "fp32", "base": "bf16"}, "lora", "adamw"),
    "PR029": ({"preset": "bf16-mixed", "base": "fp32"}, "none", "adamw"),
    "PR025": ({"preset": "fp32", "timesteps": "bf16"}, "lora", "adamw"),
    "PR028": ({"preset": "fp32", "ema": "bf16"}, "lora", "adamw"),
    "PR026": ({"preset": "fp32", "latents": "bf16"}, "lora", "adamw"),
}


def test_every_rule_has_a_test_and_a_page():
    assert set(RULES) == {*BROKEN, "PR001", "PR027", "PR030", "PR031"}
    for code in RULES:
        text = page(code)
        assert text is not None
        assert {"Why it matters", "Example", "What to do"} <= {
            part.strip("*. ") for part in text.split("**")
        }, code


def test_a_contradiction_names_both_settings_and_the_fix(h100, subtests):
    for code, (settings, adapter, optimizer) in BROKEN.items():
        with subtests.test(code):
            sources = {
                f"precision.{role}": f"run.yaml:{line}" for line, role in enumerate(settings, 3)
            }
            try:
                told = resolve(
                    settings, device=h100, adapter=adapter, optimizer=optimizer, sources=sources
                ).warnings
                text = next(f.render() for f in told if f.code == code)
                assert text.startswith("warning")
            except UsageError as error:
                assert error.exit_status == 2
                text = str(error)
            assert code in text
            assert "run.yaml:" in text
            assert "fix" in text


def test_a_sum_of_many_gradients_in_bf16_is_a_warning(h100):
    for micro_batches, grads, is_warned in (
        (64, "bf16", True),
        (16, "bf16", True),
        (15, "bf16", False),
        (64, "fp32", False),
    ):
        resolved = resolve(
            {"preset": "bf16-pure", "grads": grads},
            device=h100,
            adapter="none",
            sources={"train.accumulate": "run.yaml:7"},
            micro_batches=micro_batches,
        )
        codes = [warning.code for warning in resolved.warnings]
        assert codes == (["PR031"] if is_warned else []), (micro_batches, grads)
        if is_warned:
            text = resolved.warnings[0].render()
            assert f"the gradients of {micro_batches} micro-batches are summed in bf16" in text
            assert "run.yaml:7" in text
            assert "precision.grads: fp32" in text


@pytest.mark.parametrize("family", OVERFLOWS_IN_FP16)
def test_a_family_that_overflows_in_fp16_is_named_and_not_offered_it(family, t4, h100):
    for settings in (
        {"preset": "fp16-mixed"},
        {"preset": "fp32", "compute": "fp16", "base": "fp16", "loss_scaling": "dynamic"},
    ):
        (warning,) = resolve(settings, device=t4, family=family).warnings
        assert warning.code == "PR030"
        assert f"{family} overflows in fp16" in warning.message
        assert "compute in fp32" in warning.cause
    chosen = resolve(device=t4, family=family)
    assert chosen.preset == "fp32"
    assert f"no bf16, and {family} overflows in fp16" in chosen.reasons["compute"]
    assert resolve(device=h100, family=family).preset == "bf16-lora"
    assert not resolve({"preset": "fp16-mixed"}, device=t4, family="llama").warnings


def test_qlora_without_bf16_is_offered_fp16_products(t4):
    """bitsandbytes' nf4 has no need of bf16."""
    with pytest.raises(
        UsageError,
        match=r"PR001(.|\n)*fix +precision.compute: fp16 and precision.loss_scaling: dynamic",
    ):
        resolve({"preset": "nf4-lora"}, device=t4)
    settings = {"preset": "nf4-lora", "compute": "fp16", "loss_scaling": "dynamic"}
    precision = resolve(settings, device=t4).precision
    assert (precision.base, precision.compute, precision.generate) == ("nf4", "fp16", "fp16")
    assert precision.trainable == "fp32"
