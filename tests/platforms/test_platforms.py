"""macOS and Windows: what runs there runs without torch and without Linux's modules, and the rest
is refused by name.

The workflow runs this file on real macOS and Windows machines; elsewhere the other system is
pretended (`pretend.py`).
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PRETEND = Path(__file__).with_name("pretend.py")
SYSTEMS = (
    ["win32", pytest.param("darwin", marks=pytest.mark.full)]
    if sys.platform.startswith("linux")
    else [sys.platform]
)
AXOLOTL = """base_model: a/b
micro_batch_size: 1
sequence_len: 512
adapter: lora
datasets:
  - path: c/d
    type: alpaca
bf16: true
fp16: true
"""
BAD = """import torch


def step(model, x, optimizer):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(x).mean()
        loss.backward()
        optimizer.step()
"""
LOG = "RuntimeError: mat1 and mat2 must have the same dtype, but got Float and BFloat16\n"
REFUSED = [
    "train", "plan", "quickstart", "chat", "sample", "eval", "merge", "export", "verify", "inspect",
    "report", "watch", "proof", "try", "doctor trace", "doctor conform", "doctor kernels",
]  # fmt: skip


def isotype(system: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = (
        [sys.executable, str(PRETEND), system]
        if sys.platform.startswith("linux")
        else [sys.executable, "-m", "isotype"]
    )
    return subprocess.run(
        [*command, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=900,
        check=False,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run with spaces").mkdir()
    (tmp_path / "run with spaces/lora.yml").write_text(AXOLOTL, encoding="utf-8", newline="\r\n")
    (tmp_path / "bad.py").write_text(BAD, encoding="utf-8", newline="\r\n")
    (tmp_path / "train.log").write_text(LOG, encoding="utf-8", newline="\r\n")
    return tmp_path


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_doctor_and_import_run_without_torch(system, folder, subtests):
    for arguments, status, told in (
        (["doctor", "check", "run with spaces"], 1, "lora.yml:8"),
        (["doctor", "explain", "train.log"], 1, "dtype"),
        (["doctor", "env"], 1, "torch is not installed"),
        (["doctor", "."], 1, "cf018"),
        (["init", "fresh.yaml"], 0, "wrote fresh.yaml"),
    ):
        done = isotype(system, folder, *arguments)
        with subtests.test(" ".join(arguments)):
            assert "Traceback" not in done.stderr, done.stderr[-2000:]
            assert told in done.stdout.replace("\\", "/").lower(), done.stdout + done.stderr
            assert done.returncode == status, done.stdout + done.stderr
    (folder / "run with spaces/lora.yml").write_text(
        AXOLOTL.replace("fp16: true\n", ""), encoding="utf-8"
    )
    made = isotype(system, folder, "import", "run with spaces/lora.yml", "--out", "run.yaml")
    assert made.returncode == 0, made.stderr
    assert "preset: bf16-lora" in (folder / "run.yaml").read_text(encoding="utf-8")
    again = isotype(system, folder, "doctor", "check", "run.yaml", "--json")
    assert {finding["severity"] for finding in json.loads(again.stdout)["findings"]} <= {"note"}


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_rest_is_refused_by_name(system, folder):
    for command in REFUSED[:2] if sys.platform.startswith("linux") else REFUSED:
        done = isotype(system, folder, *command.split(), "run.yaml")
        assert done.returncode == 2, done.stderr
        assert f"isotype {command} runs on Linux only" in done.stderr
        assert "Traceback" not in done.stderr


def test_every_command_is_either_refused_or_tried_here():
    from isotype.cli.app import LINUX_ONLY, build_app

    commands = {command.name for command in build_app().registered_commands}
    assert set(REFUSED) == set(LINUX_ONLY)
    assert commands - LINUX_ONLY == {"init", "import", "ls"}
