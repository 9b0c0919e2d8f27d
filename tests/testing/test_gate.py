"""The gate stops a wrong function with the question that it fails, and lets right ones pass."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from tests.api import check_wrapper, load_gate_target, load_target, run_gate
from typer.testing import CliRunner

from isotype.cli.app import build_app
from isotype.errors import UsageError
from isotype.pages import page
from isotype.testing import ampcheck

FILE = str(Path(__file__).with_name("gated.py"))
KERNELS = str(Path(__file__).with_name("gated_kernels.py"))


def ask(name: str, **options):
    return run_gate(load_gate_target(f"{FILE}:{name}", "reference"), **options)


def failed(result) -> list[str]:
    return [question.name for question in result.questions if question.verdict == "fail"]


def test_a_right_function_passes() -> None:
    result = ask("TanhLinear")
    assert result.verdict == "pass", result.render()
    assert result.status == 0
    assert result.findings == []
    details = {question.name: question.detail for question in result.questions}
    assert details["fp64"] == "compared in fp64"
    # an error that passes is not larger than allowed, also where the reference has hardly any
    share = float(details["precision"].removeprefix("at most ").split()[0])
    assert 0 < share <= 1
    assert "allowed" in details["precision"]
    assert details["kernels"] == "no Triton kernel is launched"


def test_a_function_with_a_compiled_part_runs_it_uncompiled() -> None:
    target = load_gate_target(f"{FILE}:CompiledPart", "reference")
    arguments = target.build_inputs()
    report = ampcheck(target.function, arguments, reference=target.reference, raises=False)
    assert report.findings == (), report.render()
    assert report.compared_in == "fp64"
    pytest.importorskip("triton")
    assert "inputs as given" not in check_wrapper(target.function, arguments).refused


@pytest.mark.parametrize(
    ("name", "question", "code"),
    [
        ("WrongFormula", "fp64", "AC023"),
        pytest.param("Imprecise", "precision", "AC006", marks=pytest.mark.full),
        pytest.param("Unscaled", "gradients", "AC002", marks=pytest.mark.full),
        pytest.param("WrongDtype", "dtypes", "AC004", marks=pytest.mark.full),
        ("reads_while_traced", "compile", "AC024"),
    ],
)
def test_a_wrong_function_fails_at_its_question(name: str, question: str, code: str) -> None:
    result = ask(name)
    assert question in failed(result), result.render()
    assert result.status == 1
    assert code in [finding.code for finding in result.findings]
    assert page(code)


def test_a_line_that_the_compiler_cannot_trace() -> None:
    (finding,) = ask("InheritsForward").findings
    assert finding.code == "AC024"
    source = "return super().forward(ctx, x, weight)"
    assert finding.cause == f"the compiler cannot trace `{source}`"
    lines = Path(FILE).read_text().splitlines()
    assert lines[finding.place.line - 1].strip() == source


def test_a_question_that_cannot_be_asked_is_no_pass() -> None:
    result = ask("random_noise")
    assert result.verdict == "not asked", result.render()
    assert result.status == 2


@pytest.mark.full
def test_a_kernel_for_each_multiprocessor(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr("isotype.testing.amp.numerics.MANY_ROWS", 16)  # the interpreter is slow
    target = load_gate_target(f"{KERNELS}:PerMultiprocessor", "reference")
    is_available = torch.cuda.is_available
    report = ampcheck(target.function, target.build_inputs(), raises=False)
    assert report.tried
    assert report.findings == (), report.render()
    assert torch.cuda.is_available is is_available


@pytest.mark.full
def test_a_kernel_passes_or_is_stopped_by_scalars_and_offsets() -> None:
    pytest.importorskip("triton")
    sizes = (65537, 32768)
    right = run_gate(load_gate_target(f"{KERNELS}:Right", "reference"), largest=sizes)
    assert right.verdict == "pass", right.render()
    small = run_gate(load_gate_target(f"{KERNELS}:Narrow", "reference"), largest=(64, 64))
    assert failed(small) == ["compile"], small.render()
    narrow = run_gate(load_gate_target(f"{KERNELS}:Narrow", "reference"), largest=sizes)
    assert failed(narrow) == ["compile", "offsets"]
    assert {"KN021", "KN022"} == {finding.code for finding in narrow.findings}


def test_inputs_may_be_one_tensor() -> None:
    pytest.importorskip("triton")
    target = load_gate_target(f"{KERNELS}:launch", "reference")

    def scaled_tanh(x):
        return target.function(x, True) if x.is_cuda else torch.tanh(x * 0.7)

    (tensor,) = target.build_inputs()
    one_tensor = dataclasses.replace(target, function=scaled_tanh, build_inputs=lambda: tensor)
    kernels = next(q for q in run_gate(one_tensor).questions if q.name == "kernels")
    assert kernels.detail.startswith("scaled_tanh"), kernels.detail


def test_offsets_do_not_pass_if_the_function_raises_on_a_gpu() -> None:
    pytest.importorskip("triton")
    target = load_gate_target(f"{KERNELS}:launch", "reference")

    def refuses_a_gpu(x):
        if x.is_cuda:
            raise ValueError("needs a CPU")
        return torch.tanh(x * 0.7)

    result = run_gate(dataclasses.replace(target, function=refuses_a_gpu), largest=(8, 8))
    answers = {question.name: question for question in result.questions}
    for name in ("kernels", "offsets"):
        assert answers[name].verdict == "not asked", result.render()
        assert "needs a CPU" in answers[name].detail


def test_offsets_that_were_not_asked_do_not_stop_a_pass(tmp_path: Path) -> None:
    """Most calls state no largest shape."""
    result = ask("TanhLinear")
    offsets = result.questions[-1]
    offsets.verdict = "not asked"
    offsets.is_required = False
    assert result.verdict == "pass"


def test_the_command_has_one_exit_status_and_json(tmp_path: Path) -> None:
    arguments = ["doctor", "gate", f"{FILE}:needs_a_gpu", "--against", "reference"]
    run = CliRunner().invoke(build_app(), [*arguments, "--json"])
    assert run.exit_code == 2
    answer = json.loads(run.stdout)
    assert answer["verdict"] == "not asked"
    assert answer["questions"]["fp64"]["verdict"] == "not asked"
    assert "needs a GPU" in answer["questions"]["fp64"]["detail"]
    run = CliRunner().invoke(build_app(), arguments)
    assert run.stdout.rstrip().endswith("verdict: not asked")
    run = CliRunner().invoke(build_app(), [*arguments, "--largest", "12,x"])
    assert isinstance(run.exception, UsageError)


def test_a_file_that_needs_a_gpu_to_be_imported(tmp_path: Path) -> None:
    """unsloth refuses to be imported without a GPU."""
    pytest.importorskip("triton")
    file = tmp_path / "needs_gpu.py"
    file.write_text(
        "import torch\nif not torch.cuda.is_available():\n    raise NotImplementedError('no GPU')\n"
        "def f(x):\n    return x\ndef inputs():\n    return (torch.ones(2),)\n"
        "def build():\n    return f, inputs()\n"
    )
    assert load_gate_target(f"{file}:f", "f").function(3) == 3
    assert load_target(str(file)).function(3) == 3
    assert not torch.cuda.is_available()


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    file = tmp_path / "bare.py"
    file.write_text("def f(x):\n    return x\n")
    with pytest.raises(UsageError, match="has no 'g'"):
        load_gate_target(f"{file}:f", "g")
    with pytest.raises(UsageError, match="no function inputs"):
        load_gate_target(f"{file}:f", "f")
    with pytest.raises(UsageError, match=r"expected FILE.py:FUNCTION"):
        load_gate_target("f", "g")


def test_a_limit_of_the_interpreter_is_not_a_fault_of_the_function() -> None:
    def reference(x):
        return x * 2

    def needs_atomics(x):
        if x.dtype == torch.bfloat16:
            # Triton's interpreter wraps the NotImplementedError of `refuse_bf16`
            raise RuntimeError("an atomic operation of bf16 has no CPU version: widen to fp32")
        return x * 2

    report = ampcheck(needs_atomics, (torch.ones(3, 4),), reference=reference, raises=False)
    assert report.codes() == [], report.render()
    assert any("no kernel" in reason for _, reason in report.refused)
