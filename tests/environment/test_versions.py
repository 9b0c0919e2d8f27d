"""What is recorded of an environment, and how it is made again."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from packaging.requirements import Requirement

from isotype.environment.versions import environment, requirements
from isotype.errors import UsageError


def test_a_run_can_be_repeated_from_its_records(tmp_path):
    recorded = environment()
    (tmp_path / "env.json").write_text(json.dumps(recorded))
    lines = [line for line in requirements(tmp_path).splitlines() if not line.startswith(("#", "--"))]
    pins = {Requirement(line).name: Requirement(line) for line in lines}
    assert str(pins["torch"].specifier) == f"=={recorded['packages']['torch']}"
    assert len(pins) >= len(recorded["packages"])
    assert "isotype" not in pins or "isotype" not in recorded["sources"]


def test_sources_outside_an_index(tmp_path):
    recorded = {"python": "3.12.1", "distributions": {"a": "1", "b": "2", "torch": "2.13.0+cu128"},
                "sources": {"a": "git+https://example.org/a@0123", "b": "a local folder"}}  # fmt: skip
    (tmp_path / "env.json").write_text(json.dumps(recorded))
    text = requirements(tmp_path)
    assert "a @ git+https://example.org/a@0123\n" in text
    assert "# b==2 was installed from a local folder\n" in text
    assert "--extra-index-url https://download.pytorch.org/whl/cu128\n" in text


@pytest.mark.parametrize("content", [None, "", "[]", "{}", '{"distributions": 3, "python": "3"}'])
def test_what_is_no_env_json(tmp_path, content):
    if content is not None:
        (tmp_path / "env.json").write_text(content)
    with pytest.raises(UsageError, match="--requirements"):
        requirements(tmp_path)


def test_the_record_of_a_process_that_set_tf32_by_its_new_name():
    """PyTorch raises when the old name is read then; in a process of its own, since the setting cannot be taken back whole."""
    code = (
        "import torch; torch.backends.cuda.matmul.fp32_precision = 'tf32'; "
        "from isotype.environment.versions import environment; assert environment()['torch']['tf32_matmul'] is True"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
