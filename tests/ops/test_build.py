"""Where compiled kernels are kept, and that one process at a time builds, where the system can say so."""

import sys

import pytest

from isotype.ops import build


def test_the_folder_follows_the_variables(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("ISOTYPE_CACHE", "~/mine")
    assert build.folder() == tmp_path / "mine"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("ISOTYPE_CACHE")
    assert build.folder() == tmp_path / "xdg/isotype"
    monkeypatch.setenv("ISOTYPE_CACHE", "none")
    assert build.folder().name.startswith("isotype-")


@pytest.mark.parametrize("windows", [False, True])
def test_a_build_goes_on_where_there_is_no_flock(tmp_path, monkeypatch, windows):
    if windows:
        monkeypatch.setitem(sys.modules, "fcntl", None)
        monkeypatch.delattr("os.getuid")
        monkeypatch.setenv("USERNAME", "someone")
        monkeypatch.setenv("ISOTYPE_CACHE", str(tmp_path / "mine"))
        assert build.folder() == tmp_path / "mine"
    with build.locked(tmp_path / "x.lock"):
        assert (tmp_path / "x.lock").exists() is not windows
