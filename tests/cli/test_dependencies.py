"""What an installation without extras can do: every command starts, and says which extra it misses."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import isotype.cli

BASE = {"typer", "pydantic", "rich", "ruamel", "packaging", "isotype"}
WITHOUT_EXTRAS = """
import sys


class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "numpy", "peft", "triton", "click", "huggingface_hub", "datasets"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Missing())
sys.argv = ["isotype", *sys.argv[1:]]
from isotype.cli.app import main

main()
"""


def test_commands_import_nothing_but_base_dependencies():
    for file in Path(isotype.cli.__file__).parent.glob("*.py"):
        for node in ast.parse(file.read_text()).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            for name in names:
                assert name.partition(".")[0] in BASE | sys.stdlib_module_names, f"{file.name}: {name}"


@pytest.mark.parametrize(
    "arguments", [["train", "--model", "m", "--data", "stdlib"], ["doctor", "conform", "x.py:f"], ["eval", ".", "--data", "stdlib"]]
)
def test_a_missing_extra_is_named(arguments, tmp_path):
    (tmp_path / "config.json").write_text("{}")  # a model's folder, as far as can be told
    done = subprocess.run([sys.executable, "-c", WITHOUT_EXTRAS, *arguments], capture_output=True, text=True, timeout=900, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "pip install 'isotype[train]'" in done.stderr
    assert "Traceback" not in done.stderr
