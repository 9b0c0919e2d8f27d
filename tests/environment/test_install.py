"""The line that installs an extra is the one that works for this copy, however it was installed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.api import install

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def installed_copy(tmp_path, monkeypatch):
    """`installed_copy(direct_url)`: this copy lies in a site-packages, with that record beside it;
    none for a copy from an index.
    """

    def record(direct_url: dict | None) -> None:
        information = tmp_path / "site-packages/isotype-9.9.dist-info"
        information.mkdir(parents=True)
        (information / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: isotype\nVersion: 9.9\n"
        )
        if direct_url is not None:
            (information / "direct_url.json").write_text(json.dumps(direct_url))
        monkeypatch.syspath_prepend(tmp_path / "site-packages")
        monkeypatch.setattr(install, "_PACKAGE_FOLDER", tmp_path / "site-packages/isotype")

    return record


def test_a_checkout_in_its_folder_and_from_another(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert install.install_command("gguf") == "pip install -e '.[gguf]'"
    assert install.install_command("train", "quant") == "pip install -e '.[train,quant]'"
    monkeypatch.chdir(tmp_path)
    assert install.install_command("gguf") == f"pip install -e '{ROOT}[gguf]'"


def test_an_editable_installation_of_another_layout(tmp_path, installed_copy):
    source = tmp_path / "my checkout"
    source.mkdir()
    installed_copy({"url": source.as_uri(), "dir_info": {"editable": True}})
    assert install.install_command("gguf") == f"pip install -e '{source}[gguf]'"


def test_a_folder_that_was_not_installed_editable(tmp_path, installed_copy, monkeypatch):
    source = tmp_path / "checkout"
    source.mkdir()
    installed_copy({"url": source.as_uri(), "dir_info": {}})
    assert install.install_command("gguf") == f"pip install '{source}[gguf]'"
    monkeypatch.chdir(source)
    assert install.install_command("gguf") == "pip install '.[gguf]'"


def test_a_wheel_in_a_folder_while_it_is_there(tmp_path, installed_copy):
    wheel = tmp_path / "isotype-9.9-py3-none-any.whl"
    wheel.touch()
    installed_copy({"url": wheel.as_uri(), "archive_info": {}})
    assert install.install_command("gguf") == f"pip install '{wheel}[gguf]'"
    wheel.unlink()
    assert install.install_command("gguf") == "pip install 'isotype[gguf]'"


@pytest.mark.parametrize(
    ("direct_url", "requirement"),
    [
        (None, "isotype[gguf]"),
        (
            {"url": "https://example.org/isotype-9.9-py3-none-any.whl", "archive_info": {}},
            "isotype[gguf] @ https://example.org/isotype-9.9-py3-none-any.whl",
        ),
        (
            {
                "url": "https://example.org/isotype.git",
                "vcs_info": {"vcs": "git", "commit_id": "ab12"},
            },
            "isotype[gguf] @ git+https://example.org/isotype.git@ab12",
        ),
    ],
    ids=["index", "a wheel's address", "a repository"],
)
def test_an_index_and_addresses(installed_copy, direct_url, requirement):
    installed_copy(direct_url)
    assert install.install_command("gguf") == f"pip install '{requirement}'"


def test_a_copy_that_nothing_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(install, "_PACKAGE_FOLDER", tmp_path / "isotype")
    monkeypatch.setattr(install.metadata, "distribution", raise_not_found)
    assert install.install_command("gguf") == "pip install 'isotype[gguf]'"


def raise_not_found(name: str) -> None:
    raise install.metadata.PackageNotFoundError(name)


def test_a_command_whose_package_is_missing_names_the_line(tmp_path):
    """The entry point itself, in a process where the package cannot be imported."""
    code = (
        "import sys; sys.modules['PIL'] = None\n"
        "import isotype.cli.app as app\n"
        "app.build_app = lambda: lambda **_: __import__('PIL')\n"
        "app.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert "fix       pip install -e '.[vision]'" in done.stderr


def test_no_other_module_writes_such_a_line():
    """A line written by hand knows one way of installing; eleven did."""
    written = [
        path.name
        for path in (ROOT / "src/isotype").rglob("*.py")
        if path.name != "install.py" and re.search(r"isotype\[[\w{,]", path.read_text())
    ]
    assert written == []
