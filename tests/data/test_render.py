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
    "a long text": ("{{ 'a' * 70000000 }}", "makes 70,000,000 characters"),
}


@pytest.fixture
def tokenizer(families):
    return families.of("chatml")


@pytest.mark.parametrize("case", ENDLESS)
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
