"""bitsandbytes and the package kernels: code of the hub is run only if the user asks for it."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import isotype

SOURCE = Path(isotype.__file__).parent
# a package that asks for a kernel when it is imported, as bitsandbytes does on some processors
ASKING = """
try:
    from kernels import get_kernel
    get_kernel("kernels-community/quantization-bitsandbytes")
except ImportError:
    pass
import os, pathlib
(pathlib.Path(__file__).parent / "compile").write_text(os.environ["TORCHDYNAMO_DISABLE"])
"""
FLAG = "_kernel_load_failed = False\n"
KERNELS = (
    "import pathlib\ndef get_kernel(name): (pathlib.Path(__file__).parent / 'asked').touch()\n"
)
PROGRAM = """
import sys
{first}
from isotype.environment.hub_kernels import disable_hub_kernels
print(disable_hub_kernels())
import bitsandbytes
import bitsandbytes.backends.mps.ops as operators
disable_hub_kernels()
import kernels
print(operators._kernel_load_failed, kernels.get_kernel is not None)
"""


@pytest.mark.parametrize("first", ["", "import kernels"])
@pytest.mark.parametrize("value", [None, "0", "1"])
def test_bitsandbytes_asks_the_hub_for_no_kernel_unless_asked(tmp_path, value, first):
    for name, text in (
        ("kernels", KERNELS),
        ("bitsandbytes", ASKING),
        ("bitsandbytes/backends", ""),
        ("bitsandbytes/backends/mps", ""),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
    (tmp_path / "bitsandbytes/backends/mps/ops.py").write_text(FLAG)
    environment = {k: v for k, v in os.environ.items() if k != "USE_HUB_KERNELS"}
    environment["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{SOURCE.parent}"
    if value is not None:
        environment["USE_HUB_KERNELS"] = value
    command = [sys.executable, "-c", PROGRAM.format(first=first)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    is_allowed = value == "1"
    assert result.stdout.split() == [str(not is_allowed), str(not is_allowed), "True"]
    assert (tmp_path / "kernels/asked").exists() == is_allowed
    assert (tmp_path / "bitsandbytes/compile").read_text() == "1"


@pytest.mark.full
def test_peft_imports_no_compiler():
    pytest.importorskip("bitsandbytes")
    program = (
        "import os, sys\n"
        "from isotype.environment.hub_kernels import disable_hub_kernels\n"
        "disable_hub_kernels()\n"
        "import bitsandbytes, peft\n"
        "print('torch._inductor.compile_fx' in sys.modules, 'TORCHDYNAMO_DISABLE' in os.environ)"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TORCHDYNAMO_DISABLE"}
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "False"]


def calls_before_import(function: ast.AST) -> bool:
    """Whether a function that imports PEFT's or bitsandbytes' classes calls the guard first."""
    names = [
        node.func.id
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    return bool({"disable_hub_kernels", "require_bitsandbytes"} & set(names))


def test_what_imports_bitsandbytes_switches_hub_kernels_off_first():
    """`packed_product` computes with layers that bitsandbytes has built, so it is imported by then."""
    unguarded = set()
    for file in SOURCE.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        if "bitsandbytes" not in text:
            continue
        for function in ast.walk(ast.parse(text)):
            if not isinstance(function, ast.FunctionDef):
                continue
            imports = {
                alias.name
                for node in ast.walk(function)
                if isinstance(node, ast.Import)
                for alias in node.names
            }
            if "bitsandbytes" in imports and not calls_before_import(function):
                unguarded.add(function.name)
    assert unguarded == {"packed_product"}


def test_the_header_of_an_nf4_run_names_what_is_off(monkeypatch, workshop):
    pytest.importorskip("bitsandbytes")
    import torch

    from isotype.model import load
    from isotype.precision.precision import PRESETS

    monkeypatch.setattr(load, "disable_hub_kernels", lambda: True)
    notes = []
    load.load_base(
        load.Source(str(workshop.base)),
        PRESETS["nf4-lora"],
        attention="sdpa",
        device=torch.device("cpu"),
        trainable=False,
        notes=notes,
    )
    assert any("USE_HUB_KERNELS=1" in note for note in notes)
