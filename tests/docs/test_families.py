"""docs/families.md is what its script writes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def families():
    spec = importlib.util.spec_from_file_location("families", DOCS / "families.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3"])
def test_a_family_stands_in_the_table_with_what_runs_there(families, family):
    assert families.table((family,))[-1] in (DOCS / "families.md").read_text(encoding="utf-8").splitlines()


@pytest.mark.full
def test_the_page_is_what_the_script_writes(families):
    assert families.page() == (DOCS / "families.md").read_text(encoding="utf-8")
