"""Requests to a server: a fault is one line with exit status 2, and a key reaches one address only."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from tests.api import Connection, connect, parse_address
from tests.commands import invoke

from isotype.errors import UsageError

MODELS = {"data": [{"id": "m", "owned_by": "me"}]}


class Recorder:
    """What a small server answers, and the requests that it got."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers = answers
        self.requests: list[tuple[str, str | None, Any]] = []


@contextmanager
def serving(recorder: Recorder) -> Iterator[str]:
    """Serves the answers of a recorder on 127.0.0.1: a dictionary as JSON, bytes as they are, and a
    function as it wants.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length) or b"null")
            recorder.requests.append((self.path, self.headers.get("Authorization"), body))
            answer = recorder.answers.get(self.path, 404)
            if callable(answer):
                answer = answer(self, body)
            if answer is None:
                return
            if isinstance(answer, int):
                status, content = answer, b"<html><h1>An error</h1></html>"
            elif isinstance(answer, bytes):
                status, content = 200, answer
            else:
                status, content = 200, json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET

        def log_message(self, *arguments: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def ask(url: str, *, seconds: float = 5.0, model: str | None = None) -> Any:
    return connect(Connection(parse_address(url), seconds=seconds), model)


def redirect(target: str) -> Any:
    def answer(handler: BaseHTTPRequestHandler, body: Any) -> None:
        handler.send_response(302)
        handler.send_header("Location", target)
        handler.end_headers()

    return answer


def test_a_key_reaches_the_address_and_no_redirect_is_followed(monkeypatch) -> None:
    monkeypatch.setenv("ISOTYPE_SERVER_KEY", "secret-key")
    other = Recorder({"/v1/models": MODELS})
    with serving(other) as other_url:
        recorder = Recorder({"/v1/models": redirect(f"{other_url}/v1/models")})
        with serving(recorder) as url, pytest.raises(UsageError, match="which is not followed"):
            ask(url)
    assert [key for _, key, _ in recorder.requests] == ["Bearer secret-key"]
    assert other.requests == []


def test_a_missing_and_a_refused_key_are_told_apart(monkeypatch) -> None:
    with serving(Recorder({"/v1/models": 401})) as url:
        with pytest.raises(UsageError, match="needs a key") as caught:
            ask(url)
        assert "ISOTYPE_SERVER_KEY" in str(caught.value)
        monkeypatch.setenv("ISOTYPE_SERVER_KEY", "secret-key")
        with pytest.raises(UsageError, match="refuses the key") as caught:
            ask(url)
        assert "secret-key" not in str(caught.value)
    monkeypatch.setenv("ISOTYPE_SERVER_KEY", "two\r\nlines")
    with pytest.raises(UsageError, match="printable ASCII"):
        ask("http://127.0.0.1:1")


def test_a_key_in_the_address_is_refused() -> None:
    for url in ("http://user:secret@host", "http://host/v1?key=secret"):
        with pytest.raises(UsageError, match="environment variable") as caught:
            parse_address(url)
        assert "secret" not in str(caught.value)
    for url in ("ftp://host", "http://", "http://host:port"):
        with pytest.raises(UsageError):
            parse_address(url)
    assert parse_address("127.0.0.1:8080/v1/").url == "http://127.0.0.1:8080"


def send_part(handler: BaseHTTPRequestHandler, body: Any) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"data": [')
    handler.close_connection = True


def send_slowly(handler: BaseHTTPRequestHandler, body: Any) -> None:
    handler.send_response(200)
    handler.end_headers()
    for _ in range(8):
        handler.wfile.write(b" ")
        handler.wfile.flush()
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (503, "status 503: <html><h1>An error</h1></html>"),
        (404, "no OpenAI interface there"),
        (b"<html>hello</html>", "no JSON but <html>hello</html>"),
        (b'{"data": 3}', "no list of models"),
        ({"data": []}, "no model loaded"),
        (send_part, "cut short"),
        (send_slowly, "no whole answer to /v1/models within 0.3 s"),
        (b'{"data": [{"id": "a"}, {"id": "b"}]}', "several models: a, b"),
    ],
)
def test_each_fault_of_a_server_is_one_line(answer: Any, message: str) -> None:
    with (
        serving(Recorder({"/v1/models": answer})) as url,
        pytest.raises(UsageError) as caught,
    ):
        ask(url, seconds=0.3)
    assert message in caught.value.message
    assert "\n" not in caught.value.message


def test_a_server_that_is_down_and_a_model_of_another_name(tmp_path) -> None:
    with pytest.raises(UsageError, match="no server answers there"):
        ask("http://127.0.0.1:1")
    outcome = invoke("verify", tmp_path, "--served", "http://127.0.0.1:1")
    assert isinstance(outcome.exception, UsageError)
    with serving(Recorder({"/v1/models": MODELS})) as url:
        assert ask(url, model="m").facts.model == "m"
        with pytest.raises(UsageError, match="no model n there"):
            ask(url, model="n")


def test_one_of_file_and_server_is_needed(tmp_path) -> None:
    for options in ((), ("--file", tmp_path, "--served", "http://127.0.0.1:1")):
        outcome = invoke("verify", tmp_path, *options)
        assert "needs either --file or --served" in str(outcome.exception)
    outcome = invoke("verify", tmp_path, "--file", tmp_path, "--model", "m")
    assert "--model has no effect without --served" in str(outcome.exception)
