"""`isotype watch`: the page of a run in a browser, of this process's runs and of others'."""

from __future__ import annotations

import fcntl
import json
import re
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from isotype.errors import UsageError
from tests.api import WatchServer, wait_for_run
from tests.warm import interpreter

from .runs import run_folder, step, whole
from .test_report import HOSTILE, Page


@contextmanager
def watched(folder: Path) -> Iterator[WatchServer]:
    with WatchServer(folder) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def ask(
    server: WatchServer,
    path: str = "",
    *,
    method: str = "GET",
    token: str | None = None,
    tag: str = "",
) -> tuple[int, str, str]:
    """Status, text and ETag of an answer."""
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.request(
        method, f"/{token or server.token}/{path}", headers={"If-None-Match": tag} if tag else {}
    )
    answer = connection.getresponse()
    content = answer.read().decode("utf-8", "replace")
    connection.close()
    return answer.status, content, answer.headers.get("ETag", "")


def test_the_page_changes_when_the_run_writes_and_only_then(tmp_path: Path) -> None:
    folder = run_folder(
        tmp_path / "run", metrics=[step(n) for n in range(1, 4)], plan={"total": 20}
    )
    (folder / "log.txt").write_text("".join(f"line {n}\n" for n in range(500)))
    with watched(folder) as server:
        assert urlsplit(server.url).hostname == "127.0.0.1"
        status, text, tag = ask(server)
        assert (status, "step 3 of 20" in text, "line 499" in text, "line 400" in text) == (
            200,
            True,
            True,
            False,
        )
        assert ask(server, tag=tag)[:2] == (304, "")
        with (folder / "metrics.jsonl").open("a") as metrics:
            metrics.write(json.dumps(step(4)) + "\n")
        status, text, newer = ask(server, tag=tag)
        assert (status, "step 4 of 20" in text) == (200, True)
        run_folder(
            folder,
            samples=[
                {"step": 4, "samples": [{"prompt": "why?", "answer": "because of the sample"}]}
            ],
        )
        assert "because of the sample" in ask(server, tag=newer)[1]


def test_nothing_is_shown_or_stopped_without_the_token(tmp_path: Path) -> None:
    with watched(whole(tmp_path / "run")) as server:
        for method, path in (("GET", ""), ("GET", "live.js"), ("POST", "stop")):
            status, text, _ = ask(server, path, method=method, token="guessed")
            assert (status, "some/model" in text) == (404, False)
        assert ask(server, "../env.json")[0] == 404
        assert ask(server, "stop")[0] == 404, "a link must not stop a run"


def test_text_of_a_run_is_escaped_and_the_one_script_is_the_servers(tmp_path: Path) -> None:
    folder = run_folder(
        tmp_path / "run",
        metrics=[step(1)],
        samples=[{"step": 1, "samples": [{"prompt": HOSTILE, "answer": HOSTILE}]}],
    )
    (folder / "log.txt").write_text(HOSTILE)
    with watched(folder) as server:
        page = Page(ask(server)[1])
        assert [attributes for tag, attributes in page.tags if tag == "script"] == [
            {"src": "live.js", "defer": None}
        ]
        assert page.text.count("alert('ran')") == 3
        connection = HTTPConnection("127.0.0.1", server.server_port, timeout=60)
        connection.request("GET", f"/{server.token}/")
        policy = connection.getresponse().headers["Content-Security-Policy"]
        assert {"default-src 'none'", "script-src 'self'", "connect-src 'self'"} <= set(
            policy.split("; ")
        )
        connection.close()


def test_a_picture_of_a_run_is_served_and_no_other_file(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", metrics=[step(1)], samples=[])
    (folder / "samples/step_4_0.png").write_bytes(b"\x89PNG\r\n\x1a\n and more")
    (folder / "samples/step_4_1.png").write_bytes(b"no picture")
    with watched(folder) as server:
        found = [
            ask(server, f"samples/{name}")[0]
            for name in ("step_4_0.png", "step_4_1.png", "../metrics.jsonl")
        ]
        assert found == [200, 404, 404]


def test_a_run_whose_process_is_not_known_here_has_no_button(tmp_path: Path) -> None:
    run = whole(tmp_path / "run")
    (run / "result.json").unlink()
    (run / ".lock").write_text("1")  # a process that does not have the file open
    with (run / ".lock").open() as lock, watched(run) as server:
        fcntl.flock(lock, fcntl.LOCK_EX)
        page = ask(server)[1]
        assert ("stop it where it was started" in page, "<button" in page) == (True, False)
        status, text, _ = ask(server, "stop", method="POST")
        assert (status, "no process of this machine and user" in text) == (409, True)


def test_the_button_saves_and_stops_a_run_of_another_process(configured, tmp_path: Path) -> None:
    configured("run", train={"steps": 10_000, "eval_every": 5_000})
    command = [interpreter(), "-m", "isotype", "train", str(tmp_path / "run.yaml")]
    trains = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "run/metrics.jsonl"
    while trains.poll() is None and not (
        metrics.is_file() and '"grad_norm"' in metrics.read_text()
    ):
        time.sleep(0.1)
    with watched(tmp_path / "run") as server:
        page = ask(server)[1]
        assert "running</span>" in page
        assert 'action="stop"' in page
        assert re.search(r"step \d+ of 10,000", page)
        for _ in range(2):  # a second click must not end the run before it has saved
            assert ask(server, "stop", method="POST")[0] == 303
        assert trains.wait(timeout=300) == 130, trains.stderr.read()
        after = ask(server)[1]
        assert "interrupted, can be resumed" in after
        assert "interrupted: saved at step" in after, "the last line of the log"
        assert 'action="stop"' not in after
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert (tmp_path / f"run/checkpoints/step_{result['steps']}/DONE").is_file()


def test_a_folder_without_a_run_and_a_port_that_is_taken_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no such folder: give a run's folder"):
        WatchServer(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"not a run folder"):
        WatchServer(tmp_path / "empty")
    run = whole(tmp_path / "run")
    with (
        watched(run) as server,
        pytest.raises(UsageError, match=r"--port \d+: Address already in use"),
    ):
        WatchServer(run, server.server_port)


def give_up(reason: str) -> None:
    raise TimeoutError(reason)


def test_a_run_that_has_not_begun_is_waited_for(tmp_path: Path, subtests) -> None:
    """The command was refused until the run's checks were done."""

    def fill(folder: Path) -> None:
        written = whole(tmp_path / f"written-{folder.name}")
        folder.mkdir(exist_ok=True)
        for file in written.iterdir():
            file.rename(folder / file.name)

    (tmp_path / "empty").mkdir()
    for name, reason in (("absent", "no such folder yet"), ("empty", "the folder is empty")):
        folder, told = tmp_path / name, []
        timer = threading.Timer(0.3, fill, [folder])
        timer.start()
        with subtests.test(name):
            wait_for_run(folder, told.append, interval=0.01)
            assert told[0].startswith(reason)
            WatchServer(folder).server_close()
        timer.join()
    (tmp_path / "locked").mkdir()
    with (tmp_path / "locked/.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        told = []
        timer = threading.Timer(0.3, fill, [tmp_path / "locked"])
        timer.start()
        wait_for_run(tmp_path / "locked", told.append, interval=0.01)
        assert told == ["the run's checks come first"]
        timer.join()
    (tmp_path / "other").mkdir()
    (tmp_path / "other/notes.txt").write_text("no run")
    with pytest.raises(UsageError, match=r"not a run folder"):
        wait_for_run(tmp_path / "other", pytest.fail, interval=0.01)
    with pytest.raises(TimeoutError, match=r"no such folder yet \(did you mean .*locked\?\)"):
        wait_for_run(tmp_path / "locke", give_up, interval=0.01)
    told = []
    wait_for_run(tmp_path / "absent", told.append)
    assert told == [], "a run that has begun is not waited for"


def raw_request(server: WatchServer, request: bytes) -> bytes:
    """The answer to a request whose body never comes."""
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=20) as connection:
        connection.sendall(request)
        answer = b""
        while part := connection.recv(65536):
            answer += part
    return answer


@pytest.mark.parametrize("length", ["300000000", "abc", "-1", "9" * 400])
def test_a_body_is_never_read(tmp_path: Path, capfd, length: str) -> None:
    folder = run_folder(tmp_path / "run", metrics=[step(1)])
    with watched(folder) as server:
        for token in ("wrong", server.token):
            head = f"POST /{token}/stop HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n"
            assert b"HTTP/1.1 4" in raw_request(server, head.encode())
        assert ask(server)[0] == 200
    assert capfd.readouterr().err == ""


def test_a_browser_that_goes_away_prints_nothing(tmp_path: Path, capfd) -> None:
    folder = run_folder(tmp_path / "run", metrics=[step(n) for n in range(1, 400)])
    with watched(folder) as server:
        for _ in range(5):
            with socket.create_connection(("127.0.0.1", server.server_port)) as connection:
                linger = struct.pack("ii", 1, 0)  # close with a reset
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                connection.sendall(f"GET /{server.token}/ HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert ask(server)[0] == 200
    assert capfd.readouterr().err == ""
