"""Every example runs as it stands, and every example is run: a file of examples/ that no test here
names fails.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.warm import interpreter

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
SLOW = {"hf_trainer.py", "trl_sft.py"}  # their imports alone take ten seconds
SHORT = {"colours_and_shapes.py": ["10"]}  # a form of some seconds
PROGRAMS = sorted(path.name for path in EXAMPLES.glob("*.py") if not path.name.startswith("test_"))
# notebook -> texts in its output
NOTEBOOKS = {
    "doctor.ipynb": ("TR012", "torch.ones"),
    "proof_t4.ipynb": ("kernels       passed", "| card |"),
}
TESTS = sorted(path.name for path in EXAMPLES.glob("test_*.py"))


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in PROGRAMS],
)
def test_each_example_program_runs_and_prints(name, tmp_path):
    done = run([interpreter(), str(EXAMPLES / name), *SHORT.get(name, ())], tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip()


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_cells_of_a_notebook_run_in_order(name, tmp_path):
    """As one program: without a kernel, so that no notebook server has to be installed."""
    notebook = json.loads((EXAMPLES / name).read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code"), (
        "outputs are not committed"
    )
    (tmp_path / "cells.py").write_text("\n\n".join(cells), encoding="utf-8")
    done = run([interpreter(), "cells.py"], tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    for text in NOTEBOOKS[name]:
        assert text in done.stdout


@pytest.mark.parametrize("name", TESTS)
def test_the_example_of_a_test_file_passes(name, tmp_path):
    done = run(
        [
            interpreter(),
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            str(EXAMPLES / name),
            "--rootdir",
            str(tmp_path),
        ],
        tmp_path,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout


def test_every_file_is_listed_and_run():
    told = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    files = {
        path.name for path in EXAMPLES.iterdir() if path.is_file() and path.name != "README.md"
    }
    assert files == {*PROGRAMS, *NOTEBOOKS, *TESTS}
    assert all(f"]({name})" in told for name in files)
