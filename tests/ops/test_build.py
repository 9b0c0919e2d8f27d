"""Where compiled kernels are kept, and that one process at a time builds, where the system can say so."""

import os

import pytest

from isotype.ops import cpp as ops_cpp


def test_the_folder_follows_the_variables(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("ISOTYPE_CACHE", "~/mine")
    assert ops_cpp.folder() == tmp_path / "mine"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("ISOTYPE_CACHE")
    assert ops_cpp.folder() == tmp_path / "xdg/isotype"
    monkeypatch.setenv("ISOTYPE_CACHE", "none")
    assert ops_cpp.folder().name.startswith("isotype-")


@pytest.mark.skipif(ops_cpp.cpu_compiler() is None, reason="no C++ compiler")
def test_using_a_cached_library_renews_its_age(tmp_path, monkeypatch):
    monkeypatch.setenv("ISOTYPE_CACHE", str(tmp_path / "kept"))
    source = tmp_path / "one" / "kernels.cpp"
    source.parent.mkdir()
    source.write_text('extern "C" int one() { return 1; }\n')
    assert ops_cpp.library(source).one() == 1
    (built,) = (path for path in ops_cpp.built_files() if path.suffix == ".so")
    os.utime(built, (0, 0))
    assert ops_cpp.library(source).one() == 1
    assert built.stat().st_mtime > 0
