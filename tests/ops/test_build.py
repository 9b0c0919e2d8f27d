"""Where compiled kernels are kept, and that one process at a time builds, where the system can say so."""

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
