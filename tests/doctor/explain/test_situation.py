# ruff: noqa: E501  real texts
"""The same text has another first cause in another situation, and the evidence is named."""

from __future__ import annotations

import pytest

from isotype.doctor.explain import explain

MIXED = "RuntimeError: mat1 and mat2 must have the same dtype, but got Float and BFloat16"
LIB = "/env/lib/python3.11/site-packages"


def traceback(*frames: tuple[str, int, str, str], error: str = MIXED) -> list[str]:
    lines = ["Traceback (most recent call last):"]
    for file, line, function, code in frames:
        lines += [f'  File "{file}", line {line}, in {function}', f"    {code}"]
    return [*lines, error]


LINEAR = (f"{LIB}/torch/nn/modules/linear.py", 125, "forward", "return F.linear(input, self.weight, self.bias)")


@pytest.mark.parametrize(
    ("frames", "cause"),
    [
        ([("/home/me/chat.py", 9, "main", "out = model.generate(**inputs)"), LINEAR], "generate outside autocast"),
        ([("/home/me/t.py", 9, "run", "trainer.evaluate()"), (f"{LIB}/transformers/trainer.py", 1, "evaluation_loop", "x"), LINEAR], "evaluation"),
        ([(f"{LIB}/torch/autograd/function.py", 307, "apply", "return user_fn(self, *args)"), ("/home/me/op.py", 30, "backward", "dW = x.t() @ dy")], "custom backward"),
        ([("/home/me/t.py", 5, "step", "loss.backward()"), (f"{LIB}/torch/_tensor.py", 1, "backward", "torch.autograd.backward(")], "backward"),
        ([("/home/me/m.py", 5, "forward", "logits = self.lm_head(hidden)"), LINEAR], "head"),
        ([("/home/me/m.py", 5, "forward", "y = self.fc(x)"), LINEAR], "activation promoted"),
    ],
)  # fmt: skip
def test_the_first_cause_follows_the_traceback(frames: list[tuple[str, int, str, str]], cause: str):
    (finding,) = explain(traceback(*frames))
    assert cause in (finding.cause or "").partition(":")[0]
    user = next(f for f in reversed(frames) if "site-packages" not in f[0])
    assert (finding.place.file, finding.place.line) == (user[0], user[1])


def test_without_evidence_the_cause_is_marked_as_unsure():
    (finding,) = explain([MIXED])
    details = dict(finding.details)
    assert details["sure"].startswith(("a guess: nothing in the text decides", "open between", "likely: "))
    assert "would tell" in details or details["sure"].startswith("likely")


def test_a_region_that_is_on_is_no_remedy():
    """decorate_autocast stands in the traceback: generation runs under autocast already."""
    frames = [
        ("/home/me/t.py", 3, "main", "model.generate(x)"),
        (f"{LIB}/torch/amp/autocast_mode.py", 44, "decorate_autocast", "return func("),
    ]
    for around, switched_on in ((frames[:1], True), (frames, False)):
        (finding,) = explain(traceback(*around, (f"{LIB}/torch/nn/functional.py", 9, "linear", "linear("), error=f"RuntimeError: {MIXED}"))
        assert finding.fix.splitlines()[0].count("torch.autocast(") == switched_on


def test_a_convolution_is_no_vae_without_one():
    text = "RuntimeError: Input type (c10::Half) and bias type (float) should be the same"
    (finding,) = explain(traceback(("/home/me/t.py", 3, "main", "self.stem(x)"), error=text))
    assert "VAE" not in f"{finding.cause} {finding.fix}"
    (finding,) = explain(traceback(("/home/me/t.py", 3, "main", "vae.encode(x)"), error=text))
    assert finding.cause.startswith("VAE")


def test_expected_scalar_type_in_an_optimizer_is_the_optimizers():
    (finding,) = explain(
        traceback(("/home/me/t.py", 3, "main", "optimizer.step()"), (f"{LIB}/torch/optim/adamw.py", 9, "step", "adamw("), error="RuntimeError: expected scalar type BFloat16 but found Float")
    )  # fmt: skip
    assert finding.code == "EX010"


@pytest.mark.parametrize(
    ("q", "k", "v", "cause"),
    [
        ("float", "float", "c10::BFloat16", "rotary"),
        ("float", "c10::BFloat16", "c10::BFloat16", "KV cache"),
        ("c10::Half", "float", "c10::Half", "key"),
    ],
)
def test_the_odd_one_of_query_key_value(q: str, k: str, v: str, cause: str):
    (finding,) = explain(
        [f"Expected query, key, and value to have the same dtype, but got query.dtype: {q} key.dtype: {k} and value.dtype: {v} instead."]
    )
    assert cause in (finding.cause or "")
