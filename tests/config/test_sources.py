"""Sources as a user names them."""

from isotype.config.sources import closest_model_hint, missing_folder_hint, short_source_names


def test_sources_are_named_for_a_line():
    assert short_source_names(None) == ""
    assert short_source_names("hf:org/set") == "set"
    assert (
        short_source_names(["data/", {"name": "b/c.csv", "weight": 2}, {"weight": 1}])
        == "data, c.csv, ?"
    )


def test_a_mistyped_model_suggests_the_existing_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, marked in (("models/base", True), ("llama-tiny", True), ("llama-tony", False)):
        (tmp_path / name).mkdir(parents=True)
        if marked:
            (tmp_path / name / "config.json").write_text("{}")
    assert (
        closest_model_hint("llama-tinny")
        == closest_model_hint("./llama-tiny-")
        == ", did you mean llama-tiny?"
    )
    assert closest_model_hint("models/bse") == ", did you mean models/base?"
    assert [
        closest_model_hint(name)
        for name in ("org/name", "else", "a/b\0/c", "~nobody-here/x", "/nowhere/base")
    ] == [""] * 5


def test_a_relative_folder_is_told_where_it_was_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "project/models/base").mkdir(parents=True)
    assert missing_folder_hint("models/base", tmp_path / "project/run.yaml").endswith(
        f"not at the file; it is {tmp_path}/project/models/base"
    )
    assert (
        missing_folder_hint("models/base")
        == f"; it was looked for as {tmp_path}/models/base: relative names begin in the working directory"
    )
    assert missing_folder_hint(str(tmp_path / "gone")) == ""
