"""docs/data.md: every example file is loaded, every example configuration is read, and both are
what the page says.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from isotype.config.load import load
from isotype.config.sources import check_data
from isotype.data.load import load_data
from isotype.data.rows import IGNORE_INDEX

PAGE = (Path(__file__).parents[2] / "docs/data.md").read_text(encoding="utf-8")
FILES = re.findall(
    r"^(?:\*\*(?P<format>[a-z_]+)[^*]*\*\* )?`(?P<name>[\w.]+)`[^\n]*\n\n```\w+\n(?P<text>.*?)^```",
    PAGE,
    re.M | re.S,
)
SETTINGS = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.M | re.S)

# a template that writes tools and calls, as those of tool-using models do
WITH_TOOLS = """\
{%- if tools %}{{ '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content }}
{%- for call in m.tool_calls or [] %}{{ '<call>' + call.function.name + (call.function.arguments | tojson) }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for _, name, text in FILES:
        (tmp_path / name).write_text(text)
    (tmp_path / "held_out.jsonl").write_text((tmp_path / "chats.jsonl").read_text())
    return tmp_path


def test_the_page_has_an_example_of_every_format() -> None:
    assert {form for form, *_ in FILES} >= {
        "messages",
        "sharegpt",
        "alpaca",
        "prompt_completion",
        "text",
    }
    assert {Path(name).suffix for _, name, _ in FILES} == {
        ".jsonl",
        ".json",
        ".csv",
        ".tsv",
        ".txt",
    }


@pytest.mark.parametrize(("form", "name"), [(form, name) for form, name, _ in FILES if form])
def test_each_example_is_a_file_that_loads(
    folder: Path, families: SimpleNamespace, form: str, name: str
) -> None:
    tokenizer = families.new("chatml")
    tokenizer.chat_template = WITH_TOOLS
    loaded = load_data(load(None, [f"data.train={name}"]).config.data, tokenizer, seed=0)
    (row,) = loaded.train
    assert loaded.facts["train"]["files"][0]["format"] == form
    learnt = tokenizer.decode([label for label in row.labels if label != IGNORE_INDEX])
    whole = {
        "tools.jsonl": '<call>add{"a": 2, "b": 3}<|im_end|>It is 5.<|im_end|>',
        "pairs.csv": "5<|im_end|>",
    }
    assert learnt == whole.get(name, learnt)
    assert learnt.endswith("<|im_end|>")


@pytest.mark.parametrize("text", SETTINGS)
def test_each_configuration_is_one(folder: Path, families: SimpleNamespace, text: str) -> None:
    (folder / "run.yaml").write_text(text)
    loaded = load(folder / "run.yaml")
    check_data(loaded.config, loaded.sources)
    if "hf:" not in text:
        tokenizer = families.new("chatml")
        # as Qwen3's has the setting
        tokenizer.chat_template += "{% if enable_thinking is false %}<think></think>{% endif %}"
        assert load_data(loaded.config.data, tokenizer, seed=0).train
