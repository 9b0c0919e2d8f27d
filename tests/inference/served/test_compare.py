"""The comparison with a server: each property that differs is named, and no other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from tests.api import (
    Answer,
    Expectations,
    ExpectedAnswer,
    Prompt,
    Remedies,
    ScoredRow,
    ServerFacts,
    SingleToken,
    _build_prompt,
    compare_server,
)
from tests.gguf_files import splitting
from tokenizers.processors import TemplateProcessing

from isotype.data.rows import SamplePrompt
from isotype.errors import UsageError

BOS, END = 1, 2
REMEDIES = Remedies("template", "first", "stop", "thinking", "adapter", "context", "wider")
FACTS = ServerFacts("engine", "model", 64)
TRAINED = Answer("it is", (7, 8, END), ("it", " is", ""), (-0.2, -0.3, -0.1), has_ended=True)
CHAT = Prompt("<s>ask", (BOS, 5, 6), messages=({"role": "user", "content": "ask"},))


def expectations(**changes: Any) -> Expectations:
    answer = ExpectedAnswer(
        prompt=CHAT,
        ids=(7, 8, END),
        text="it is",
        texts=("it", " is", "</s>"),
        logprobs=(-0.2, -0.3, -0.1),
        base_logprobs=(-3.0, -2.5, -4.0),
        alternatives=({7: -0.2, 9: -0.25}, {8: -0.3, 9: -2.0}, {END: -0.1, 9: -3.0}),
        base_alternatives=({7: -3.0, 9: -1.0}, {8: -2.5, 9: -1.0}, {END: -4.0, 9: -1.0}),
        has_ended=True,
    )
    rows = [ScoredRow((BOS, 5, 7, 8), (2, 3), (-0.4, -0.5), (-3.0, -2.8)) for _ in range(3)]
    probe = replace(CHAT, text="<s>sys ask", ids=(BOS, 4, 5, 6))
    settings = {
        "answers": [answer],
        "rows": rows,
        "endings": [(BOS, 5, 6, 7, 8)],
        "single_tokens": [SingleToken(6, {7: -1.0})],
        "system": [probe],
        "thinking": [replace(probe, switches={"enable_thinking": False})],
        "first_id": BOS,
        "first_text": "<s>",
        "end_ids": frozenset({END}),
        "longest": 40,
        "max_length": 64,
    }
    return Expectations(**{**settings, **changes})


@dataclass
class FakeServer:
    """A server that answers as the run expects, with the changes that a test makes."""

    facts: ServerFacts = FACTS
    remedies: Remedies = REMEDIES
    texts: Mapping[str, str] = field(default_factory=dict)
    added: Sequence[int] = ()
    other_tokens: bool = False
    completion: Answer = TRAINED
    chat_text: str = "it is"
    chat_ended: bool = True
    prompt_tokens: int | None = 3
    longest_prompt: int = 64
    ends: bool = True
    scores: Mapping[int, float] | None = field(default_factory=lambda: {7: -0.4, 8: -0.5})
    single: float = -1.0
    has_calls: bool = True

    def render(self, prompt: Prompt) -> str | None:
        text = prompt.text.removeprefix("<s>")
        return self.texts.get(text, text) if self.has_calls else None

    def tokenize(self, prompt: Prompt) -> tuple[int, ...] | None:
        return (*self.added, *prompt.ids) if self.has_calls else None

    def tokenize_text(self, text: str) -> tuple[int, ...] | None:
        return (BOS, 5, 9) if self.other_tokens else (BOS, 5, 6)

    def chat(self, prompt: Prompt, max_tokens: int) -> Answer:
        count = self.prompt_tokens
        if count is not None:
            count += len(prompt.ids) - 3 + len(self.added)
            count = min(count, self.longest_prompt)
        return Answer(self.chat_text, has_ended=self.chat_ended, prompt_tokens=count)

    def complete(self, ids: Sequence[int], max_tokens: int) -> Answer | None:
        if not self.has_calls:
            return None
        if len(ids) == 1:
            return Answer("it", (7,), ("it",), (self.single,))
        if len(ids) == 5:
            return Answer("", (END,), has_ended=self.ends)
        return self.completion

    def score(self, ids: Sequence[int], positions: Sequence[int]) -> list[float | None] | None:
        if self.scores is None:
            return None
        return [self.scores.get(ids[position]) for position in positions]


def compare(server: FakeServer, **changes: Any) -> Any:
    return compare_server(expectations(**changes), server, url="http://x", min_kept=0.9)


def differing(result: Any) -> list[str]:
    return [check.name for check in result.differences]


def test_a_server_that_answers_as_trained_is_the_same() -> None:
    result = compare(FakeServer())
    assert result.is_same, result.lines()
    assert result.kept == pytest.approx(1.0)
    assert result.agreement == 1.0
    assert result.to_json()["checks"]["tools"] == "absent"
    assert "the server answers as the trained model does" in result.lines()[-1]


BASE = replace(TRAINED, logprobs=(-3.0, -2.5, -4.0))
ROUNDED = replace(TRAINED, logprobs=(-0.5, -0.1, -0.4))


@pytest.mark.parametrize(
    ("changes", "names", "text"),
    [
        ({"texts": {"ask": "User: ask"}}, ["prompt"], "in training 'ask'"),
        ({"texts": {"sys ask": "ask"}}, ["system", "thinking"], "fix: template"),
        ({"added": (BOS,)}, ["first"], "comes twice at the beginning, in training once"),
        ({"other_tokens": True}, ["tokens"], "at token 1: [9], in training [6]"),
        ({"ends": False}, ["stop"], "after a whole answer it goes on"),
        ({"chat_text": "it is and on"}, ["stop"], "it goes on with ' and on'"),
        ({"chat_ended": False}, ["stop"], "goes on after the end token"),
        (
            {"completion": BASE, "scores": {7: -3.0, 8: -2.8}},
            ["logprobs", "kept"],
            "as the base does: it has no adapter; fix: adapter",
        ),
        ({"completion": ROUNDED}, ["logprobs"], "the weights are rounded, or the rotary base"),
        (
            {"completion": ROUNDED, "scores": {7: -1.9, 8: -1.8}},
            ["logprobs", "kept"],
            "longer prompts do not: the rotary base, its scaling",
        ),
        ({"completion": ROUNDED, "single": -1.4}, ["logprobs"], "are rounded"),
        (
            {"completion": ROUNDED, "single": -1.4, "facts": replace(FACTS, weights="Q8_0")},
            ["logprobs"],
            "F16 or BF16 rounds less",
        ),
        ({"completion": ROUNDED, "single": -1.4}, ["logprobs"], "measures the file; wider"),
        (
            {"completion": ROUNDED, "single": -1.4, "facts": replace(FACTS, weights="BF16")},
            ["logprobs"],
            "measures the file\n",
        ),
        ({"scores": {7: -1.9, 8: -1.8}}, ["logprobs", "kept"], "less than --keep 0.9"),
    ],
)
def test_each_difference_is_named(changes: dict[str, Any], names: list[str], text: str) -> None:
    result = compare(FakeServer(**changes))
    assert differing(result) == names, result.lines()
    assert text in "\n".join(result.lines())


def test_an_answer_that_ends_early_is_a_stop_and_no_other_answer() -> None:
    early = Answer("it", (7,), ("it",), (-0.2,), has_ended=True)
    result = compare(FakeServer(completion=early))
    assert differing(result) == ["stop"]
    assert "ends after 1 token; the trained model goes on with ' is</s>'" in "\n".join(
        result.lines()
    )


def test_a_tie_is_no_difference_and_another_answer_is() -> None:
    tie = Answer("no", (9,), ("no",), (-0.25,))
    assert compare(FakeServer(completion=tie)).is_same
    other = Answer("it no", (7, 9), ("it", " no"), (-0.2, -0.1))
    result = compare(FakeServer(completion=other))
    assert differing(result) == ["answers"]
    assert "at token 1 ' no', the trained model ' is</s>'" in "\n".join(result.lines())


def test_the_fix_of_a_template_without_system_messages_is_the_template() -> None:
    """The prompts of the run may look the same in a server's own template."""
    server = FakeServer(texts={"sys ask": "ask"})
    fixes = {check.name: check.fix for check in compare(server).differences}
    assert fixes == {"system": "template", "thinking": "template"}


def test_an_answer_without_texts_of_tokens_is_shown_from_the_difference() -> None:
    """vLLM returns the ids of the tokens and the text of the whole answer."""
    other = Answer("it no more", (7, 9), (), (-0.2, -0.1))
    result = compare(FakeServer(completion=other))
    assert "at token 1 ' no more', the trained model ' is</s>'" in "\n".join(result.lines())


def test_the_error_of_the_runs_own_dtypes_is_allowed() -> None:
    """A bf16 run served in bf16 is not fp32's result, and neither is the run."""
    server = FakeServer(completion=replace(TRAINED, logprobs=(-0.29, -0.39, -0.01)))
    assert differing(compare(server)) == ["logprobs"]
    result = compare(server, run_error=0.05)
    assert result.is_same, result.lines()
    assert "the run's own dtypes give 0.0500" in "\n".join(result.lines())
    assert differing(compare(FakeServer(completion=ROUNDED), run_error=0.05)) == ["logprobs"]


def test_a_server_without_calls_of_its_own_is_compared_by_texts_and_lengths() -> None:
    server = FakeServer(has_calls=False, scores=None)
    result = compare(server)
    assert result.is_same, result.lines()
    assert result.kept is None
    assert "no log-probabilities: only texts and tokens are compared" in "\n".join(result.lines())
    assert "not compared: tokens, thinking, logprobs, kept" in result.summary()
    assert differing(compare(replace(server, prompt_tokens=4))) == ["first"]
    assert differing(compare(replace(server, prompt_tokens=9))) == ["prompt", "system"]
    assert differing(compare(replace(server, chat_text="no"))) == ["answers"]


def test_a_scaled_adapter_is_the_cause() -> None:
    facts = ServerFacts("llama.cpp", "m", adapter_scales={"lora.gguf": 0.0})
    result = compare(FakeServer(facts=facts, completion=BASE))
    assert "the adapter lora.gguf is applied with scale 0" in result.to_json()["cause"]


def test_a_context_that_is_too_short_cannot_be_asked() -> None:
    with pytest.raises(UsageError, match="its context of 32 tokens is too short"):
        compare(FakeServer(facts=ServerFacts("engine", "model", 32)))
    result = compare(FakeServer(facts=ServerFacts("engine", "model", 48)))
    assert result.is_same
    assert "the server's context is 48 tokens, the run's rows have up to 64" in result.notes[0]


@pytest.mark.parametrize("lengths", [(3, 20, 30), (20, 25, 30)])
@pytest.mark.parametrize("has_calls", [True, False])
def test_a_server_that_cuts_long_prompts_cannot_be_asked(
    lengths: tuple[int, ...], has_calls: bool
) -> None:
    """Ollama answers the rest of a prompt that is longer than its context."""
    (answer,) = expectations().answers
    answers = [
        replace(answer, prompt=replace(CHAT, ids=(BOS, *range(5, 4 + length))))
        for length in lengths
    ]
    facts = ServerFacts("Ollama", "model")
    server = FakeServer(facts=facts, longest_prompt=16, has_calls=has_calls)
    with pytest.raises(UsageError, match="only a part of long prompts: 16 of 30 tokens"):
        compare(server, answers=answers)
    if not has_calls:
        # a template without one part makes all prompts shorter by the same number of tokens
        shorter = replace(server, longest_prompt=64, prompt_tokens=0)
        assert "prompt" in differing(compare(shorter, answers=answers))


def test_tokens_that_a_server_cannot_score_are_left_out() -> None:
    result = compare(FakeServer(scores={7: -0.4}))
    assert result.is_same
    assert result.trained_loss == pytest.approx(0.4)


@pytest.mark.parametrize("adds_first", [True, False])
def test_a_plain_prompt_has_no_first_token_that_the_server_adds(adds_first: bool) -> None:
    """A row without messages is sent as text. The tokens of training stay as they were."""
    tokenizer = splitting()
    tokenizer.add_special_tokens({"bos_token": "<|begin|>"})
    if adds_first:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<|begin|> $A", special_tokens=[("<|begin|>", tokenizer.bos_token_id)]
        )
    ids = tuple(tokenizer("Two plus two?")["input_ids"])
    assert (ids[0] == tokenizer.bos_token_id) == adds_first
    prompt = _build_prompt(tokenizer, None, SamplePrompt("Two plus two?", ids))
    assert prompt.text == "Two plus two?"
    assert prompt.ids == ids
    assert tuple(tokenizer(prompt.text)["input_ids"]) == ids
