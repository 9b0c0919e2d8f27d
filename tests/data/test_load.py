"""`load_data`: what a user's files become, and what a wrong file is told."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.api import source_lines, user_prompts

from isotype.config.schema import DataSection
from isotype.data.load import load_data
from isotype.data.rows import (
    IGNORE_INDEX,
    MAX_TOKENS,
    LoadedData,
    Row,
    example_rows,
    format_row,
)
from isotype.errors import UsageError


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes a file into the current folder: objects as JSON lines, text and bytes as they are."""
    monkeypatch.chdir(tmp_path)

    def write(name: str, content: str | bytes | list[Any]) -> str:
        if isinstance(content, list):
            content = "".join(json.dumps(row) + "\n" for row in content)
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return name

    return write


@pytest.fixture
def load(families: SimpleNamespace) -> Any:
    def load(*, family: str = "chatml", seed: int = 0, **section: Any) -> LoadedData:
        return load_data(DataSection(**section), families.of(family), seed=seed)

    return load


def chat(question: str, answer: str, **extra: Any) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ],
        **extra,
    }


CHATS = [chat(f"question {i}", f"answer {i}") for i in range(40)]


def test_chats_are_split_counted_and_sampled(
    write: Any, load: Any, families: SimpleNamespace
) -> None:
    loaded = load(train=write("chats.jsonl", CHATS), eval_split=0.1)
    assert (len(loaded.train), len(loaded.eval)) == (36, 4)
    facts = loaded.facts
    assert facts["train"]["files"][0]["format"] == "messages"
    assert facts["train"]["files"][0]["why"] == "the first row (chats.jsonl:1) has the key messages"
    assert facts["train"]["tokens"] == sum(len(row.input_ids) for row in loaded.train)
    assert facts["train"]["supervised_tokens"] == sum(
        sum(label != IGNORE_INDEX for label in row.labels) for row in loaded.train
    )
    assert facts["tokens"]["end_of_turn"] == {"<|im_end|>": 40}
    assert facts["template"] == {
        "source": "tokenizer",
        "has_generation_block": False,
        "kwargs": {},
        "thoughts": "template",
    }
    assert facts["notes"] == []
    assert loaded.chat_template == families.of("chatml").chat_template
    json.dumps(facts)
    tokenizer = families.of("chatml")
    for prompt in loaded.prompts:
        number = prompt.text.removeprefix("question ")
        assert prompt.reference == f"answer {number}"
        assert tokenizer.decode(prompt.input_ids).endswith(
            f"question {number}<|im_end|>\n<|im_start|>assistant\n"
        )
    assert len(loaded.prompts) == 4


def test_the_split_depends_only_on_the_seed(write: Any, load: Any) -> None:
    name = write("chats.jsonl", CHATS)
    one, again, other = (list(load(train=name, seed=seed).eval) for seed in (1, 1, 2))
    assert one == again != other


def test_copies_of_a_row_are_never_on_both_sides(write: Any, load: Any) -> None:
    loaded = load(train=write("chats.jsonl", CHATS[:12] * 4), eval_split=0.25)
    assert loaded.facts["duplicates_between"] == 0
    assert len(loaded.train) + len(loaded.eval) == 48
    assert len(loaded.eval) % 4 == 0 != len(loaded.eval)


def test_rows_in_both_files_are_counted(write: Any, load: Any) -> None:
    loaded = load(
        train=write("train.jsonl", CHATS),
        eval=write("eval.jsonl", [*CHATS[:3], chat("new", "one")]),
    )
    assert loaded.facts["duplicates_between"] == 3
    assert any("3 evaluation rows are also training rows" in note for note in loaded.facts["notes"])


def test_prompts_on_both_sides_are_counted(write: Any, load: Any) -> None:
    rows = [chat(f"question {i}", "yes") for i in range(40)] + [
        chat(f"question {i}", "no") for i in range(40)
    ]
    name = write("chats.jsonl", rows)
    loaded = load(train=name, eval_split=0.1)
    prompts = [
        {row.input_ids[: row.prompt_length] for row in side} for side in (loaded.train, loaded.eval)
    ]
    shared = sum(row.input_ids[: row.prompt_length] in prompts[0] for row in loaded.eval)
    assert loaded.facts["duplicates_between"] == 0 < shared == loaded.facts["prompts_between"]
    assert any(
        note.startswith(f"{shared} evaluation rows have the prompt of a training row, with another")
        for note in loaded.facts["notes"]
    )

    assert load(train=name, stream=True, eval_split=0.2).facts["prompts_between"] > 0


def test_prompt_and_completion_use_the_chat_template_where_there_is_one(
    write: Any, load: Any, families: SimpleNamespace
) -> None:
    rows = [{"prompt": f"say {i}", "completion": f"it is {i}"} for i in range(3)]
    name = write("pairs.jsonl", rows)
    tokenizer = families.of("chatml")
    text = tokenizer.decode(load(train=name).train[0].input_ids)
    assert text.endswith(
        "<|im_start|>user\nsay 0<|im_end|>\n<|im_start|>assistant\nit is 0<|im_end|>\n"
    )
    plain = families.new("mistral", template=False)
    loaded = load_data(DataSection(train=name), plain, seed=0)
    assert plain.decode(loaded.train[0].input_ids) == "<s> say 0it is 0</s>"
    assert loaded.chat_template is None
    assert plain.decode(loaded.prompts[0].input_ids) == "<s> say 0"


def test_chats_without_any_template_use_the_plain_default(
    write: Any, families: SimpleNamespace
) -> None:
    tokenizer = families.new("llama3", template=False)
    loaded = load_data(DataSection(train=write("chats.jsonl", CHATS[:3])), tokenizer, seed=0)
    row = loaded.train[0]
    assert (
        tokenizer.decode(row.input_ids)
        == "<|begin_of_text|>User: question 0\nAssistant: answer 0<|eot_id|>\n"
    )
    assert tokenizer.decode([i for i in row.labels if i != IGNORE_INDEX]) == " answer 0<|eot_id|>"
    assert loaded.facts["template"]["source"] == "default"
    # What a run saves in its tokenizer renders the same rows in plain transformers.
    again = tokenizer.apply_chat_template(
        CHATS[0]["messages"], chat_template=loaded.chat_template, return_dict=True
    )["input_ids"]
    assert tuple(again) == row.input_ids


def test_a_template_file_replaces_the_tokenizers(write: Any, load: Any) -> None:
    write(
        "mine.jinja",
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    )
    loaded = load(train=write("chats.jsonl", CHATS[:3]), chat_template="mine.jinja")
    assert loaded.facts["template"]["source"] == "mine.jinja"
    write("broken.jinja", "{% for m in messages %}")
    with pytest.raises(UsageError, match=r"chat template \(broken\.jinja\), line 1"):
        load(train="chats.jsonl", chat_template="broken.jinja")
    with pytest.raises(UsageError, match=r"data\.chat_template has no effect"):
        load(train=write("text.jsonl", [{"text": "some text"}]), chat_template="mine.jinja")


def test_a_template_that_marks_what_is_learnt_is_told(
    write: Any, families: SimpleNamespace
) -> None:
    tokenizer = families.new("chatml")
    marked = "{%- generation %}{{ m.content }}<|im_end|>{%- endgeneration %}"
    tokenizer.chat_template = (
        "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{%- if m.role == 'assistant' %}"
        + marked
        + "{%- else %}{{ m.content + '<|im_end|>' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    loaded = load_data(DataSection(train=write("chats.jsonl", CHATS[:3])), tokenizer, seed=0)
    assert any(
        "the template marks with {% generation %} what is learnt" in note
        for note in loaded.facts["notes"]
    )


def test_formats_are_per_file(write: Any, load: Any) -> None:
    loaded = load(
        train=[
            write("chats.jsonl", CHATS[:4]),
            write("texts.json", json.dumps([{"text": "plain words"}] * 2).encode()),
        ]
    )
    assert [f["format"] for f in loaded.facts["train"]["files"]] == ["messages", "text"]
    assert len(loaded.train) == 6


def test_limit_and_unread_keys(write: Any, load: Any) -> None:
    loaded = load(train=write("chats.jsonl", [chat("q", "a", id=1, source="x")] * 8), limit=5)
    assert len(loaded.train) == 5
    assert "chats.jsonl: the key source is not read (5 rows)" in loaded.facts["notes"]
    assert source_lines(loaded.facts)[0].startswith("chats.jsonl (training): 5 rows, messages: ")


def test_cut_and_dropped_rows_are_in_the_notes(write: Any, load: Any) -> None:
    rows = [chat("hi", "yes " * 90), chat("word " * 90, "yes"), chat("a", "b")]
    loaded = load(train=write("chats.jsonl", rows), max_length=48, eval_split=0.0)
    assert loaded.facts["train"]["truncated"] == 1
    assert loaded.facts["train"]["dropped"] == [
        {"why": "no answer left within data.max_length 48", "rows": 1, "first": "chats.jsonl:2"}
    ]
    assert len(loaded.facts["notes"]) == 2


def test_prompts_of_the_user_are_rendered_and_empty_ones_refused(families: SimpleNamespace) -> None:
    tokenizer = families.of("mistral")
    (chat_prompt,) = user_prompts(["why?"], tokenizer, chat_template=tokenizer.chat_template)
    assert tokenizer.decode(chat_prompt.input_ids) == "<s>[INST] why? [/INST]"
    (text_prompt,) = user_prompts(["Once upon"], tokenizer)
    assert tokenizer.decode(text_prompt.input_ids) == "<s> Once upon"
    with pytest.raises(UsageError, match=r"run\.samples\[0\]"):
        user_prompts([" "], tokenizer)


def chats_with(*messages: dict[str, Any]) -> list[Any]:
    return [CHATS[0], {"messages": list(messages)}]


ASK = {"role": "user", "content": "q"}
WRONG: dict[str, tuple[str, str | bytes | list[Any], dict[str, Any], str]] = {
    "missing": ("chats.jsonl", CHATS, {"train": "chat.jsonl"}, "chat.jsonl: no such file, did you mean chats.jsonl?"),
    "folder": ("notes.log", "words", {"train": "."}, ".: a folder without a file that ends in .jsonl, .ndjson, .json"),
    "pattern": ("chats.jsonl", CHATS, {"train": "*.csv"}, "*.csv: the pattern matches no file"),
    "hub name": ("chats.jsonl", CHATS, {"train": "org/chats"}, "org/chats: no such file; a dataset of the hub is named hf:org/chats"),
    "empty": ("x.jsonl", "", {}, "x.jsonl: the file is empty"),
    "blank": ("x.jsonl", "\n \n", {}, "x.jsonl: the file holds no rows"),
    "broken line": ("x.jsonl", '{"text": "a"}\n{"text": ', {}, "x.jsonl:2: broken JSON: the line ends within a value"),
    "surrogate": ("x.jsonl", '{"text": "a"}\n{"text": "\\ud800"}', {}, "x.jsonl:2: a \\u escape is half of a surrogate pair"),
    "deep": ("x.jsonl", "[" * 100_000, {}, "x.jsonl:1: JSON nested too deeply"),
    "wrapped": ("x.json", '{"data": [{"text": "a"}]}', {}, "x.json:1: no known format in the keys; data is a list of objects: if"),
    "utf16": ("x.txt", "words".encode("utf-16"), {}, "x.txt:1: byte 0: the file is UTF-16; save it as UTF-8"),
    "classes": ("x.jsonl", [{"sentence": "a", "label": 1}], {},
        "x.jsonl:1: sentence and label are a text and its class, and a trainer of classes is not offered; "
        "a language model learns the class as an answer with data.columns: {prompt: sentence, "
        "completion: label}, where label is the class's name as text"),
    "pairs of embeddings": ("x.jsonl", [{"anchor": "a", "positive": "b", "negative": "c"}], {},
        "x.jsonl:1: anchor and positive are a pair for an embedding model. Isotype trains no embedding"),
    "LFS pointer": ("x.jsonl", "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", {},
        "x.jsonl: is a Git LFS pointer, without the rows"),
    "unknown keys": ("x.jsonl", [{"a": "a", "b": "b"}], {}, "x.jsonl:1: no known format in the keys (a, b): use messages, or prompt"),
    "typo": ("x.jsonl", [{"mesages": []}], {}, "x.jsonl:1: mesages: unknown key, did you mean messages?"),
    "two formats in a row": ("x.jsonl", [{"text": "a", "messages": []}], {}, "x.jsonl:1: the row has messages and text: set data.format"),
    "mixed": ("x.jsonl", [*CHATS[:2], {"text": "a"}], {}, "x.jsonl:3: the row is text, but the file is read as messages"),
    "typo later": ("x.jsonl", [{"text": "a"}, {"txt": "a"}], {}, "x.jsonl:2: no key 'text', but 'txt': did you mean text?"),
    "only empty answers": ("x.jsonl", [{"prompt": "a", "completion": " "}], {},
        "x.jsonl: no training row is left: the answer is empty (1 row, the first is x.jsonl:1)"),
    "role": ("x.jsonl", chats_with(ASK, {"role": "gpt", "content": "a"}), {},
        "x.jsonl:2: messages[1].role: unknown role 'gpt', did you mean assistant?"),
    "template refuses": ("x.jsonl", chats_with(ASK, ASK), {"family": "gemma", "loss_on": "all"},
        "x.jsonl:2: the chat template refuses the row: Conv"),
    "nothing left": ("x.jsonl", [chat("word " * 50, "a")], {"max_length": 16}, "x.jsonl: no training row is left: no answer left within"),
    "too short": ("x.jsonl", CHATS, {"max_length": 1}, "data.max_length is 1: a row needs at least 2 tokens"),
    "no template": ("x.jsonl", CHATS, {"chat_template": "y.jinja"}, "y.jinja: no such file"),
    "twice": ("x.jsonl", CHATS, {"train": ["x.jsonl", "x.jsonl"]}, "data.train: x.jsonl is named twice"),
    "none": ("x.jsonl", CHATS, {"train": None}, "data.train is not set"),
    "format of text": ("x.txt", "words", {"format": "messages"}, "x.txt: data.format is messages, but a .txt file is plain text"),
}  # fmt: skip


def test_a_wrong_file_is_one_line_with_its_place(write: Any, load: Any) -> None:
    for case, (name, content, changes, message) in WRONG.items():
        path = Path(write(name, content))
        with pytest.raises(UsageError) as caught:
            load(**({"train": name} | changes))
        assert str(caught.value).startswith(message), case
        assert "\n" not in caught.value.message
        path.unlink()


MESSY = [
    *CHATS[:12],
    {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": 3}]},
    {"messages": "text"},
    {"messages": [{"role": "user", "content": "q"}]},
    *[{"messages": [{"role": "user"}]}] * 60,
    chat("q", ""),
    {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": None}]},
    chat("the last", "one"),
]


def messy_file() -> bytes:
    return (
        "".join(json.dumps(row) + "\n" for row in MESSY).encode()
        + b'{"messages": \n{"text": "caf\xe9"}\n'
    )


def test_all_kinds_of_bad_rows_are_reported_together(write: Any, load: Any) -> None:
    write("x.jsonl", messy_file())
    with pytest.raises(UsageError) as caught:
        load(train="x.jsonl")
    said = caught.value.message
    assert said.splitlines()[0] == "65 rows cannot be used"
    for line in (
        "  60 x messages[0] has no content",
        "  1 x messages[1].content must be text, got a number",
        "      x.jsonl:13",
        "  1 x broken JSON: the line ends within a value",
        "  1 x byte ",
    ):
        assert line in said, line
    assert said.count("x.jsonl:") == 40
    assert "and 25 more" in said
    assert "data.on_bad_row: skip" in str(caught.value)


def test_bad_rows_are_left_out_and_counted(write: Any, load: Any) -> None:
    loaded = load(train=write("x.jsonl", messy_file()), on_bad_row="skip", eval_split=0.0)
    assert len(loaded.train) == 13
    assert sum(loaded.facts["train"]["bad_rows"].values()) == 65
    assert loaded.facts["train"]["dropped"] == [
        {"why": "the answer is empty", "rows": 2, "first": "x.jsonl:76"}
    ]
    assert len(loaded.bad_rows) == 67
    notes = " ".join(loaded.facts["notes"])
    assert (
        "65 bad training rows are left out (data.on_bad_row: skip): 60 x messages[N] has no content"
        in notes
    )
    assert "2 training rows dropped: the answer is empty (first: x.jsonl:76)" in notes


SOURCES = {
    "tabs.py": "def a():\n\treturn 1\n\n\x0c\ndef b():\n\treturn '\x0b'\n",
    "windows.py": "def a():\r\n\treturn 1\r\n\x0c\r\ndef b():\r\n\treturn 2\r\n",
    "below/marks.py": "x = 'a\x85b\u2028c\u2029d\x1c\x1d\x1ee'\n",
    "below/mac.py": "x = 1\ry = 2\r",
    "below/mixed.py": "x = 1\r\ny = 2\nz = 3",
}


def documents(loaded: LoadedData, tokenizer: Any) -> list[str]:
    """The learnt texts, each file's windows put together at its end-of-text token."""
    rows: Any = loaded.train
    rows = getattr(rows, "rows", rows)
    ids = [i for row in rows for i in row.input_ids]
    return sorted(tokenizer.decode(ids).split(tokenizer.eos_token)[:-1])


@pytest.mark.parametrize("settings", [{"packing": True}, {"max_length": 16}])
def test_sources_by_a_pattern_are_learnt_as_they_are(
    write: Any, load: Any, families: SimpleNamespace, settings: dict[str, Any]
) -> None:
    for name, text in (SOURCES | {"__init__.py": ""}).items():
        write(f"src/{name}", text)
    loaded = load(train="src/**/*.py", eval_split=0.0, **settings)
    assert documents(loaded, families.of("chatml")) == sorted(SOURCES.values())


def test_documents_of_a_text_file_may_be_separated_by_the_end_of_text_token(
    write: Any, load: Any, families: SimpleNamespace
) -> None:
    separator = families.of("chatml").eos_token
    write("documents.txt", f"one{separator}two{separator}three")
    notes = " ".join(load(train="documents.txt", eval_split=0.0).facts["notes"])
    assert "special token" not in notes
    write("marks.txt", "one<|im_start|>two")
    assert "special token" in " ".join(load(train="marks.txt", eval_split=0.0).facts["notes"])


def test_a_file_of_another_ending_is_text_where_that_is_said(
    write: Any, load: Any, families: SimpleNamespace
) -> None:
    for name, content in {
        "a.foo": "one\r\ntwo",
        "b.foo": "three",
        "c.py.gz": gzip.compress(b"x = 1\r\n"),
    }.items():
        write(name, content)
    for name in ("a.foo", "*.foo"):
        with pytest.raises(
            UsageError, match=r"foo(.|\n)*data\.format: text, if it is to be learnt as plain text"
        ):
            load(train=name)
    with pytest.raises(UsageError, match=r"name the files by a pattern, as 'src/\*\*/\*\.py'"):
        load(train=".")
    tokenizer = families.of("chatml")
    assert documents(load(train="*.foo", format="text", eval_split=0.0), tokenizer) == [
        "one\r\ntwo",
        "three",
    ]
    assert documents(load(train="c.py.gz", eval_split=0.0), tokenizer) == ["x = 1\r\n"]


class Letters:
    @staticmethod
    def decode(ids: list[int], **_: Any) -> str:
        return "".join(chr(97 + i % 26) for i in ids)


def test_examples_are_the_first_the_median_and_the_longest_row_with_what_is_learnt() -> None:
    def row(length: int, prompt: int) -> Row:
        return Row(
            tuple(range(length)), (IGNORE_INDEX,) * prompt + tuple(range(prompt, length)), prompt
        )

    found = example_rows([row(4, 2), row(9, 1), row(6, 3)], Letters())
    assert [(one["which"], one["row"], one["tokens"], one["learnt"]) for one in found] == [
        ("the first row", 0, 4, 2), ("of median length", 2, 6, 3), ("the longest", 1, 9, 8),
    ]  # fmt: skip
    assert found[0]["parts"] == [{"text": "ab", "learnt": False}, {"text": "cd", "learnt": True}]

    assert example_rows([], Letters()) == []
    (one,) = example_rows([row(MAX_TOKENS + 5, 1)], Letters())
    assert one["left_out"] == 5
    assert sum(len(part["text"]) for part in one["parts"]) == MAX_TOKENS


def test_a_row_is_shown_up_to_its_first_learnt_part_which_is_marked() -> None:
    def row(*parts: tuple[str, bool]) -> Row:
        text = "".join(part for part, _ in parts)
        learnt = [is_learnt for part, is_learnt in parts for _ in part]
        labels = [ord(c) if flag else IGNORE_INDEX for c, flag in zip(text, learnt, strict=True)]
        return Row(tuple(map(ord, text)), tuple(labels), 0)

    characters = SimpleNamespace(decode=lambda ids, **options: "".join(map(chr, ids)))
    turns = [("Sum of 1 and 2?\n", False), ("It is 3.", True), ("And 4?", False), ("7.", True)]
    text = format_row(row(*turns), characters)
    assert text == "Sum of 1 and 2? >>> It is 3. <<<\n(and 1 learnt part more)"
    assert format_row(row(("all of it", True)), characters) == ">>> all of it <<<"
    long = format_row(row(("a\n\n" * 90, False), ("x" * 500, True)), characters)
    assert long.startswith("a\na\n...\na\na >>> xxx")
    assert long.endswith("xxx <<<")
    assert "x ... x" in long
    assert len(long) < 250


def test_pairs_of_the_public_form_are_rendered_with_their_system_prompt_and_tools(
    write: Any, families: SimpleNamespace
) -> None:
    rows = [
        {"system": f"be {i}", "question": f"q {i}", "chosen": f"good {i}", "rejected": f"bad {i}"}
        for i in range(12)
    ]
    section = DataSection(
        train=write("pairs.jsonl", rows), columns={"prompt": "question"}, eval_split=0
    )
    tokenizer = families.of("chatml")
    loaded = load_data(section, tokenizer, seed=0, objective_format="preference")
    assert not [note for note in loaded.facts["notes"] if "system" in note]
    texts = [tokenizer.decode(row.input_ids) for row in loaded.train]
    for i, (chosen, rejected) in enumerate(zip(texts[::2], texts[1::2], strict=True)):
        for text, answer in ((chosen, f"good {i}"), (rejected, f"bad {i}")):
            assert f"<|im_start|>system\nbe {i}<|im_end|>" in text
            assert answer in text
        learnt = tokenizer.decode([t for t in loaded.train[2 * i].labels if t != IGNORE_INDEX])
        assert learnt == f"good {i}<|im_end|>"
    assert f"be {0}" in tokenizer.decode(loaded.prompts[0].input_ids)


JSON_TEXTS = {
    "lines": '{"prompt": "a", "completion": "b"}\n{"prompt": "c", "completion": "d"}\n',
    "after blank lines": '\n\n  {"text": "a"}\n',
    "a list": '[{"prompt": "a", "completion": "b"}]',
    "a list, indented": '[\n  {\n    "prompt": "a",\n    "completion": "b"\n  }\n]\n',
}
PROSE = {
    "prose": "One day a bracket { stood in a text.\n",
    "a set": '{1, 2, 3} is a set, "a": 1 is not.\n',
    "a quotation": '[note] "He said: {nothing}."\n',
}


@pytest.mark.parametrize("name", ["rows.txt", "rows.md", "rows.txt.gz"])
def test_json_under_the_name_of_a_text_is_asked_about(
    write: Any, load: Any, families: SimpleNamespace, name: str
) -> None:
    def content(text: str) -> Any:
        return gzip.compress(text.encode()) if name.endswith(".gz") else text

    for text in JSON_TEXTS.values():
        write(name, content(text))
        with pytest.raises(UsageError, match="and this one holds JSON") as refused:
            load(train=name)
        assert ".jsonl" in str(refused.value.fix)
        loaded = load(train=name, format="text", eval_split=0.0)
        assert documents(loaded, families.of("chatml")) == [text]
    for text in PROSE.values():
        write(name, content(text))
        loaded = load(train=name, eval_split=0.0)
        assert documents(loaded, families.of("chatml")) == [text]
