"""The site: it builds without warnings, its pages name what the package offers, and copies of pages lead where the originals lead."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import isotype
import isotype.ops
import isotype.testing
from tests.scripts import script

ROOT = Path(__file__).parents[2]
API = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs/api").glob("*.md"))


def module_of(name: str):
    return script(ROOT / f"docs/{name}.py")


@pytest.fixture(scope="module")
def builder():
    return module_of("build")


@pytest.mark.full
def test_site_has_no_warnings(tmp_path):
    """Reads and resolves every page, and imports what the reference names; writes no HTML, which takes four times as long."""
    pytest.importorskip("sphinx")
    command = [sys.executable, str(ROOT / "docs/build.py"), str(tmp_path / "site"), "--builder", "dummy"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("package", [isotype, isotype.ops, isotype.testing], ids=lambda package: package.__name__)
def test_reference_names_every_public_name(package):
    named = set(re.findall(r"^\.\. auto\w+:: isotype\.(?:[\w.]+\.)?(\w+)$", API, flags=re.MULTILINE))
    assert set(package.__all__) - {"__version__"} <= named, "add what is missing to a page of docs/api"


@pytest.mark.parametrize(
    ("link", "copied"),
    [
        ("[memory](memory.md#how)", "[memory](memory.md#how)"),
        ("[benchmarks](../benchmarks)", "[benchmarks](../benchmarks/README.md)"),
        ("[the plan](../src/isotype/dtypes.py)", "the plan (`src/isotype/dtypes.py`)"),
        ("[`src/isotype/dtypes.py`](../src/isotype/dtypes.py)", "`src/isotype/dtypes.py`"),
        ("[web](https://pytorch.org)", "[web](https://pytorch.org)"),
        ("[gone](nowhere.md)", "[gone](nowhere.md)"),  # left for Sphinx to report
        ("```\n[a](../src)\n```", "```\n[a](../src)\n```"),
    ],
)
def test_links_of_a_copied_page(builder, link, copied):
    assert builder.within_site(link, ROOT / "docs/lora.md") == copied
