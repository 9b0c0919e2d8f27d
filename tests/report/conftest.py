"""A finished run with something in every section of the page."""

from pathlib import Path

import pytest

from .runs import whole


@pytest.fixture
def whole_run(tmp_path: Path) -> Path:
    return whole(tmp_path / "run")
