"""Chat templates run under limits, and make the same text as without them."""

import copy
import os
import resource
import signal
import sys
import threading
import time

import jinja2
import pytest
from tests.api import data_render as render

from isotype.data.chat import ChatTemplate
from isotype.errors import UsageError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the limits are Linux's")
ROWS = [
    {"role": "user", "content": "why?"},
    {"role": "assistant", "content": "since é \N{SNOWMAN}"},
]
DOUBLING = "{% set ns = namespace(t='aaaaaaaa') %}{% for i in range(60) %}{% set ns.t = ns.t ~ ns.t %}{% endfor %}"
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
ENDLESS = {
    "two loops": (LOOPS, "takes more than 1 s"),
    "a power": ("{{ 9 ** (9 ** 9) }}", "takes more than"),  # one operation, which no exception ends
    "a product": ("{{ 'a' * 6000000000 }}", "takes more than 2048 MiB"),
    "a doubling": (DOUBLING + "{{ ns.t }}", "takes more than|makes"),
    "a width": ("{{ '%9000000000d' % 1 }}", "takes more than 2048 MiB|refuses|makes"),
    "a filter": ("{{ 'a' | center(5000000000) }}", "takes more than 2048 MiB"),
    "a long text": ("{{ 'a' * 70000000 }}", "makes 70,000,000 characters|takes more than 1 s"),
}


@pytest.fixture
def tokenizer(families):
    return families.of("chatml")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.full] if case in ("a power", "a doubling") else [])
        for case in ENDLESS
    ],
)
def test_a_template_is_bounded(case, tokenizer, monkeypatch):
    monkeypatch.setattr(render, "MAX_SECONDS", 1.0)
    render.close_processes()  # the limit is the process's from its start
    text, message = ENDLESS[case]
    template = ChatTemplate(tokenizer, text, "tokenizer")
    begin, held = time.monotonic(), peak()
    with pytest.raises(UsageError, match=message):
        template.render(ROWS, location="chats.jsonl:7")
    assert time.monotonic() - begin < 60
    assert peak() - held < 600 << 20
    # the next row is rendered, by a new process
    assert ChatTemplate(tokenizer, "{{ messages[0].content }}", "file").render(ROWS) == "why?"


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def count_requests(monkeypatch) -> list:
    """The texts that were requested one by one."""
    requests = []
    answer = render._RenderProcess.answer

    def counted(self, message):
        requests.append(message)
        return answer(self, message)

    monkeypatch.setattr(render._RenderProcess, "answer", counted)
    return requests


def conversation(text: str) -> list:
    return [{"role": "user", "content": text}]


TEXTS = [f"{number} \N{SNOWMAN}" for number in range(6)]


def test_texts_prepared_together_are_those_rendered_one_by_one(tokenizer, monkeypatch):
    options = {"chat_template": tokenizer.chat_template, "tools": None}
    expected = [render.render_text(tokenizer, conversation(text), **options) for text in TEXTS]
    requests = count_requests(monkeypatch)
    first, second = TEXTS[:3], TEXTS[3:]
    render.prepare_texts(tokenizer, [(conversation(text), options) for text in first])
    render.prepare_texts(tokenizer, [(conversation(text), options) for text in second])
    # a text that was not prepared, while the answers of others are on their way
    other = render.render_text(tokenizer, conversation("other"), **options)
    assert len(requests) == 1
    assert other == expected[0].replace(TEXTS[0], "other")
    assert [render.render_text(tokenizer, conversation(t), **options) for t in TEXTS] == expected
    assert len(requests) == 1


def test_one_endless_conversation_does_not_cost_the_others(tokenizer, monkeypatch):
    monkeypatch.setattr(render, "MAX_SECONDS", 0.5)
    render.close_processes()
    template = (
        "{% if messages[0].content == 'endless' %}" + LOOPS + "{% endif %}{{ messages[0].content }}"
    )
    texts = ["a", "endless", "b"]
    options = {"chat_template": template}
    render.prepare_texts(tokenizer, [(conversation(text), options) for text in texts])
    assert render.render_text(tokenizer, conversation("a"), **options) == "a"
    with pytest.raises(render.TemplateLimitError, match="takes more than"):
        render.render_text(tokenizer, conversation("endless"), **options)
    assert render.render_text(tokenizer, conversation("b"), **options) == "b"


def test_what_exceeds_the_limits_is_not_prepared(tokenizer, monkeypatch):
    monkeypatch.setattr(render, "MAX_PREPARED_CHARACTERS", 250)
    render.close_processes()
    options = {"chat_template": "{{ messages[0].content * 100 }}"}
    requests = count_requests(monkeypatch)
    render.prepare_texts(tokenizer, [(conversation(text), options) for text in "abc"])
    texts = [render.render_text(tokenizer, conversation(text), **options) for text in "abc"]
    assert texts == [text * 100 for text in "abc"]
    assert len(requests) == 1


def test_a_template_without_end_is_refused_before_it_is_probed_again(tokenizer, monkeypatch):
    monkeypatch.setattr(render, "MAX_SECONDS", 1.0)
    render.close_processes()
    template = ChatTemplate(tokenizer, "{# type #}" + LOOPS, "tokenizer")
    with pytest.raises(UsageError, match=r"chat template \(tokenizer\): takes more than 1 s"):
        template.render(ROWS)


def test_the_text_and_the_errors_are_those_of_this_process(tokenizer, monkeypatch):
    texts = (
        tokenizer.chat_template,
        "{{ messages }}{{ eos_token }}{{ tools }}",
        "{{ messages[7].content }}",
        "{{ raise_exception('no\nsystem turn') }}",
        "{{ messages | nothing }}",
        "{% for %}",
        "{{ '\\ud800' }}",
        "{{ 1 / 0 }}",
        "{{ missing.a.b }}",
    )

    def outcomes() -> list[str]:
        results = []
        for text in texts:
            try:
                results.append(ChatTemplate(tokenizer, text, "file").render(ROWS, tools=[{"a": 1}]))
            except UsageError as error:
                results.append(str(error))
        return results

    bounded = outcomes()
    monkeypatch.setattr(render.sys, "platform", "other")
    assert bounded == outcomes()
    assert bounded[0].count("why?") == 1


def test_a_tokenizer_whose_tokens_change_has_them_in_its_next_text(tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    template = ChatTemplate(tokenizer, "{{ eos_token }}", "file")
    before = template.render(ROWS)
    tokenizer.eos_token = "<|other|>"
    assert template.render(ROWS) == "<|other|>" != before


def test_what_cannot_be_sent_is_rendered_here(tokenizer):
    def weather(city: str) -> str:
        """The weather.

        Args:
            city: Where.
        """
        return city

    text = ChatTemplate(tokenizer, "{{ tools }}", "file").render(ROWS, tools=[weather])
    assert "The weather." in text


def child_of(tokenizer) -> int:
    render.render_text(tokenizer, ROWS, chat_template="a")
    return render._processes[render._tokenizer_key(tokenizer)]._child


def test_the_process_holds_no_file_of_this_one_and_ends_with_it(tokenizer, tmp_path):
    render.close_processes()
    with (tmp_path / "lock").open("w"):
        child = child_of(tokenizer)
        links = [os.readlink(f"/proc/{child}/fd/{fd}") for fd in os.listdir(f"/proc/{child}/fd")]
    assert not [link for link in links if not link.startswith(("socket:", "/dev/null"))]
    assert sum(link.startswith("socket:") for link in links) == 1
    render.close_processes()
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_a_killed_process_is_a_refusal_and_threads_do_not_mix_their_texts(tokenizer):
    child = child_of(tokenizer)
    os.kill(child, signal.SIGKILL)
    with pytest.raises(render.TemplateLimitError):
        render.render_text(tokenizer, ROWS, chat_template="a")
    # the next process is forked by this thread: a fork by another thread destroys the state that
    # PyTorch keeps for this one, and the Gloo group of an earlier test has waited there forever
    render.render_text(tokenizer, ROWS, chat_template="a")
    wrong = []

    def draw(number: int) -> None:
        for _ in range(50):
            text = render.render_text(tokenizer, ROWS, chat_template=f"{number}")
            if text != f"{number}":
                wrong.append((number, text))

    threads = [threading.Thread(target=draw, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(render._processes) <= render.MAX_PROCESSES


def test_at_most_so_many_processes(families):
    render.close_processes()
    for _ in range(render.MAX_PROCESSES + 2):
        tokenizer = copy.deepcopy(families.of("chatml"))
        render.render_text(tokenizer, ROWS, chat_template="a")
    assert len(render._processes) == render.MAX_PROCESSES


def test_errors_keep_their_class(tokenizer):
    with pytest.raises(jinja2.TemplateSyntaxError):
        render.render_text(tokenizer, ROWS, chat_template="{% for %}")
