"""SECURITY.md: every guarantee names tests that exist; those that stand nowhere else are here."""

import ast
import os
import pickle
import re
import sys
from pathlib import Path

import pytest

from isotype.doctor.explain import explain
from isotype.tasks.choose import train
from tests.api import check_check as check

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
GUARANTEES = PAGE.partition("## Guarantees")[2].partition("A way to break one")[0]
BULLETS = re.findall(r"^\* (.*?)(?=^\* |^#|\Z)", GUARANTEES, re.MULTILINE | re.DOTALL)
NAMED = r"`(tests/[\w/]+\.py)::(\w+)`"


def functions_of(file: Path) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("guarantee", BULLETS, ids=lambda text: text[:40])
def test_every_guarantee_names_its_test(guarantee):
    tests = re.findall(NAMED, guarantee)
    assert tests, guarantee
    for file, function in tests:
        assert function in functions_of(ROOT / file), f"{file} has no {function}"


def test_check_and_explain_run_nothing(tmp_path, monkeypatch):
    mark = tmp_path / "it ran"
    code = f"open({str(mark)!r}, 'w').write('x')\n"

    class Trap:
        def __reduce__(self):
            return exec, (code,)

    project = tmp_path / "project"
    project.mkdir()
    program = code + "from transformers import TrainingArguments\nTrainingArguments(bf16=True)\n"
    for name in ("train.py", "conftest.py", "setup.py", "sitecustomize.py", "usercustomize.py"):
        (project / name).write_text(program)
    for name in ("training_args.bin", "pytorch_model.bin", "optimizer.pt", "state.pkl"):
        (project / name).write_bytes(pickle.dumps(Trap()))
    (project / "config.json").write_text('{"auto_map": {"AutoModel": "train.Model"}}')
    (project / "run.yaml").write_text("model: !!python/object/apply:os.system ['true']\n")
    monkeypatch.chdir(project)
    check([str(project), str(project / "train.py")])
    line = f'  File "{project / "train.py"}", line 1, in <module>\n'
    error = "RuntimeError: expected m1 and m2 to have the same dtype, but got: float != BFloat16\n"
    explain(["Traceback (most recent call last):\n", line, error], source=str(project / "log"))
    assert not mark.exists()


# an audit hook cannot be removed: it notes addresses while there is a list
_addresses: list[str] = []
_is_watching = False


def _note(event: str, args: tuple) -> None:
    if not _is_watching:
        return
    if event == "socket.getaddrinfo":
        _addresses.append(str(args[0]))
    elif event == "socket.connect" and isinstance(args[1], tuple):
        _addresses.append(str(args[1][0]))


def test_a_run_of_local_files_connects_nowhere(configured, monkeypatch):
    global _is_watching
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delitem(os.environ, "HF_HUB_OFFLINE", raising=False)
    sys.addaudithook(_note)
    _is_watching = True
    try:
        assert train(configured(run={"report": True})) == 0
    finally:
        _is_watching = False
    assert _addresses == []
