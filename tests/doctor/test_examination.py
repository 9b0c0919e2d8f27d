import json
import os

import pytest
from typer.testing import CliRunner

from isotype.cli.app import build_app
from isotype.errors import UsageError
from tests.api import examine_path

KERNEL = """
import triton
import triton.language as tl


@triton.jit
def scale(x_ptr, out_ptr, factor, do_scale, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    if do_scale != 0:
        x = x.to(tl.float32) * factor
    tl.store(out_ptr + i, x, mask=i < n)
"""
BACKWARD_UNDER_AUTOCAST = """
import torch


def step(model, x, optimizer):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(x).mean()
        loss.backward()
        optimizer.step()


step(torch.nn.Identity(), torch.ones(1), torch.optim.SGD([torch.ones(1)]))
"""


@pytest.fixture
def project(tmp_path):
    (tmp_path / "args.yaml").write_text(
        "output_dir: out\nfp16: true\nbf16: true\nlogging_steps: 10\n"
    )
    (tmp_path / "loader.py").write_text(BACKWARD_UNDER_AUTOCAST)
    (tmp_path / "kernels.py").write_text(KERNEL)
    (tmp_path / "run.log").write_text(
        "RuntimeError: expected mat1 and mat2 to have the same dtype, but got: float != c10::BFloat16\n"
    )
    return tmp_path


def test_every_part_looks_at_what_is_its(project):
    (project / "kernels.py").write_text(KERNEL + "\nraise SystemExit('imported')\n")
    found = {one.part: one for one in examine_path(project)}
    assert set(found) == {"check", "explain", "kernels", "trace"}
    assert {f.code[:2] for one in found.values() for f in one.findings} == {"CF", "EX"}
    assert found["kernels"].subject == f"isotype doctor kernels {project / 'kernels.py'}"


FUNCTION = """
import torch


class Scale(torch.autograd.Function):
    pass


class Twice(Function):
    pass
"""


def test_what_only_its_user_can_run_is_named_with_the_command(tmp_path):
    (tmp_path / "ops.py").write_text(FUNCTION)
    (tmp_path / "train.py").write_text(BACKWARD_UNDER_AUTOCAST)
    (tmp_path / "test_train.py").write_text(BACKWARD_UNDER_AUTOCAST)
    named = {one.part: one.subject for one in examine_path(tmp_path)}
    assert named["conform"] == (
        f"isotype doctor conform {tmp_path / 'ops.py'}:build, where build() returns (Scale, inputs) (1 more autograd function)"
    )
    assert named["trace"] == f"isotype doctor trace {tmp_path / 'train.py'}"
    (tmp_path / "ops.py").write_text(FUNCTION + "\n\ndef build():\n    return Scale.apply, ()\n")
    assert (
        "ops.py:build (1"
        in {one.part: one.subject for one in examine_path(tmp_path / "ops.py")}["conform"]
    )


LOG = "RuntimeError: expected mat1 and mat2 to have the same dtype, but got: float != c10::BFloat16"


@pytest.mark.parametrize(("arguments", "given"), [([], LOG), (["-"], LOG), ([LOG], "")])
def test_a_log_from_standard_input_and_an_error_as_text(arguments, given):
    done = CliRunner().invoke(build_app(), ["doctor", *arguments, "--json"], input=given)
    assert done.exit_code == 1
    assert [f["code"] for f in json.loads(done.stdout)["findings"]] == ["EX001"]


def test_a_code_prints_its_page():
    assert CliRunner().invoke(build_app(), ["doctor", "CF018"]).stdout.startswith("# CF018: ")


@pytest.mark.parametrize(
    ("typed", "right"),
    [("check .", "doctor check"), ("explain x", "doctor explain"),
     ("schema", "init --schema"), ("finetune", "isotype train"), ("env", "doctor env")],
)  # fmt: skip
def test_a_name_typed_by_habit_is_answered_with_the_right_one(typed, right):
    with pytest.raises(UsageError, match=right) as caught:
        CliRunner().invoke(build_app(), typed.split(), catch_exceptions=False)
    assert caught.value.exit_status == 2
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("arguments", [["chek"], ["chek", "."]])
def test_a_word_that_is_neither_a_command_nor_a_path_is_answered_with_the_commands(arguments):
    with pytest.raises(
        UsageError,
        match="chek: no such file or folder, and no command of isotype doctor, which has run, check, explain",
    ):
        CliRunner().invoke(build_app(), ["doctor", *arguments], catch_exceptions=False)


def test_help_lists_commands_in_the_order_in_which_they_are_needed():
    from typer.main import get_command

    names = list(get_command(build_app()).list_commands(None))
    assert names[:5] == ["quickstart", "init", "import", "plan", "train"]
    assert names[-1] == "doctor"
    assert len(names) <= 18


def test_every_command_has_an_example_and_json():
    from typer.main import get_command

    root = get_command(build_app())
    commands = {name: root.commands[name] for name in root.commands if name != "doctor"}
    commands |= {
        f"doctor {name}": command for name, command in root.commands["doctor"].commands.items()
    }
    for name, command in commands.items():
        assert f"isotype {name.removesuffix(' look')}" in (command.help or ""), name
        assert any("--json" in option.opts for option in command.params), name


def test_one_summary_and_an_exit_status(project, tmp_path):
    done = CliRunner().invoke(build_app(), ["doctor", str(project), "--json"])
    assert done.exit_code == 1
    answer = json.loads(done.stdout)
    assert {part["part"] for part in answer["parts"]} == {"check", "explain", "kernels", "trace"}
    (tmp_path / "clean").mkdir()
    (tmp_path / "clean/a.py").write_text("x = 1\n")
    assert CliRunner().invoke(build_app(), ["doctor", str(tmp_path / "clean")]).exit_code == 0


def test_a_folder_without_files_is_reported(tmp_path):
    done = CliRunner().invoke(build_app(), ["doctor", str(tmp_path)])
    assert done.exit_code == 0
    assert "nothing here is a configuration" in done.stdout


def test_pipes_and_links_to_nowhere_are_passed_over(project):
    for suffix in (".py", ".yaml", ".log"):
        os.mkfifo(project / f"pipe{suffix}")
        (project / f"gone{suffix}").symlink_to("nowhere")
    (project / "loop").mkdir()
    (project / "loop/up").symlink_to("..")
    (project / "deep.yaml").write_text("bf16: {a: " * 2000)
    (project / "bomb.yaml").write_text(
        "bf16: 1\na: &a [x, x, x, x]\n" + "".join(f"a{i}: &a [*a, *a, *a, *a]\n" for i in range(20))
    )
    (project / "cells.ipynb").write_text('{"cells": 3}')
    codes = {f.code for one in examine_path(project) for f in one.findings}
    assert {"CF001", "CF099", "EX001"} <= codes
