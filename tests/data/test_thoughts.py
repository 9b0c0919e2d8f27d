"""Settings of a chat template, and which turns and thoughts of a conversation are learnt, with a
template like Qwen3's.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from isotype.config.schema import DataSection
from isotype.data.load import load_data
from isotype.data.rows import IGNORE_INDEX, LoadedData
from isotype.errors import UsageError

QWEN3 = "thinking"  # of the families
# writes contents as they are, and the key of thoughts nowhere
PLAIN = "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
PLAIN += "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
# leaves thoughts out everywhere, as DeepSeek-R1's does
NEVER = PLAIN.replace("m.content +", "m.content.split('</think>')[-1].lstrip() +")


def turns(*answers: dict[str, Any]) -> dict[str, Any]:
    return {
        "messages": [
            one for i, a in enumerate(answers) for one in ({"role": "user", "content": f"q{i}"}, {"role": "assistant", **a})
        ]
    }  # fmt: skip


IN_CONTENT = turns(
    {"content": "<think>\nhm\n</think>\n\none"}, {"content": "<think>\nso\n</think>\n\ntwo"}
)
BESIDE = turns(
    {"content": "one", "reasoning_content": "hm"}, {"content": "two", "reasoning_content": "so"}
)
PLAIN_ANSWERS = turns({"content": "one"}, {"content": "two"})
HM, SO, NOTHING = ("<think>\n" + thought + "\n</think>\n\n" for thought in ("hm", "so", ""))


@pytest.fixture
def load(families: SimpleNamespace, tmp_path: Path) -> Any:
    def load(template: str, *rows: dict[str, Any], **section: Any) -> tuple[LoadedData, str]:
        """The data, and what is learnt of the first row."""
        tokenizer = families.new("chatml")
        tokenizer.chat_template = families.templates.get(template, template)
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        loaded = load_data(
            DataSection(train=str(tmp_path / "rows.jsonl"), **section), tokenizer, seed=0
        )
        learnt = (
            tokenizer.decode([label for label in loaded.train[0].labels if label != IGNORE_INDEX])
            if len(loaded.train)
            else ""
        )
        return loaded, learnt

    return load


@pytest.mark.parametrize("template", [QWEN3, PLAIN], ids=["Qwen3's", "a plain one"])
@pytest.mark.parametrize(
    ("thoughts", "first", "second"), [("last", "", SO), ("all", HM, SO), ("none", "", "")], ids=["last", "all", "none"]
)  # fmt: skip
def test_which_thoughts_are_learnt(
    load: Any, template: str, thoughts: str, first: str, second: str
) -> None:
    if not second and template is QWEN3:
        second = NOTHING  # the template's own
    for rows in (IN_CONTENT, BESIDE):
        loaded, learnt = load(template, rows, thoughts=thoughts)
        assert learnt == f"{first}one<|im_end|>{second}two<|im_end|>"
        assert loaded.facts["template"]["thoughts"] == thoughts
        assert not [note for note in loaded.facts["notes"] if "reasoning" in note]
    usual, chosen = (
        load(template, PLAIN_ANSWERS, **section)[0] for section in ({}, {"thoughts": thoughts})
    )
    assert list(usual.train) == list(chosen.train)


def test_thoughts_are_learnt_where_the_prompt_ends_in_empty_ones(load: Any) -> None:
    _, learnt = load(QWEN3, BESIDE, template_kwargs={"enable_thinking": False})
    # the tag and its line end are those of the prompt
    assert learnt == "one<|im_end|>so\n</think>\n\ntwo<|im_end|>"


def test_thoughts_that_no_setting_can_keep_or_remove_are_bad_rows(load: Any) -> None:
    with pytest.raises(
        UsageError,
        match=r"rows.jsonl:1: the chat template does not write thoughts as data.thoughts: last keeps them",
    ):
        load(NEVER, IN_CONTENT, thoughts="last")
    with pytest.raises(
        UsageError,
        match=r"rows.jsonl:1: messages\[1\].content has <think> or </think> without the other one",
    ):
        load(PLAIN, turns({"content": "hm</think>one"}), thoughts="none")
    loaded, learnt = load(
        PLAIN, turns({"content": "<think>hm</think>"}), turns({"content": "one"}), thoughts="none"
    )
    assert learnt == "one<|im_end|>"
    assert loaded.facts["train"]["dropped"][0]["why"] == "the answer is empty"


def test_a_setting_reaches_rows_prompts_and_the_template_of_the_result(
    load: Any, families: SimpleNamespace
) -> None:
    usual, learnt = load(QWEN3, PLAIN_ANSWERS)
    assert learnt == f"one<|im_end|>{NOTHING}two<|im_end|>"
    (note,) = [note for note in usual.facts["notes"] if "empty thoughts" in note]
    assert note.startswith("1 row learns empty thoughts")
    assert "data.template_kwargs: {enable_thinking: false}" in note
    loaded, learnt = load(QWEN3, PLAIN_ANSWERS, template_kwargs={"enable_thinking": False})
    assert learnt == "one<|im_end|>two<|im_end|>"
    assert not [note for note in loaded.facts["notes"] if "empty thoughts" in note]
    assert loaded.facts["template"]["kwargs"] == {"enable_thinking": False}
    tokenizer = families.new("chatml")
    assert tokenizer.decode(loaded.prompts[0].input_ids).endswith(
        f"<|im_start|>assistant\n{NOTHING}"
    )
    tokenizer.chat_template = loaded.chat_template  # as a result's tokenizer has it
    asked = [{"role": "user", "content": "q"}]
    off, on = (
        tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True, **k)
        for k in ({}, {"enable_thinking": True})
    )
    assert off.endswith(NOTHING)
    assert not on.endswith(NOTHING)


def test_settings_without_effect_are_refused(load: Any) -> None:
    with pytest.raises(
        UsageError,
        match=r"data.template_kwargs.enable_thinkin: the chat template \(tokenizer\) reads no such setting",
    ) as told:
        load(QWEN3, PLAIN_ANSWERS, template_kwargs={"enable_thinkin": False})
    assert "enable_thinking" in (told.value.fix or "")
    with pytest.raises(
        UsageError, match=r"data.template_kwargs.enable_thinking: .* is no value of JSON"
    ):
        load(QWEN3, PLAIN_ANSWERS, template_kwargs={"enable_thinking": float("nan")})
    for name in ("messages", "eos_token", "add_generation_prompt"):
        with pytest.raises(UsageError, match=f"data.template_kwargs.{name}: "):
            load(QWEN3, PLAIN_ANSWERS, template_kwargs={name: "a"})
    for section in ({"thoughts": "none"}, {"template_kwargs": {"enable_thinking": False}}):
        with pytest.raises(UsageError, match=f"data.{next(iter(section))} has no effect"):
            load(QWEN3, {"text": "some text"}, **section)


KEYS: list[tuple[str, Any]] = [
    ("weight", 0),
    ("weight", 0.0),
    ("train", False),
    ("training", False),
]
WORDS = {
    "messages": ("role", "content", "user", "assistant"),
    "conversations": ("from", "value", "human", "gpt"),
}


@pytest.mark.parametrize("key", WORDS)
def test_marked_turn_is_not_learnt(load: Any, key: str) -> None:
    who, text, asks, answers = WORDS[key]
    for flag, off in KEYS:
        for left_out in ("left out", ""):
            said = [("q", {}), (left_out, {flag: off}), ("r", {}), ("learnt", {flag: None})]
            row = [
                {who: (asks, answers)[i % 2], text: one, **marks}
                for i, (one, marks) in enumerate(said)
            ]
            loaded, learnt = load(PLAIN, {key: row})
            assert learnt == "learnt<|im_end|>"
            assert [note for note in loaded.facts["notes"] if "none is held out" not in note] == []


def test_marks_that_leave_nothing_or_a_part_to_learn(load: Any) -> None:
    with pytest.raises(
        UsageError,
        match=r"rows.jsonl:1: messages\[1\].weight must be 0 or 1, true or false, got 0.5",
    ):
        load(PLAIN, turns({"content": "a", "weight": 0.5}))
    loaded, _ = load(PLAIN, turns({"content": "a", "weight": 0}), turns({"content": "a"}))
    assert len(loaded.train) == 1
    assert (
        "1 training row dropped: all of its answers are marked as not learnt (first: "
        in " ".join(loaded.facts["notes"])
    )


CUT = ("<think>\nhm", "  <think>hm, so", "<thinking>hm", "[THINK]hm", "<reasoning>\nhm")
WHOLE = (
    "<think>hm</think>one",
    "hm</think>one",
    "the tag <think> begins a thought",
    "[THINK]hm[/THINK]one",
)


@pytest.mark.parametrize("thoughts", ["template", "last", "all", "none"])
@pytest.mark.parametrize("template", [QWEN3, PLAIN], ids=["Qwen3's", "a plain one"])
def test_an_answer_that_ends_inside_its_thoughts_is_a_bad_row(
    load: Any, template: str, thoughts: str
) -> None:
    for cut in CUT:
        for row in (
            turns({"content": cut}),
            turns({"content": cut}, {"content": "two"}),
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": cut}]},
            {"instruction": "q", "output": cut},
            {"prompt": "q", "completion": cut},
            {"prompt": "q", "completion": cut, "system": "s"},
        ):
            with pytest.raises(UsageError, match=r"rows\.jsonl:1: .* ends inside its thoughts"):
                load(template, row, thoughts=thoughts)
    loaded, learnt = load(
        template,
        turns({"content": CUT[0]}),
        turns({"content": "one"}),
        on_bad_row="skip",
        thoughts=thoughts,
    )
    assert learnt.endswith("one<|im_end|>")
    (reason,) = loaded.facts["train"]["bad_rows"]
    assert "ends inside its thoughts" in reason


def test_thoughts_that_end_and_answers_that_are_not_learnt_are_no_bad_rows(load: Any) -> None:
    for whole in WHOLE:
        loaded, _ = load(PLAIN, turns({"content": whole}))
        assert len(loaded.train) == 1
    loaded, learnt = load(PLAIN, turns({"content": CUT[0], "weight": 0}, {"content": "two"}))
    assert learnt == "two<|im_end|>"


def test_a_rejected_or_unwanted_answer_may_end_inside_its_thoughts(
    families: SimpleNamespace, tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    for only, sound, bad in (
        ("preference", {"chosen": "a", "rejected": CUT[0]}, {"chosen": CUT[0], "rejected": "a"}),
        ("labelled", {"completion": CUT[0], "label": False}, {"completion": CUT[0], "label": True}),
    ):
        section = DataSection(train=str(file), eval_split=0)
        file.write_text(
            json.dumps({"prompt": "q", **sound})
            + "\n"
            + json.dumps({"prompt": "p", **sound})
            + "\n"
        )
        assert len(load_data(section, families.of("chatml"), seed=0, objective_format=only).train)
        file.write_text(json.dumps({"prompt": "q", **bad}) + "\n")
        with pytest.raises(UsageError, match="ends inside its thoughts"):
            load_data(section, families.of("chatml"), seed=0, objective_format=only)
