"""The wheel: it holds what users need and nothing else, the doctor's first commands run from it
with the base dependencies alone, and mypy sees its types.

No network: the base dependencies are those of this environment, found by the wheel's own metadata
and linked into an empty environment. Nothing else (torch, numpy, pytest) can be imported there.
"""

import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from email.parser import Parser
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.platforms.test_platforms import BAD

ROOT = Path(__file__).resolve().parents[1]
USER = """
import torch
from isotype import Finding, OpContract, Precision, expect, optimize, restore, trace, train

precision = Precision.preset("bf16-lora")
reveal_type(precision)
reveal_type(precision.base)
reveal_type(optimize)
reveal_type(optimize(torch.nn.Linear(1, 1), precision))
reveal_type(restore(torch.nn.Linear(1, 1)))
with trace(torch.nn.Linear(1, 1)) as seen:
    reveal_type(seen.findings)
reveal_type(train)
precision.bsae
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(
        ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
    )
    options = ["-q", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(folder)]
    command = [sys.executable, "-m", "pip", "wheel", *options, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the wheel and its base dependencies."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    for name in needed(metadata(wheel).get_all("Requires-Dist")):
        link(name, packages)
    return folder / "bin/python"


def metadata(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode("utf-8"))


def needed(requirements: list[str]) -> set[str]:
    """The names of all distributions that these requirements, without extras, bring with them."""
    names: set[str] = set()
    waiting = [Requirement(text) for text in requirements]
    while waiting:
        one = waiting.pop()
        if one.name in names or (one.marker is not None and not one.marker.evaluate({"extra": ""})):
            continue
        names.add(one.name)
        waiting += [Requirement(text) for text in distribution(one.name).requires or []]
    return names


def link(name: str, packages: Path) -> None:
    found = distribution(name)
    for top in {
        file.parts[0] for file in found.files or [] if file.parts[0] not in ("..", "__pycache__")
    }:
        target = packages / top
        if not target.exists():
            target.symlink_to(Path(str(found.locate_file(top))))


def test_it_holds_the_package_and_its_licence_only(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    import isotype

    assert metadata(wheel)["Version"] == isotype.__version__
    info = f"{wheel.name.removesuffix('-py3-none-any.whl')}.dist-info/"
    assert {name.partition("/")[0] for name in names} == {"isotype", info.rstrip("/")}
    assert f"{info}licenses/LICENSE" in names
    ours = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src/isotype").rglob("*")
        if path.is_file()
    }
    ours = {name for name in ours if "__pycache__" not in name}
    assert {name for name in names if name.startswith("isotype/")} == ours, (
        "package-data in pyproject.toml names what is no Python file"
    )
    kinds = {Path(name).suffix for name in ours}
    assert kinds <= {
        ".py",
        ".md",
        ".html",
        ".json",
        ".css",
        ".js",
        ".jinja",
        ".cpp",
        ".h",
        ".tsv",
        ".txt",
        ".typed",
        ".yaml",
        "",
    }
    assert not [
        name
        for name in names
        if re.search(r"(^|/)(tests?|fixtures|conftest\.py|benchmarks)(/|$)", name)
    ]


COMMANDS = (
    (["--help"], 0, "doctor"),
    (
        ["doctor", "explain", "mat1 and mat2 must have the same dtype, but got Float and BFloat16"],
        1,
        "dtype",
    ),
    (["doctor", "check", "lora.yml"], 1, "lora.yml:5"),
    (["doctor", "bad.py"], 1, "CF018"),
    (["import", "lora.yml", "--json"], 0, '"tool": "axolotl"'),
    (["init", "fresh.yaml"], 0, "wrote fresh.yaml"),
    (["train", "run.yaml"], 2, "pip install 'isotype[train]'"),
)


def test_first_commands_run_with_base_dependencies_and_nothing_else(
    environment, tmp_path, subtests
):
    (tmp_path / "lora.yml").write_text(
        "base_model: a/b\nmicro_batch_size: 1\nsequence_len: 512\nadapter: lora\nbf16: true\nfp16: true\n"
    )
    (tmp_path / "bad.py").write_text(BAD)
    (tmp_path / "run.yaml").write_text("model: {name: a/b}\ndata: {train: rows.jsonl}\n")
    (tmp_path / "rows.jsonl").write_text('{"text": "one"}\n')
    clean = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("PYTHON", "VIRTUAL_ENV", "COVERAGE"))
    }
    for command, status, told in COMMANDS:
        run = [str(environment), "-m", "isotype", *command]
        done = subprocess.run(
            run, cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=900, check=False
        )
        with subtests.test(" ".join(command)):
            assert "Traceback" not in done.stderr, done.stderr[-2000:]
            assert told in done.stdout + done.stderr
            assert done.returncode == status, done.stdout + done.stderr
    code = "import importlib.util as u; print([n for n in ('torch', 'numpy', 'transformers', 'pytest', 'triton') if u.find_spec(n)])"
    done = subprocess.run(
        [str(environment), "-I", "-c", code],
        capture_output=True,
        text=True,
        timeout=900,
        check=True,
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.skipif(find_spec("mypy") is None, reason="needs mypy")
def test_a_users_file_sees_classes_and_functions_of_the_installed_wheel(environment, tmp_path):
    """The misspelt role is the one error in the file, and nothing that the package exports is Any.
    torch is not there, and is Any.
    """
    (tmp_path / "user.py").write_text(USER, encoding="utf-8")
    settings = [
        "--follow-imports=silent",
        "--ignore-missing-imports",
        "--no-error-summary",
        "--config-file=",
        "--cache-dir=cache",
    ]
    command = [
        sys.executable,
        "-m",
        "mypy",
        *settings,
        f"--python-executable={environment}",
        "user.py",
    ]
    clean = {
        key: value for key, value in os.environ.items() if key not in ("MYPYPATH", "PYTHONPATH")
    }
    done = subprocess.run(
        command, cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=900, check=False
    )
    lines = [line.partition(": ")[2] for line in done.stdout.splitlines()]
    shown = [line.split('"')[1] for line in lines if line.startswith("note: Revealed")]
    assert shown[0] == "isotype.precision.precision.Precision", done.stdout + done.stderr
    assert shown[1] in ("str", "builtins.str")
    assert shown[2].startswith("def (model: Any, precision:")
    assert shown[3] == "isotype.optimize.manifest.Manifest"
    assert shown[4] in ("int", "builtins.int")
    assert "isotype.finding.Finding" in shown[5]
    assert shown[6].startswith("def (")
    assert shown[6].endswith("isotype.entry.train.Run")
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == 1
    assert "bsae" in errors[0]
