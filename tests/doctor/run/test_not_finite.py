"""`isotype doctor run --nan` names the first operator whose result is not finite. The truth about
each program was written down first; its repaired twin ends without an error.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import nn

from isotype.finding import Finding
from tests.api import NotFiniteError, Recorder, explain_error, report_end, report_failure
from tests.warm import interpreter

PROGRAMS = Path(__file__).parent / "not_finite"


class Truth(NamedTuple):
    """The step, the code, the text of the line, and words of the message, the cause and the fix."""

    step: int
    code: str
    line: str
    message: str
    cause: str
    fix: str


TRUTH = {
    "attention_scores": Truth(
        3,
        "RN030",
        "scores = q @ k.transpose(-2, -1)",
        "bmm gives inf in fp16, and is finite in fp32",
        "which fp16 cannot hold",
        "multiply one factor by the scale before the product",
    ),
    "masked_row": Truth(
        3,
        "RN033",
        "weights = torch.softmax(scores, dim=-1)",
        "softmax gives NaN",
        "rows in which every position is -inf",
        "torch.finfo(x.dtype).min",
    ),
    "log_mask": Truth(
        3,
        "RN033",
        "return F.log_softmax(scores, dim=-1)",
        "log_softmax gives NaN",
        "is -inf: `scores = scores + mask.float().clamp(min=LOWEST).log()`",
        "torch.finfo(x.dtype).min",
    ),
    "masked_division": Truth(
        2,
        "RN033",
        "mean = total / count",
        "div gives NaN",
        "the backward of `mean = total / count`",
        "keep the divisor away from 0 before the division: count.clamp(min=1e-6)",
    ),
    "teacher_log": Truth(
        1,
        "RN030",
        "loss = (p * (p.log() - q.log())).sum(-1).mean()",
        "log gives -inf",
        "they became 0 in `p = teacher(x).softmax(-1)`",
        "F.log_softmax(teacher(x), dim=-1) in place of the logarithm of `teacher(x).softmax(-1)`",
    ),
    "frozen_encoder": Truth(
        1,
        "RN030",
        "latents = encoder(torch.ones(3, 4, dtype=encoder[0].weight.dtype))",
        "addmm gives",
        "which fp16 cannot hold",
        "encoder.to(torch.float32), and its inputs cast to torch.float32 too",
    ),
    "lost_eps": Truth(
        2,
        "RN037",
        "return (rewards - rewards.mean()) / (rewards.std() + 1e-8)",
        "`1e-8` is 0 in fp16, and div gives NaN",
        "so it changes nothing in `return (rewards",
        "write 1e-4 in place of `1e-8`, or compute this line in fp32, with .float() on the inputs",
    ),
    "fixed_loss_scale": Truth(
        1,
        "RN030",
        "loss = model(x).float().square().mean()",
        "gives inf in fp16",
        "`(loss * scale).backward()`",
        "use a smaller loss scale than 65536",
    ),
    "large_gradient": Truth(
        1,
        "RN030",
        "return self.layer(x) * self.scale",
        "mul gives inf in fp16",
        "the backward of `return self.layer(x) * self.scale`",
        'torch.amp.GradScaler("cpu", init_scale=1/32768)',
    ),
    "last_batch": Truth(
        3,
        "RN033",
        "advantage = (batch - batch.mean()) / (batch.std(correction=correction) + 1e-8)",
        "std gives NaN",
        "of a single value",
        "drop_last=True",
    ),
    "empty_mean": Truth(
        3,
        "RN033",
        "loss = selected.mean()",
        "mean gives NaN",
        "averages over no value",
        "skip a batch without selected values",
    ),
    "log_of_zero": Truth(
        3,
        "RN033",
        "log_probs = probs.log()",
        "log gives -inf",
        "gets 0",
        "F.log_softmax(logits, dim=-1) in place of `probs.log()`",
    ),
    "tiny_norm": Truth(
        3,
        "RN030",
        "return hidden / (norm + 1e-12)",
        "div gives inf in fp16",
        "became 0 in `norm = hidden.pow(2).sum(-1, keepdim=True)`",
        "compute `norm = hidden.pow(2).sum(-1, keepdim=True)` in fp32",
    ),
    "broken_checkpoint": Truth(
        1, "RN032", "", "1.weight is not finite before step 1", "1 of 16", "another checkpoint"
    ),
    "data_row": Truth(
        3,
        "RN031",
        "loss = nn.functional.mse_loss(model(inputs).squeeze(-1), targets)",
        "inputs has NaN",
        "in the rows 1;",
        "keep = inputs.isfinite()",
    ),
    "ignored_labels": Truth(
        2,
        "RN033",
        "loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten())",
        "nll_loss_forward gives NaN",
        "every label is -100",
        "skip a batch without labels",
    ),
    "label_sum": Truth(
        2,
        "RN033",
        "loss = loss / count.float()",
        "div gives NaN",
        "every label is -100",
        "skip a batch without labels",
    ),
    "zero_eps": Truth(
        1,
        "RN034",
        "param.addcdiv_(exp_avg, denom, value=-step_size)",
        "Adam makes 0.weight not finite: addcdiv gives NaN",
        "eps=0.0",
        "Adam(..., eps=1e-8)",
    ),
    "second_moment": Truth(
        7,
        "RN034",
        "avg = square_avg.addcmul(grad_avg, grad_avg, value=-1).sqrt_()",
        "sqrt gives NaN",
        "is finite in fp32",
        "keep weights and states in fp32",
    ),
    "learning_rate": Truth(
        3,
        "RN033",
        "loss = (prediction - y).square().mean()",
        "pow gives inf",
        "the updates are too large",
        "lower the learning rate",
    ),
    "scaler_step": Truth(
        1, "RN035", "", "while a loss scaler", "called directly", "scaler.step(optimizer)"
    ),
    "exp_overflow": Truth(
        3,
        "RN033",
        "deviation = torch.exp(0.5 * log_variance)",
        "exp gives inf",
        "the exponential of more than 88",
        "(0.5 * log_variance).clamp(max=20)",
    ),
    "zero_target": Truth(
        3, "RN033", "targets = counts.log()", "log gives -inf", "gets 0", "clamp its input"
    ),
    "angle": Truth(
        3,
        "RN033",
        "angle = torch.acos(cosine)",
        "rsqrt gives inf",
        "the derivative of this function is infinite",
        "keep its input away from 1 and -1: cosine.clamp(-1 + 1e-6, 1 - 1e-6)",
    ),
    "wide_mask": Truth(
        3,
        "RN030",
        "scores = q @ k.transpose(1, 2) + mask.to(q.dtype)",
        "to_copy gives -inf in fp16",
        "casts a value of 3.403e+38 to fp16",
        "torch.finfo(x.dtype).min",
    ),
    "label_count": Truth(
        2,
        "RN033",
        "loss = losses.sum() / count",
        "div gives NaN",
        "divides by a count of 0",
        "count.clamp(min=1)",
    ),
    "half_weight": Truth(
        1,
        "RN032",
        "",
        "gain is not finite before step 1",
        "1 of 2 values of gain (fp16) are inf since the weights were made, loaded or cast",
        "keep gain in fp32 or bf16",
    ),
    "zero_count": Truth(
        3, "RN036", "", "a weight is not finite", "between backward and step", "changes .grad"
    ),
    "frozen_table": Truth(
        2,
        "RN032",
        "",
        "0.weight is not finite",
        "since the weights were made",
        "another checkpoint",
    ),
    "root_at_zero": Truth(
        2,
        "RN033",
        "loss = squared.sqrt().mean()",
        "div gives inf",
        "the derivative of a root or a norm at 0",
        "add a small number under the root",
    ),
    "nan_in_backward": Truth(
        2,
        "RN033",
        "result = torch.where(grad == 0, nan, result)",
        "where writes NaN",
        "writes NaN where `grad == 0` is True, at 5 of 15 positions",
        "restrict the condition `grad == 0`",
    ),
}


def run_in_process(name: str, monkeypatch, *arguments: str) -> NotFiniteError | None:
    """Runs a program under a recorder; returns the error that ended it."""
    path = PROGRAMS / f"{name}.py"
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    code = compile(path.read_text(encoding="utf-8"), str(path), "exec")
    return record(lambda: exec(code, {"__name__": "__main__"}))


def record(program) -> NotFiniteError | None:
    recorder = Recorder()
    recorder.install()
    try:
        program()
    except NotFiniteError as error:
        return error
    finally:
        recorder.uninstall()
    return None


def source_line(finding: Finding) -> str:
    path = Path(finding.place.file)
    if not path.exists():
        path = Path(torch.__file__).parent.parent / path
    return path.read_text(encoding="utf-8").splitlines()[finding.place.line - 1].strip()


@pytest.mark.parametrize("name", TRUTH)
def test_first_operator_cause_and_fix(name, monkeypatch):
    truth = TRUTH[name]
    error = run_in_process(name, monkeypatch)
    assert error is not None
    assert str(error).startswith(f"step {truth.step}: ")
    finding = error.finding
    assert finding.code == truth.code, finding.render()
    if truth.line:
        assert source_line(finding).startswith(truth.line)
    assert truth.message in finding.message
    assert truth.cause in finding.cause
    assert truth.fix in finding.fix


@pytest.mark.parametrize("name", TRUTH)
def test_repaired_program_ends_without_error(name, monkeypatch):
    assert run_in_process(name, monkeypatch, "repaired") is None


def test_every_program_has_its_truth():
    assert {path.stem for path in PROGRAMS.glob("*.py")} == set(TRUTH)


def test_program_under_nan_ends_with_its_traceback_and_the_finding():
    words = ["-m", "isotype.doctor", "run", "--nan", str(PROGRAMS / "masked_row.py")]
    result = subprocess.run(
        [interpreter(), *words], capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 1
    traceback, _, explanation = result.stderr.partition("\nisotype doctor run\n")
    assert "    loss.backward()\n" in traceback
    assert "recorder.py" not in traceback
    assert traceback.endswith("NotFiniteError: step 3: the loss is not finite\n")
    assert explanation.startswith("error RN033 softmax gives NaN")


def train_with_overflows(scaler: torch.amp.GradScaler, steps: int) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    x = torch.full((2, 4), 100.0)
    for _ in range(steps):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(x).float().square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def test_steps_that_a_scaler_leaves_out_are_no_fault():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    assert record(lambda: train_with_overflows(scaler, 12)) is None
    assert scaler.get_scale() < 2**14


def test_scaler_that_leaves_out_every_step_is_a_fault():
    class Overflow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * float("inf")

    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def train():
        for _ in range(6):
            optimizer.zero_grad()
            scaler.scale(Overflow.apply(weight * 2).sum()).backward()
            scaler.step(optimizer)
            scaler.update()

    error = record(train)
    assert "the loss scaler has skipped 3 steps" in str(error)
    assert "gives inf" in error.finding.message


def test_masked_row_that_the_loss_leaves_out_is_named():
    keys = nn.Parameter(torch.randn(2, 3))
    optimizer = torch.optim.SGD([keys], lr=0.1)

    def train(keep):
        optimizer.zero_grad()
        bias = torch.zeros(2, 3).masked_fill(~keep, float("-inf"))
        attention = torch.softmax(keys + bias, -1)
        ((attention @ keys.T)[keep.any(-1)]).sum().backward()
        optimizer.step()

    rows = torch.tensor([[True, False, True], [False, False, False]])
    error = record(lambda: train(rows))
    assert error.finding.message.startswith("softmax gives NaN")
    assert "rows in which every position is -inf" in error.finding.cause
    assert record(lambda: train(rows[:1].expand(2, 3))) is None


def test_mask_of_infinities_is_no_fault():
    scores = nn.Parameter(torch.tensor([[2.0, 1.0, -1.0]]))
    optimizer = torch.optim.SGD([scores], lr=0.1)
    mask = torch.tensor([[False, True, False]])

    def train(factor):
        probabilities = scores.masked_fill(mask, float("-inf")).softmax(-1)
        (probabilities.sum() * factor).log().backward()
        optimizer.step()

    assert record(lambda: train(1.0)) is None
    error = record(lambda: train(-1.0))
    assert error.finding.message.startswith("log gives NaN")
    assert "gets -1" in error.finding.cause


def test_fix_casts_the_model_of_a_layer_and_keeps_large_values_in_fp32():
    source = "def decode(pipe, latents):\n    return pipe.vae(latents).sum()\n"
    library: dict = {}
    exec(compile(source, "/lib/site-packages/library/pipe.py", "exec"), library)
    pipeline = SimpleNamespace(vae=nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).half())
    nn.init.constant_(pipeline.vae[0].bias, 100.0)
    nn.init.constant_(pipeline.vae[1].weight, 6e4)
    latents = torch.ones(1, 2).half()
    error = record(lambda: library["decode"](pipeline, latents).backward())
    assert "pipeline.vae.to(torch.float32), and its inputs" in error.finding.fix
    weight = nn.Parameter(torch.full((2,), 300.0, dtype=torch.float16))
    square = record(lambda: (weight * weight).log().sum().backward())
    assert "keep its result in fp32" in square.finding.fix
    assert "9e+04 does not fit in fp16" in square.finding.fix


def test_fix_names_no_bf16_for_a_device_without_it(monkeypatch):
    weight = nn.Parameter(torch.full((2, 2), 300.0, dtype=torch.float16))
    layer = nn.Linear(2, 2).half()
    nn.init.constant_(layer.weight, 6e4)

    def find_fixes():
        losses = [
            lambda: (weight @ weight).log().sum(),
            lambda: layer(weight).sum(),
            lambda: (weight.float() * 1e4).half().sum(),
            lambda: (weight.float().mean() * 1e8).half(),
            lambda: (weight * 300 * 0.5).sum(),
            lambda: (weight.float() * 1e8).sum(),  # in backward
        ]
        return [record(lambda loss=loss: train(loss)).finding.fix for loss in losses]

    def train(compute_loss):
        optimizer = torch.optim.SGD([weight], lr=0.0)
        compute_loss().backward()
        optimizer.step()

    assert all("bf16" in fix for fix in find_fixes())
    device = {"kind": "cpu", "name": "Tesla T4", "bf16": "none"}
    monkeypatch.setattr("isotype.doctor.run.not_finite.report.detect_devices", lambda: [device])
    fixes = find_fixes()
    assert not any("bf16" in fix for fix in fixes)
    assert "keep the product in fp32" in fixes[0]
    assert fixes[1].startswith("run all of Linear in fp32: Linear.to(torch.float32)")
    assert fixes[2] == "leave this value in fp32"


def test_fix_of_a_sum_with_the_lowest_value_leaves_room():
    def train(lowest):
        mask = torch.tensor([[lowest, lowest]], dtype=torch.float16)
        positions = nn.Parameter(torch.full((1, 2), -500.0, dtype=torch.float16))
        (positions + mask).softmax(-1).sum().backward()

    error = record(lambda: train(torch.finfo(torch.float16).min))
    assert "torch.finfo(torch.float16).min / 2" in error.finding.fix
    assert record(lambda: train(torch.finfo(torch.float16).min / 2)) is None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_result_of_a_program_without_steps_is_explained_at_its_end(mode, capsys, tmp_path):
    recorder = Recorder()
    recorder.install()
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).half()
    nn.init.constant_(model[0].bias, 100.0)
    nn.init.constant_(model[1].weight, 6e4)
    with mode():
        image = model(torch.ones(1, 2).half())
    assert not image.isfinite().any()
    report_end(recorder, str(tmp_path / "fault.json"))
    finding = json.loads((tmp_path / "fault.json").read_text())["finding"]
    assert finding["code"] == "RN030"
    explanation = capsys.readouterr().err
    assert "addmm gives inf in fp16" in explanation
    assert "model.to(torch.float32)" in explanation
    assert "at step" not in explanation


def test_error_about_nan_in_a_program_without_steps_is_explained(capsys):
    head = nn.Linear(2, 4, bias=False).half()
    nn.init.constant_(head.weight, 6e4)
    hidden = torch.ones(1, 2).half()

    def sample_from_module():
        torch.multinomial(head(hidden).softmax(-1), 1)

    def sample_from_function():
        torch.multinomial(nn.functional.linear(hidden, head.weight).softmax(-1), 1)

    def factor_matrix():
        scores = hidden.float().expand(2, 2) / (hidden.float() - 1)
        torch.linalg.svd(scores - scores)

    def check_scores():
        scores = hidden @ head.weight.T
        assert torch.isfinite(scores).all(), "scores are not finite"

    faults = {
        sample_from_module: "addmm gives inf|mm gives inf",
        sample_from_function: "mm gives inf",
        factor_matrix: "div gives inf",
        check_scores: "mm gives inf",
    }
    for program, message in faults.items():
        recorder = Recorder()
        recorder.install()
        with torch.no_grad(), pytest.raises((RuntimeError, AssertionError)) as caught:
            program()
        report_failure(recorder, caught.value, None)
        explanation = capsys.readouterr().err
        assert re.search(message, explanation), (program.__name__, explanation)
        assert torch._C._len_torch_function_stack() == 0
    recorder = Recorder()
    recorder.install()
    scores = hidden @ head.weight.T
    scores = torch.where(torch.isfinite(scores), scores, 0)
    report_end(recorder, None)  # the program has replaced what it checked
    assert "error" not in capsys.readouterr().err


@pytest.mark.parametrize("detects_anomaly", [False, True])
def test_step_that_the_program_itself_refuses_is_explained(capsys, detects_anomaly):
    def train(values):
        weight = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([weight], lr=1e-3)
        with warnings.catch_warnings(), torch.autograd.set_detect_anomaly(detects_anomaly):
            warnings.simplefilter("ignore")
            for factor in values:
                loss = (weight * factor).square().sum().sqrt() if detects_anomaly else None
                loss = (weight * factor).log().sum() if loss is None else loss
                if not torch.isfinite(loss):
                    raise ValueError("Loss is nan, stopping training")
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    recorder = Recorder()
    recorder.install()
    with pytest.raises((ValueError, RuntimeError)) as caught:
        train([1.0, 0.0])
    report_failure(recorder, caught.value, None)
    explanation = capsys.readouterr().err
    assert "at step 2" in explanation
    operator = "div gives inf" if detects_anomaly else "log gives -inf"
    assert operator in explanation, explanation
    recorder = Recorder()
    recorder.install()
    train([1.0, 2.0])
    report_failure(recorder, KeyError("no such row"), None)
    assert capsys.readouterr().err == ""


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(2, 3)

    def forward(self, observations):
        return self.body(observations).exp()


def explain_end(program, capsys) -> str:
    """Returns what is printed at the end of a program without steps."""
    recorder = Recorder()
    recorder.install()
    with torch.no_grad():
        float(program())
    report_end(recorder, None)
    recorder.uninstall()
    return capsys.readouterr().err


def test_zero_of_a_division_by_inf_leads_to_the_inf(capsys):
    def second_order(sigma):
        step = torch.log(1 - sigma) - torch.log(sigma)
        ratio = torch.ones(2) / step
        return (ratio.reciprocal() * 0.5).sum()

    text = explain_end(lambda: second_order(torch.tensor([0.5, 0.0])), capsys)
    assert "`torch.log(sigma)` in" in text, text
    assert "clamp its input: sigma.clamp(min=" in text


def test_negative_power_of_zero(capsys):
    def normalise(degrees):
        return (degrees.pow(-0.5) * 2).sum()

    text = explain_end(lambda: normalise(torch.tensor([2.0, 0.0])), capsys)
    assert "raises 0 to the power -0.5, which divides by 0" in text, text
    assert "degrees.clamp(min=1e-6)" in text


def test_logarithm_of_negative_values_gets_a_bound_above_zero(capsys):
    text = explain_end(lambda: torch.log(1 - torch.tensor([0.5, 2.0])).sum(), capsys)
    assert "for which it is not defined" in text, text
    assert ".clamp(min=1e-6)" in text


class Overlap(nn.Module):
    def forward(self, prediction, target):
        overlap = (prediction * target).sum()
        total = prediction.sum() + target.sum()
        return overlap / total


def test_later_lines_that_overflow_too_are_named(capsys):
    values = torch.ones(70_000, dtype=torch.float16)
    text = explain_end(lambda: Overlap()(values, values), capsys)
    assert "error RN030 sum gives inf" in text, text
    assert re.search(r"does not fit in fp16; the same at \S+test_not_finite.py:\d+", text), text


@pytest.mark.parametrize("samples_with_gradient", [False, True])
@pytest.mark.parametrize("ends_with_error", [False, True])
def test_samples_between_steps_are_explained(ends_with_error, samples_with_gradient, capsys):
    def train(size):
        torch.manual_seed(0)
        policy = Policy()
        optimizer = torch.optim.SGD(policy.parameters(), lr=1e-3)
        for factor in (1.0, size):
            observations = torch.ones(4, 2) * factor
            with torch.set_grad_enabled(samples_with_gradient):
                rates = policy(observations)
                rates = rates / rates.sum(-1, keepdim=True)
            if ends_with_error:
                torch.distributions.Categorical(probs=rates).sample()
            loss = (policy(torch.ones(4, 2)) * rates.detach()).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    recorder = Recorder()
    recorder.install()
    # ValueError by torch.distributions, or RuntimeError by torch.multinomial: the import of the
    # compiler switches the checks of torch.distributions off
    with pytest.raises((NotFiniteError, ValueError, RuntimeError)) as caught:
        train(1e4)
    explain_error(recorder, caught.value, None)
    recorder.uninstall()
    explanation = capsys.readouterr().err
    assert "error RN033 exp gives inf" in explanation, explanation
    assert "self.body(observations).clamp(max=20)" in explanation
    assert record(lambda: train(1.0)) is None


def test_evaluation_after_the_last_step_and_an_unrelated_error(capsys):
    def train(error):
        policy = Policy()
        policy(torch.ones(4, 2)).sum().backward()
        with torch.no_grad():
            assert not policy(torch.full((1, 2), 1e4)).isfinite().all()
        if error is not None:
            raise error

    for error, text in ((None, "exp gives inf"), (KeyError("no such row"), "")):
        recorder = Recorder()
        recorder.install()
        if error is None:
            train(None)
            report_end(recorder, None)
        else:
            with pytest.raises(KeyError):
                train(error)
            explain_error(recorder, error, None)
        explanation = capsys.readouterr().err
        assert text in explanation
        assert bool(text) == bool(explanation), explanation


def test_program_without_steps_and_with_finite_results_says_what_was_checked(capsys):
    recorder = Recorder()
    recorder.install()
    nn.Linear(2, 2)(torch.ones(1, 2))
    report_end(recorder, None)
    assert "saw no backward and no optimizer step" in capsys.readouterr().err
    assert torch._C._len_torch_function_stack() == 0


@pytest.mark.parametrize("read", [lambda t: t.item(), lambda t: f"{t}", lambda t: t.tolist()])
def test_program_without_steps_names_the_function_whose_result_it_reads(capsys, read):
    recorder = Recorder()
    recorder.install()
    with torch.no_grad():
        rewards = torch.ones(4).half()
        masked = torch.where(rewards > 1, rewards / (rewards - rewards), rewards)
        read(masked.sum())  # the quotient is not used
        scores = (rewards - rewards.mean()) / (rewards.std() + 1e-8)
        assert recorder.bad_call is None
        read(scores.sum())
    report_end(recorder, None)
    explanation = capsys.readouterr().err
    assert "error RN037 `1e-8` is 0 in fp16, and div gives NaN" in explanation


EPS = 1e-8


def clamp_near_one(x, limit):
    return x.clamp(-1 + limit, 1 - limit)


class Limits:
    EPS = 1e-9


LIMITS = Limits()


# a computation in a dtype, the numbers that are rounded away, and the change that the fix names
def has_gradient_at_lost_bound() -> bool:
    """True if `clamp` has a gradient where the value equals the bound, as before torch 2.15."""
    x = torch.ones((), requires_grad=True)
    x.clamp(max=1 - EPS).backward()
    return bool(x.grad)


LOST_NUMBERS = [
    (
        lambda x: torch.acos(x.clamp(-1 + EPS, 1 - EPS)),
        torch.float32,
        "`1 - EPS` is 1 in fp32",
        "write 1 - torch.finfo(torch.float32).eps in place of `1 - EPS`",
        lambda x: torch.acos(x.clamp(max=1 - torch.finfo(torch.float32).eps)),
    ),
    (
        lambda x: torch.log1p(-clamp_near_one(x, 1e-6)),
        torch.bfloat16,
        "`1 - limit` is 1 in bf16",
        "write 1 - torch.finfo(torch.bfloat16).eps in place of `1 - limit`",
        lambda x: torch.log1p(-x.clamp(max=1 - torch.finfo(torch.bfloat16).eps)),
    ),
    (
        lambda x: nn.functional.normalize(x - x, dim=0),
        torch.float16,
        "1e-12 is 0 in fp16, so nothing keeps values away from 0",
        "use 1e-4 in place of 1e-12, such as eps=1e-4",
        lambda x: nn.functional.normalize(x - x, dim=0, eps=1e-4),
    ),
    (
        lambda x: x / (x.detach() > 2).half().sum().clamp(min=EPS),
        torch.float16,
        "`EPS` = 1e-08 is 0 in fp16",
        "write 1e-4 in `EPS = 1e-08` (",
        lambda x: x / (x.detach() > 2).half().sum().clamp(min=1e-4),
    ),
    (
        lambda x: torch.log((x - x) + LIMITS.EPS),
        torch.float16,
        "`LIMITS.EPS` = 1e-09 is 0 in fp16",
        "write 1e-4 in `EPS = 1e-09` (",
        lambda x: torch.log((x - x) + 1e-4),
    ),
    (
        lambda x: torch.acos(x * (1 - 1e-4)),
        torch.bfloat16,
        "`1 - 1e-4` is 1 in bf16",
        "write 1 - torch.finfo(torch.bfloat16).eps in place of `1 - 1e-4`",
        lambda x: torch.acos(x * (1 - torch.finfo(torch.bfloat16).eps)),
    ),
]


@pytest.mark.parametrize("case", LOST_NUMBERS)
def test_number_without_effect_is_named_with_a_number_that_has_one(case):
    compute, dtype, cause, fix, repaired = case
    if compute is LOST_NUMBERS[0][0] and not has_gradient_at_lost_bound():
        pytest.skip("this version of torch has no gradient at the bound of the clamp")
    values = torch.tensor([0.5, 1.0], dtype=dtype)

    def train(function):
        weight = nn.Parameter(values.clone())
        optimizer = torch.optim.SGD([weight], lr=1e-4)
        function(weight).sum().backward()
        optimizer.step()

    error = record(lambda: train(compute))
    assert error.finding.code == "RN037", error.finding.render()
    assert cause in error.finding.cause
    assert fix in error.finding.fix
    assert record(lambda: train(repaired)) is None


def divide_by_length(x, bound, floor):
    length = (x.square().sum(-1, keepdim=True) + floor).sqrt()
    return (x / length.clamp(min=bound)).float().sum()


def test_root_that_fails_after_the_change_of_a_number_is_named_too():
    def train(*numbers):
        weight = nn.Parameter(torch.tensor([[1.0, 2.0], [0.0, 0.0]], dtype=torch.float16))
        optimizer = torch.optim.SGD([weight], lr=1e-4)
        divide_by_length(weight, *numbers).backward()
        optimizer.step()

    finding = record(lambda: train(1e-8, 0.0)).finding
    assert finding.code == "RN037", finding.render()
    assert "set `bound` to 1e-4" in finding.fix
    assert "; and add a small number under the root: ((x.square()" in finding.fix
    assert "the backward of `length = " in dict(finding.details)["next"]
    assert record(lambda: train(1e-4, 0.0)) is not None
    assert record(lambda: train(1e-4, 1e-4)) is None


def test_line_that_sets_a_number_without_effect_is_named(tmp_path, monkeypatch):
    (tmp_path / "settings_of_norm.py").write_text(
        "from dataclasses import dataclass\n\n\n"
        "@dataclass\nclass Settings:\n    width: int = 4\n    norm_eps: float = 1e-8\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    source = """
import torch
from torch import nn
from settings_of_norm import Settings

LIMIT = 1e-9

class Norm(nn.Module):
    def __init__(self, width, eps=1e-8):
        super().__init__()
        self.eps = eps

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)

def normalise(x, limit=LIMIT):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True).clamp(min=limit * 0.5))

settings = Settings()
weight = nn.Parameter(torch.tensor([[0.0, 0.0], [1.0, 2.0]], dtype=torch.float16))
"""
    calls = {
        "Norm(settings.width, settings.norm_eps)": "write 1e-4 in `norm_eps: float = 1e-08` (",
        "Norm(2)": "pass 1e-4 in place of the default in `def __init__(..., eps=1e-08)`",
        "Norm(2, eps=1e-10)": "write 1e-4 in `Norm(..., eps=1e-10)` (",
        "normalise": "write 1e-4 in place of `limit * 0.5`",
    }
    update = "torch.optim.SGD([weight], 1.0).step()\n"
    for number, (call, fix) in enumerate(calls.items()):
        program = tmp_path / f"program_{number}.py"  # source code is read once for each file
        program.write_text(f"{source}({call})(weight).sum().backward()\n{update}")
        code = compile(program.read_text(), str(program), "exec")
        finding = record(lambda code=code: exec(code, {"__name__": "program"})).finding
        assert finding.code == "RN037", finding.render()
        assert finding.fix.startswith(fix)
    assert "from `LIMIT = 1e-09` at " in dict(finding.details)["number"]


def moments(x):
    mean = x.mean(-1)
    var = x.square().mean(-1) - mean.square()
    return torch.rsqrt(var + 1e-5)


def moments_fp32(x):
    return moments(x.float())


def moments_clamped(x):
    mean = x.mean(-1)
    var = x.square().mean(-1) - mean.square()
    var = var.clamp(min=1e-6)
    return torch.rsqrt(var + 1e-5)


def distances(x):
    squares = x.square().sum(-1)
    return (squares[:, None] + squares[None] - 2 * (x @ x.T)).sqrt()[0, 1:]


def distances_clamped(x):
    squares = x.square().sum(-1)
    return (squares[:, None] + squares[None] - 2 * (x @ x.T)).clamp(min=1e-6).sqrt()[0, 1:]


def angles(x):
    cosine = (x * x.roll(1, 0)).sum(-1) / (x.norm(dim=-1) * x.roll(1, 0).norm(dim=-1))
    return torch.acos(cosine)


def angles_clamped(x):
    cosine = (x * x.roll(1, 0)).sum(-1) / (x.norm(dim=-1) * x.roll(1, 0).norm(dim=-1))
    eps = torch.finfo(torch.bfloat16).eps
    cosine = cosine.clamp(-1 + eps, 1 - eps)
    return torch.acos(cosine)


def half_power(x):
    return (x.pow(2).mean(-1) - x.mean(-1) ** 2) ** 0.5


def log_probs(logits, dtype=torch.bfloat16):
    normaliser = torch.logsumexp(logits.to(dtype) / 0.7, -1)
    return logits[:, 0].float() / 0.7 - normaliser.float()


def odds(x):
    log_prob = log_probs(x + 20 * (torch.arange(64) == 0))
    odd = log_prob - torch.log(-torch.exp(log_prob) + 1.0001)
    return odd


def odds_fp32(x):
    log_prob = log_probs(x + 20 * (torch.arange(64) == 0), torch.float32)
    return log_prob - torch.log(-torch.exp(log_prob) + 1.0001)


# a computation in bf16, the line whose rounding moves a value, what is printed, and the fixes
MOVED_VALUES = [
    (moments, "var = x.square()", "var = var.clamp(min=1e-6)", [moments_fp32, moments_clamped]),
    (distances, "return (squares[:, None]", ".T)).clamp(min=1e-6) in place", [distances_clamped]),
    (angles, "cosine = (x", "cosine = cosine.clamp(-1 + torch.finfo(", [angles_clamped]),
    (half_power, "return (x.pow(2)", "this line and x in fp32", [lambda x: half_power(x.float())]),
]


@pytest.mark.parametrize("case", MOVED_VALUES)
def test_line_that_rounds_a_value_out_of_a_domain_is_named(case):
    compute, line, fix, repaired = case
    rows = torch.linspace(4.7, 5.4, 16)[:, None] + 0.1 * torch.sin(torch.arange(64.0))
    rows = rows.to(torch.bfloat16)

    def train(function):
        weight = nn.Parameter(rows.clone())
        optimizer = torch.optim.SGD([weight], lr=1e-4)
        function(weight).float().sum().backward()
        optimizer.step()

    finding = record(lambda: train(compute)).finding
    assert finding.code == "RN038", finding.render()
    assert source_line(finding).startswith(line)
    assert "bf16" in finding.cause
    assert "where fp32 has" in finding.cause
    assert fix in finding.fix
    for function in repaired:
        assert record(lambda function=function: train(function)) is None


def test_line_in_bf16_that_moves_a_value_of_fp32_is_named():
    rows = torch.linspace(4.7, 5.4, 16)[:, None] + 0.1 * torch.sin(torch.arange(64.0))

    def train(function):
        weight = nn.Parameter(rows.to(torch.bfloat16))
        optimizer = torch.optim.SGD([weight], lr=1e-4)
        function(weight).sum().backward()
        optimizer.step()

    finding = record(lambda: train(odds)).finding
    line = "`normaliser = torch.logsumexp(logits.to(dtype) / 0.7, -1)` ("
    assert line in finding.cause, finding.render()
    assert f"compute everything from {line}" in finding.fix
    assert "(-torch.exp(log_prob) + 1.0001).clamp(min=1e-6) in place of" in finding.fix
    assert "variance" not in finding.fix
    assert record(lambda: train(odds_fp32)) is None


def divergence(p, q):
    return (p * (p.log() - q.log())).sum()


def sum_of_means(a, b):
    return a.sum() / (a > 0).float().mean() + b.sum() / (b > 1).float().mean()


def srgb(a, b):
    return torch.where(b < 0.1, 12.92 * b, b ** (1 / 2.4) + a ** (1 / 2.4)).sum()


def sum_of_lengths(a, b):
    return (a * a).sum().sqrt() + ((b - 1) * 3).pow(2).sum().sqrt()


# a line with two operators of one name, the one at fault for the values 0.5 and 0 (or 1), the fix
SEVERAL_OPERATORS = [
    (divergence, 0.0, "`q.log()` in `return (p", "q.clamp(min=torch.finfo(q.dtype).tiny)"),
    (sum_of_means, 1.0, "`b.sum() / (b > 1).float().mean()` in", "(b > 1).float().mean().clamp("),
    (sum_of_lengths, 1.0, "the backward of `((b - 1) * 3).pow(2).sum().sqrt()` in", "under the"),
    (
        srgb,
        0.0,
        "`b ** (1 / 2.4)` in `return torch.where(b < 0.1",
        "b.clamp(min=1e-6); torch.where",
    ),
]


@pytest.mark.parametrize("case", SEVERAL_OPERATORS)
def test_operator_of_a_line_with_several_of_its_name_is_named(case):
    compute, value, cause, fix = case

    def train(second):
        first = nn.Parameter(torch.full((3,), 0.5))
        optimizer = torch.optim.SGD([first], lr=1e-4)
        compute(first, first * 0 + second).backward()
        optimizer.step()

    finding = record(lambda: train(value)).finding
    assert cause in finding.cause
    assert fix in finding.fix
    assert record(lambda: train(2.0)) is None


def masked_entropy(x, lowest):
    logs = x.masked_fill(torch.arange(4) == 1, lowest).log_softmax(-1)
    return -(logs.exp() * logs).sum()


def replaced_entropy(x):
    logs = x.masked_fill(torch.arange(4) == 1, float("-inf")).log_softmax(-1)
    return -(logs.exp() * logs.masked_fill(logs.isinf(), 0)).sum()


def masked_divergence(x, lowest):
    mask = torch.arange(4) == 1
    logs = x.masked_fill(mask, lowest).log_softmax(-1)
    target = x.detach().flip(0).masked_fill(mask, lowest).log_softmax(-1)
    return (logs.exp() * (logs - target)).sum()


def weighted_logs(x, lowest):
    keep = torch.tensor([1.0, 0.0, 1.0, 1.0])
    logs = torch.where(keep > 0, x, lowest)
    return torch.mul(keep, logs).sum()


def whiten(matrix):
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(values.sqrt()) @ vectors.T


def project(matrix):
    left, _, right = torch.linalg.svd(matrix * 1.0, full_matrices=False)
    return left @ right


def orthogonalise(matrix):
    return torch.linalg.qr(matrix)[0]


# a decomposition, a matrix for which its derivative does not exist, and by what backward divides
DECOMPOSITIONS = [
    (whiten, torch.eye(4), "differences of the eigenvalues"),
    (project, torch.eye(4) * 2000, "differences of the singular values"),
    (project, torch.diag(torch.tensor([3.0, 2.0, 1.0, 0.0])).repeat(2, 1), "singular values"),
    (orthogonalise, torch.diag(torch.tensor([3.0, 2.0, 0.0, 1.0])), "values on the diagonal of R"),
]


@pytest.mark.parametrize("case", DECOMPOSITIONS)
def test_decomposition_whose_derivative_divides_by_nearly_zero_gets_a_fix_that_runs(case):
    compute, matrix, divisor = case

    def train(change):
        weight = nn.Parameter(matrix.clone())
        optimizer = torch.optim.SGD([weight], lr=1e-4)
        (compute(change(weight)) * torch.arange(len(matrix))[:, None]).sum().backward()
        optimizer.step()

    finding = record(lambda: train(lambda weight: weight)).finding
    assert f"divides by the {divisor}, the smallest of which is 0" in finding.cause
    shifted, _, name = re.search(
        r"input: (?:A = .*?; )?(.*) in place of( )(\w+)", finding.fix
    ).groups()
    assert ("detach()" in finding.fix) == (compute is not orthogonalise)
    assert record(lambda: train(lambda A: eval(shifted, {"torch": torch, name: A}))) is None


class LatentStep(nn.Module):
    """The exponential of a log-variance in two functions."""

    def __init__(self, *bounds):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.bounds = bounds

    def sample(self, logvar):
        return torch.exp((0.5 * logvar).clamp(max=self.bounds[0]))

    def divergence(self, logvar):
        logvar = logvar.clamp(max=self.bounds[1])
        return (logvar.exp() - logvar).sum()

    def forward(self, x):
        logvar = x * self.scale
        return self.sample(logvar).sum() * 1e-9 + self.divergence(logvar) * 1e-9


def train_module(module, *inputs):
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-12)
    module(*inputs).backward()
    optimizer.step()


def test_other_exponentials_that_overflow_in_the_step_are_named():
    x = torch.tensor([1.0, 300.0])
    finding = record(lambda: train_module(LatentStep(1e3, 1e3), x)).finding
    assert "; the same for `logvar.exp()` (" in finding.fix, finding.render()
    assert record(lambda: train_module(LatentStep(20, 1e3), x)) is not None
    assert record(lambda: train_module(LatentStep(20, 20), x)) is None


class MaskedWeights(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.form = form

    def forward(self, x, mask):
        shifted = x * self.scale
        if self.form == "repaired":
            shifted = shifted.masked_fill(mask == 0, float("-inf"))
        weights = torch.exp(shifted)
        if self.form == "where":
            return torch.where(mask, weights, 0.0).sum()
        weights = weights * mask.to(weights.dtype)
        return weights.sum()


def test_exponentials_that_a_mask_discards_are_masked_before():
    x, mask = torch.tensor([1.0, 300.0]), torch.tensor([True, False])
    finding = record(lambda: train_module(MaskedWeights("product"), x, mask)).finding
    assert source_line(finding) == "weights = torch.exp(shifted)"
    assert "`weights * mask.to(weights.dtype)` (" in finding.cause, finding.render()
    assert 'shifted.masked_fill(mask == 0, float("-inf"))' in finding.fix
    finding = record(lambda: train_module(MaskedWeights("where"), x, mask)).finding
    assert source_line(finding) == "weights = torch.exp(shifted)", finding.render()
    assert "backward multiplies it by a gradient of 0" in finding.cause
    assert 'shifted.masked_fill(~mask, float("-inf"))' in finding.fix
    assert record(lambda: train_module(MaskedWeights("repaired"), x, mask)) is None
    # an inf that the mask keeps is not discarded
    finding = record(lambda: train_module(MaskedWeights("product"), x, ~mask)).finding
    assert "clamp its input: shifted.clamp(max=20)" in finding.fix


def overwritten_sigmoid(x):
    x = torch.sigmoid(x)
    return -torch.log(x).sum()


def selected_softmax(x):
    probs = x.softmax(-1)
    return -probs[1].log()


def ratio_of_exponentials(x):
    weights = torch.exp(x)
    return (weights / weights.sum(-1, keepdim=True)).sum()


# an expression that is not finite for large values, and the change of the fix
STABLE_FORMS = [
    (lambda x: -torch.log(torch.sigmoid(2 * x)), "F.logsigmoid(2 * x) in place of `torch.log("),
    (lambda x: -torch.log(1 - torch.sigmoid(x - 1)), "F.logsigmoid(-(x - 1)) in place of `torch."),
    (lambda x: torch.log1p(-x.sigmoid()), "F.logsigmoid(-x) in place of `torch.log1p(-x.si"),
    (lambda x: nn.Softmax(dim=0)(x).log(), "F.log_softmax(x, dim=-1) in place of `nn.Softmax("),
    (lambda x: (1 - (-x.abs() * 0).exp()).log(), "x.abs() * 0).clamp(max=-1e-6))) in place of"),
    (lambda x: torch.log(1 + torch.exp(x)), "F.softplus(x) in place of `torch.log(1 +"),
    (lambda x: x.exp().sum(-1).log(), "torch.logsumexp(x, dim=-1, keepdim=False) in place of `x"),
    (lambda x: 1 / (1 + torch.exp(-x)), "torch.sigmoid(x) in place of `1 / (1 + torch.exp(-x))` ("),
    (ratio_of_exponentials, "torch.softmax(x, dim=-1) in place of `weights / weights.sum("),
    (overwritten_sigmoid, "F.logsigmoid(x) in place of the logarithm of `torch.sigmoid(x)` ("),
    (selected_softmax, "F.log_softmax(x, dim=-1) in place of the logarithm of `x.softmax(-1)` ("),
]


@pytest.mark.parametrize("case", STABLE_FORMS)
def test_expression_with_a_stable_function_gets_this_function(case):
    compute, change = case

    def train(function):
        weight = nn.Parameter(torch.tensor([300.0, -300.0, 1.0]))
        optimizer = torch.optim.SGD([weight], lr=1e-4)
        function(weight).sum().backward()
        optimizer.step()

    finding = record(lambda: train(compute)).finding
    assert change in finding.fix, finding.render()
    stable = finding.fix.partition(" in place of ")[0]
    names = {"torch": torch, "F": nn.functional}
    assert record(lambda: train(lambda x: eval(stable, {**names, "x": x}))) is None


def velocity(x, change=lambda step: step):
    steps = change(torch.tensor([-0.5, -0.25, 0.0]))
    return (x / (steps - 0.0)).sum()


def masked_by_sums(x, change=lambda mask: mask):
    low = torch.finfo(torch.bfloat16).min
    pad = torch.tensor([low, 0, 0], dtype=torch.bfloat16)
    mask = change(pad[None] + pad[:, None] + torch.full((3,), low, dtype=torch.bfloat16))
    return torch.softmax(x + mask, -1).diagonal().sum()


def angle(x, change=lambda cosine: cosine):
    return torch.acos(change(x / x.max())).sum()


def attention(x, change=lambda padding: padding):
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(3, 1)
    padding = change(torch.arange(6).reshape(2, 3) > 2)
    rows = x.expand(3, 2, 3)
    return layer(rows, rows, rows, key_padding_mask=padding)[0].sum()


# a computation, what the fix writes in place of a value, and the name of the value in it
BOUNDS = [
    (velocity, "torch.where((steps - 0.0).abs() < 1e-6, 1e-6, steps - 0.0)", "steps"),
    (masked_by_sums, ".clamp(min=torch.finfo(torch.bfloat16).min) in place of this sum", ""),
    (angle, ".clamp(-1 + 1e-6, 1 - 1e-6)", "x"),
    (attention, "padding & ~padding.all(-1, keepdim=True)", "padding"),
]


@pytest.mark.parametrize("case", BOUNDS)
def test_value_is_bounded_by_code_that_keeps_other_values(case):
    compute, code, name = case

    def train(*change):
        weight = nn.Parameter(torch.tensor([3.0, -1.0, 1.0]))
        optimizer = torch.optim.SGD([weight], lr=1e-4)
        compute(weight, *change).backward()
        optimizer.step()

    finding = record(train).finding
    assert code in finding.fix, finding.render()
    code = code if name and not code.startswith(".") else f"value{code.partition(' in ')[0]}"
    assert (
        record(
            lambda: train(lambda value: eval(code, {"torch": torch, "value": value, name: value}))
        )
        is None
    )


def padded_targets(x, lowest):
    target = torch.full((2, 4), lowest)
    for row in range(2):
        target[row, :3] = torch.tensor([1.0, 2.0, 3.0])
    target = torch.cat([target.unsqueeze(0), target[None]])
    return torch.nan_to_num(x.relu() * 0 * (x - target), neginf=0.0).sum()


def assigned_target(x, lowest):
    target = torch.zeros(4, 1)
    target[3] = lowest
    target = torch.where(torch.ones(()) > 0, target.T.expand(2, 4).contiguous(), 0.0)
    return (x.relu() * 0 * torch.stack([target, target])).sum()


# a computation with -inf on purpose, the operator, and the cause
INFINITIES = [
    (padded_targets, "mul gives NaN", "multiplies 0 by inf", "-inf in `target = torch.full((2"),
    (assigned_target, "mul gives NaN", "multiplies 0 by -inf", "in `target[3] = lowest` ("),
    (masked_entropy, "mul gives NaN", "multiplies 0 by -inf", "logs.masked_fill(logs.isinf(), 0)"),
    (masked_divergence, "sub gives NaN", "subtracts -inf from -inf", "in place of -inf in `logs"),
    (weighted_logs, "mul gives NaN", "multiplies 0 by -inf", "in `logs = torch.where"),
]


@pytest.mark.parametrize("case", INFINITIES)
def test_infinity_on_purpose_that_becomes_nan_is_named_with_its_line(case):
    compute, message, cause, fix = case

    def train(function, *arguments):
        weight = nn.Parameter(torch.tensor([1.0, -1.0, 0.5, 2.0]))
        optimizer = torch.optim.SGD([weight], lr=1e-4)
        function(weight, *arguments).backward()
        optimizer.step()

    finding = record(lambda: train(compute, float("-inf"))).finding
    assert finding.message.startswith(message)
    assert cause in finding.cause
    assert "writes the -inf" in finding.cause
    assert fix in finding.fix
    assert record(lambda: train(compute, -1e4)) is None
    assert record(lambda: train(replaced_entropy)) is None


def where_of_scores(x, number):
    logs = torch.where(x > 0, x.log(), 0.0)  # discards the logarithms of negative numbers
    return torch.where(x > -1, logs, number).sum()


def masked_fill_of_scores(x, number):
    return (x * 2).masked_fill(x < 0, number).max()


class AssignByMask(nn.Module):
    def forward(self, x, number):
        scores = x * 2
        scores[x < 0] = number
        return scores.sum()


def assign_by_mask(x, number):
    scores = x * 2
    scores[x < 0] = number
    return scores.sum()


class AssignByIndex(nn.Module):
    def forward(self, x, number):
        scores = x[None].repeat(2, 1)
        scores[:, torch.tensor([0, 1])] = number
        return scores.sum()


def fill_by_index(x, number):
    scores = (x * 2).index_fill(0, torch.tensor([0, 1]), number)
    return scores.sum()


# a constant that reaches the loss, the line, and the cause
WRITTEN_CONSTANTS = [
    (where_of_scores, "return torch.where(x > -1", "where `x > -1` is False, at 1 of 4"),
    (masked_fill_of_scores, "return (x * 2)", "where `x < 0` is True, at 1 of 4"),
    (AssignByMask(), "scores[x < 0] = number", "where `x < 0` is True, at 1 of 4"),
    (assign_by_mask, "scores[x < 0] = number", "where `x < 0` is True, at 1 of 4"),
    (AssignByIndex(), "scores[:, torch", " at 4 of 8"),
    (fill_by_index, "scores = (x * 2)", " at 2 of 4"),
]


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("case", WRITTEN_CONSTANTS)
def test_constant_that_is_written_and_stays_is_named(case, number):
    compute, line, cause = case

    def train(number, function=compute):
        weight = nn.Parameter(torch.tensor([1.0, -1.0, 0.5, 2.0]))
        optimizer = torch.optim.SGD([weight], lr=1e-4)
        function(weight, number).backward()
        optimizer.step()

    finding = record(lambda: train(number)).finding
    assert source_line(finding).startswith(line), finding.render()
    assert f"writes {number}".lower() in finding.cause.lower()
    assert cause in finding.cause
    if compute is not where_of_scores:  # whose discarded logarithm has a gradient of 0 * NaN
        assert record(lambda: train(0.0)) is None


def test_constant_that_is_discarded_is_no_fault():
    def train(factor):
        weight = nn.Parameter(torch.tensor([1.0, -1.0, 0.5, 2.0]))
        optimizer = torch.optim.SGD([weight], lr=1e-4)
        nearest = weight.masked_fill(weight < 0, float("inf")).min()
        mean = torch.where(weight < 0, float("nan"), weight).nanmean()
        ((nearest + mean) * factor).log().backward()
        optimizer.step()

    assert record(lambda: train(1.0)) is None
    finding = record(lambda: train(-1.0)).finding
    assert source_line(finding) == "((nearest + mean) * factor).log().backward()"
    assert finding.message.startswith("log gives NaN")


class Overwrite(nn.Module):
    def forward(self, x):
        logs = x.detach().log()
        logs[x < 0] = 0.0
        return (x.abs() * logs.sqrt()).sum()


def test_nan_that_is_overwritten_is_no_cause():
    weight = nn.Parameter(torch.tensor([1.0, -1.0, 0.5, 2.0]))
    finding = record(lambda: Overwrite()(weight).backward()).finding
    assert source_line(finding).startswith("return (x.abs() * logs.sqrt()"), finding.render()
    assert "gets -0.693" in finding.cause


def test_running_statistics_that_become_nan_or_inf_are_named(capsys):
    def train(size=1.0, *, skips=False, keeps_fp32=False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        if not skips:
            model.half()
        if keeps_fp32:
            model.get_submodule("1").float()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for step in range(3):
            features = torch.randn(8, 4).to(model[0].weight.dtype) * size
            if skips and step == 1:
                features[2, 1] = float("nan")
            loss = model(features).float().square().mean()
            if not loss.isfinite():
                continue  # the statistics keep the NaN
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return model

    error = record(lambda: train(3000.0))
    assert str(error) == "step 1: 1.running_var is not finite"
    assert error.finding.code == "RN039"
    assert "are not finite: the variance of the inputs reaches" in error.finding.cause
    assert 'model.get_submodule("1").float()' in error.finding.fix
    assert record(lambda: train(3000.0, keeps_fp32=True)) is None

    error = record(lambda: train(skips=True))
    assert str(error) == "step 2: 1.running_mean is not finite"
    assert error.finding.code == "RN031"
    assert "in the rows 2;" in error.finding.cause
    assert "1.running_mean keeps the NaN" in dict(error.finding.details)["buffer"]

    texts = {1e-2: "", 3e3: "a call of model", float("nan"): "argument 0 has NaN before the model"}
    for size, text in texts.items():
        recorder = Recorder()
        recorder.install()
        model = train()
        with torch.no_grad():
            model(torch.randn(8, 4).half() * size)  # in training mode, as swa_utils.update_bn
        report_end(recorder, None)
        explanation = capsys.readouterr().err
        assert text in explanation
        assert bool(text) == bool(explanation), explanation


def test_setting_that_is_not_finite_is_named():
    def train():
        weight = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.AdamW([weight], lr=1e-3)
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float("nan"))
        weight.sum().backward()
        optimizer.step()

    finding = record(train).finding
    assert finding.cause == "the setting lr of the parameter group is nan"
    assert "max(1, warmup_steps)" in finding.fix


def test_rows_that_were_not_initialised_are_named():
    table = nn.Embedding(4, 2)
    with torch.no_grad():
        table.weight[2:] = float("nan")

    def train():
        optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
        table(torch.tensor([0, 1])).sum().backward()
        optimizer.step()

    finding = record(train).finding
    assert finding.code == "RN032"
    assert "4 of 8 values of weight (fp32), in the rows 2, 3, are NaN" in finding.cause


def test_statistics_without_a_gradient_and_integers_in_fp16_are_explained():
    weight = nn.Parameter(torch.ones(3, dtype=torch.float16))

    def use_groups(size):
        with torch.no_grad():
            rewards = torch.rand(3).view(-1, size)
            advantages = (rewards - rewards.mean(1, True)) / (rewards.std(1, keepdim=True) + 1e-4)
        (advantages.flatten() * weight).sum().backward()

    finding = record(lambda: use_groups(1)).finding
    assert finding.message.startswith("std gives NaN")
    assert "of a single value" in finding.cause
    assert record(lambda: use_groups(3)) is None

    positions = torch.arange(70000, 70003)
    finding = record(lambda: (positions.half() * weight).cos().sum().backward()).finding
    assert "leave these integers in fp32" in finding.fix


def test_variance_that_rounding_makes_negative_and_product_with_infinity_are_explained():
    values = nn.Parameter(torch.tensor([30.0, 31.0], dtype=torch.bfloat16))

    def standardise():
        variance = (values * values).mean() - values.mean() * values.mean()
        variance.sqrt().backward()

    finding = record(standardise).finding
    assert finding.cause.startswith("`variance = (values * values)")
    assert "x.var(correction=0) is never negative" in finding.fix

    def mask_by_product():
        bias = (1.0 - torch.tensor([1.0, 0.0])) * float("-inf")
        torch.softmax(nn.Parameter(torch.ones(2)) + bias, -1).sum().backward()

    finding = record(mask_by_product).finding
    assert "multiplies 0 by an infinite number" in finding.cause
    assert "torch.where(mask == 0" in finding.fix


def test_line_of_an_own_backward_is_named():
    class StableLog(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return (x.float() + 1e-8).log()

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            return gradient.to(x.dtype) / (x + 1e-8)

    weight = nn.Parameter(torch.tensor([0.0, 1.0], dtype=torch.float16))
    optimizer = torch.optim.SGD([weight], lr=1e-3)

    def train():
        StableLog.apply(weight).sum().backward()
        optimizer.step()

    finding = record(train).finding
    assert finding.code == "RN037"
    assert source_line(finding) == "return gradient.to(x.dtype) / (x + 1e-8)"
    assert finding.fix.startswith("write 1e-4 in place of `1e-8`")


@pytest.mark.parametrize("has_lists", [False, True])
def test_eps_of_an_own_optimizer_is_named(has_lists):
    class Scaled(torch.optim.Optimizer):
        def __init__(self, parameters, eps):
            super().__init__(parameters, {"lr": 1e-3})
            self.eps = eps

        @torch.no_grad()
        def step(self, closure=None):
            parameters = self.param_groups[0]["params"]
            if has_lists:
                gradients = [parameter.grad for parameter in parameters]
                sizes = torch._foreach_abs(gradients)
                torch._foreach_add_(sizes, self.eps)
                torch._foreach_addcdiv_(parameters, gradients, sizes, value=-1.0)
                return
            for parameter in parameters:
                parameter.sub_(parameter.grad / (parameter.grad.abs() + self.eps))

    def train(eps):
        weight = nn.Parameter(torch.ones(2, dtype=torch.float16))
        optimizer = Scaled([weight], eps)
        weight[0].backward()
        optimizer.step()

    error = record(lambda: train(1e-8))
    assert error.finding.code == "RN034"
    assert "`self.eps` = 1e-08 is 0 in fp16" in error.finding.cause
    assert error.finding.fix.startswith("write 1e-4 in `train(..., eps=1e-08)` (")
    assert record(lambda: train(1e-4)) is None
    if has_lists:
        finding = record(lambda: train(0.0)).finding
        assert finding.cause.endswith("divides by 0")
        assert "torch._foreach_clamp_min_(sizes, 1e-4)" in finding.fix


def test_results_before_a_step_are_no_fault(capsys):
    model = nn.Linear(1, 1)

    def train():
        with torch.no_grad():
            model(torch.tensor([[float("nan")]]))
        model(torch.ones(1, 1)).sum().backward()

    recorder = Recorder()
    recorder.install()
    train()
    report_end(recorder, None)
    assert capsys.readouterr().err == ""
    assert recorder.finish() is None


def test_initialisation_is_not_run_again():
    def train():
        layer = nn.Linear(2, 1)
        nn.init.constant_(layer.weight, 1.0)
        layer.weight.data.fill_(3e38)
        layer(torch.full((1, 2), 10.0)).sum().backward()

    error = record(train)
    assert error.finding.message.startswith("addmm gives inf")
    assert "weight" in error.finding.cause


def test_warning_of_an_operator_names_the_line_of_the_program():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        recorder = Recorder()
        recorder.install()
        try:
            line = sys._getframe().f_lineno + 1
            torch.ones(1).std()
            nn.functional.softmax(torch.ones(2, 2))
        finally:
            recorder.uninstall()
    places = [(warning.filename, warning.lineno) for warning in caught]
    assert places == [(__file__, line), (__file__, line + 1)]


def test_nothing_is_left_behind():
    originals = (nn.Module.__call__, torch.autograd.backward, torch.autograd.Function.apply)
    record(lambda: None)
    assert (nn.Module.__call__, torch.autograd.backward, torch.autograd.Function.apply) == originals
    assert torch._C._len_torch_function_stack() == 0


def test_writes_into_parts_of_weights_without_gradients_are_left_alone():
    def train():
        table = nn.Embedding(10, 4, padding_idx=0)  # fills a row of its weight with 0
        optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
        for _ in range(2):
            with torch.no_grad():
                row = table.weight[1]
                row.mul_(0.5)
                table.weight.view(-1)[3] = 2.0
            table(torch.tensor([1, 2])).square().sum().backward()
            optimizer.step()

    assert record(train) is None
