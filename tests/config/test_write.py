"""What is written reads back the same; the reference in the documentation is the schema's."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isotype.config.load import find_recipe, load, preset_names
from isotype.errors import UsageError
from tests.api import (
    init_yaml,
    is_key_of_kind,
    key_schemas,
    read_value,
    reference_markdown,
    refuse_inapplicable_keys,
    resolved_yaml,
    write_value,
)
from tests.api import kind_LANGUAGE as LANGUAGE

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3)
)


@settings(deadline=None, max_examples=150)
@given(VALUES)
def test_a_value_written_reads_back(value):
    text = write_value(value)
    assert "\n" not in text
    assert read_value(text) == value


def test_text_that_looks_like_something_else_stays_text():
    for value in (
        "a: b",
        "# x",
        "1e-4",
        "null",
        "",
        " x",
        "no",
        "x #y",
        "2024-01-01",
        "0o7",
        "\u2028",
        "é",
        "[a]",
        "a\nb",
        "~",
    ):
        assert read_value(write_value(value)) == value


def test_numbers_are_numbers_in_yaml_1_1_too():
    assert write_value(1e-8) == "1.0e-08"
    assert math.isnan(read_value(write_value(math.nan)))


def test_resolved_yaml_loads_as_the_same_run_and_keeps_its_sources(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "model:\n  name: m\nprecision:\n  grads: fp32\nrun:\n  samples: ['a: b  # c', 'x']\n"
    )
    loaded = load(file, ["train.steps=7", 'model.config={"a": [1, "b: c"]}'], preset="qlora")
    text = resolved_yaml(
        loaded,
        {"precision.base": "preset nf4-lora"},
        {"precision.base": "nf4", "precision.preset": "nf4-lora"},
    )
    again_file = tmp_path / "resolved.yaml"
    again_file.write_text(text)
    again = load(again_file, resolved=True)
    assert again.config == loaded.config
    assert again.sources == loaded.sources
    assert "  # base: nf4                             # preset nf4-lora" in text
    assert f"  grads: fp32                             # {file}:4" in text
    changed = load(again_file, ["train.steps=8"], resolved=True)
    assert changed.sources["train.steps"] == "command line"
    assert changed.sources["train.seed"] == "default"


def test_resolved_yaml_is_the_configuration_of_a_new_run(tmp_path):
    loaded = load(None, ["train.steps=7"], {"model.name": "m", "data.train": "stdlib"})
    file = tmp_path / "resolved.yaml"
    file.write_text(resolved_yaml(loaded, {}))
    again = load(file, ["run.folder=other"])
    assert again.config.train == loaded.config.train
    assert again.sources["train.steps"].startswith(f"{file}:")
    # defaults are not set, so that those of other objectives are no mistakes
    assert again.sources["preference.beta"] == "default"
    refuse_inapplicable_keys(again.config, again.sources)
    assert load(file, preset="full").config.adapter.kind == "none"
    # a value that was edited is set, although the comment still says default
    file.write_text(file.read_text().replace("  beta: 0.1  ", "  beta: 0.3  "))
    edited = load(file)
    with pytest.raises(UsageError, match=r"resolved.yaml:\d+ preference.beta: does not apply"):
        refuse_inapplicable_keys(edited.config, edited.sources)
    (tmp_path / "config.yaml").write_text("# command line: model.name=m\n")
    with pytest.raises(UsageError, match=r"came from the command line\n.*resolved.yaml run.folder"):
        load(tmp_path / "config.yaml")


def test_an_auto_preset_is_written_as_what_it_became(tmp_path):
    loaded = load(None, [], {"model.name": "m"})
    file = tmp_path / "resolved.yaml"
    file.write_text(
        resolved_yaml(
            loaded, {"precision.preset": "auto: it has bf16"}, {"precision.preset": "bf16-lora"}
        )
    )
    assert load(file).config.precision.preset == "bf16-lora"
    assert "# auto: it has bf16" in file.read_text()


def test_the_file_of_init_loads_with_its_preset(tmp_path):
    file = tmp_path / "run.yaml"
    for preset in preset_names():
        file.write_text(init_yaml(preset, model="m: x", data="d.jsonl"))
        config = load(file).config
        assert config.model.name == "m: x"
        for key, value in find_recipe(preset).settings.items():
            section, _, name = key.partition(".")
            assert getattr(getattr(config, section), name) == value


def test_every_commented_line_of_init_is_the_default(tmp_path):
    lines = [
        line.replace("  # ", "  ", 1)
        if line.startswith("  # ")
        and ": " in line
        and line[4:].split(":")[0].replace("_", "").isalnum()
        and line[4:].split(":")[0].islower()
        else line
        for line in init_yaml("lora").splitlines()
    ]
    file = tmp_path / "run.yaml"
    file.write_text("\n".join(line for line in lines if not line.startswith("  # ")) + "\n")
    uncommented = load(file)
    assert (
        uncommented.config
        == load(None, [], {"model.name": "path/to/model", "data.train": "stdlib"}).config
    )
    assert {key for key, where in uncommented.sources.items() if where == "default"} == {
        key for key in key_schemas() if not is_key_of_kind(key, LANGUAGE)
    }


def test_the_documentation_is_the_schema():
    file = Path(__file__).parents[2] / "docs" / "configuration.md"
    assert file.read_text(encoding="utf-8") == reference_markdown(), (
        "isotype init --schema --markdown > docs/configuration.md"
    )
