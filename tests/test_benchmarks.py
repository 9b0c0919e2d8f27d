"""Every benchmark runs by path and as a module: `python benchmarks/NAME.py`, `python -m
benchmarks.NAME`.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
NAMES = sorted(file.stem for file in BENCHMARKS.glob("*.py"))
# benchmarks with the name of a module of the standard library
STANDARD = {name for name in NAMES if name in sys.stdlib_module_names}


def import_faults(source: str) -> list[str]:
    """Returns the imports that work in only one of the two ways.

    As a module, a benchmark does not find another one by its name alone. By path, it finds
    `benchmarks` and `tests` only after it has put the repository on `sys.path`.
    """
    tree = ast.parse(source)
    paths = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "sys.path.insert"
    ]
    faults = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or "."]
        else:
            continue
        for module in modules:
            package = module.split(".")[0]
            if package in NAMES and package not in STANDARD:
                faults.append(f"line {node.lineno}: {module}")
            if package in ("benchmarks", "tests") and not any(n < node.lineno for n in paths):
                faults.append(f"line {node.lineno}: {module} without sys.path")
    return faults


@pytest.mark.parametrize("name", NAMES)
def test_imports_work_by_path_and_as_a_module(name):
    source = (BENCHMARKS / f"{name}.py").read_text()
    assert import_faults(source) == []
    if 'if __name__ == "__main__":' in source:
        assert "ArgumentParser" in source, "--help must not start the measurement"


def test_an_import_that_works_in_one_way_only_is_a_fault():
    assert import_faults("from lora import show")
    assert import_faults("from benchmarks.lora import show")
    assert not import_faults("import sys\nsys.path.insert(0, 'x')\nfrom tests.models import tiny")


@pytest.mark.full
@pytest.mark.parametrize("way", ["path", "module"])
@pytest.mark.parametrize("name", ["dora", "goal", "ledger", "packed", "ops_gpu", "lora", "words"])
def test_help_is_printed_both_ways(name, way):
    target = [f"benchmarks/{name}.py"] if way == "path" else ["-m", f"benchmarks.{name}"]
    command = [sys.executable, *target, "--help"]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
