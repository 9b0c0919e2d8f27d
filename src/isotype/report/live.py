"""`isotype watch` serves the report of a run to a browser on this machine while the run trains.

The server only reads the files of the run. The run may belong to another process, be finished, or
be resumed later. The page is rendered when a browser requests it and a file has changed. Everyone
who knows the token in the address can read the page and stop the run.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable
from difflib import get_close_matches
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from ..errors import IsotypeError, UsageError
from ..runs.folder import LOCK, LOG, RESOLVED, find_training_process, is_locked, open_inside
from ..runs.metrics import read_thinned_rows
from .page import STEPS_SCRIPT, LiveState, render
from .record import RunRecord, picture_type, read_picture, read_run, require_run_files

HOST = "127.0.0.1"
# the number of lines of the log that are shown, and of bytes that are read
LOG_LINES = 40
LOG_TAIL_BYTES = 32 << 10
MAX_BODY = 4096  # bytes of a request's body; the form of the page sends none
# allows the page's inline styles and pictures, and scripts, requests and forms of this server only
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'self'; connect-src"
    " 'self'; form-action 'self'"
)
SCRIPT = "live.js"


class WatchServer(ThreadingHTTPServer):
    """Serves the report of one run at `url`.

    port    the port; 0 chooses a free port
    Raises  UsageError if the folder holds no run, or the port is in use
    """

    daemon_threads = True

    def __init__(self, folder: Path, port: int = 0) -> None:
        self.folder = folder
        self.token = secrets.token_urlsafe(16)
        require_run_files(folder)
        self._lock = threading.Lock()
        self._cached_page = ("", b"")
        self._stopped_process: int | None = None
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise UsageError(
                f"--port {port}: {error.strerror}", fix="leave --port away: a free one is taken"
            ) from None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints an error. The error of a connection that a browser has closed is not printed."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}/{self.token}/"

    def page(self) -> tuple[str, bytes]:
        """Returns a tag that changes if a file of the run changes, and the page."""
        with self._lock:
            tag = self._compute_tag()
            if tag != self._cached_page[0]:
                record = read_run(self.folder, read_metrics=read_thinned_rows)
                self._cached_page = (
                    tag,
                    render(record, live=self._live_state(record)).encode(
                        "utf-8", "backslashreplace"
                    ),
                )
            return self._cached_page

    def stop(self) -> None:
        """Sends SIGINT to the run, as Ctrl-C does. The signal is sent only once, because a second
        SIGINT would end the run without a save. Raises UsageError if no process can be stopped.
        """
        process = find_training_process(self.folder)
        if process is None:
            raise UsageError(f"{self.folder}: no process of this machine and user trains there")
        if process != self._stopped_process:
            os.kill(process, signal.SIGINT)
            self._stopped_process = process

    def _live_state(self, record: RunRecord) -> LiveState:
        process = find_training_process(self.folder) if record.status == "running" else None
        return LiveState(
            _last_lines(self.folder),
            process,
            process is not None and process == self._stopped_process,
        )

    def _compute_tag(self) -> str:
        fingerprints = []
        for folder in (self.folder, self.folder / "samples"):
            try:
                entries = [entry for entry in os.scandir(folder) if entry.name != LOCK]
                fingerprints += [
                    (entry.name, stat.st_mtime_ns, stat.st_size)
                    for entry in entries
                    if (stat := entry.stat(follow_symlinks=False))
                ]
            except OSError:  # there are no samples yet, or a file is being replaced
                fingerprints.append((folder.name, 0, 0))
        return f'"{hash((tuple(sorted(fingerprints)), is_locked(self.folder), self._stopped_process)):x}"'


def wait_for_run(folder: Path, on_wait: Callable[[str], None], *, interval: float = 0.5) -> None:
    """Waits until the folder holds the first files of a run, and then returns. The function waits
    while the folder does not exist or is empty. It also waits while a process that still runs its
    checks has locked the folder.

    on_wait   called once with the reason, if the function waits
    interval  seconds between two checks of the folder
    Raises    UsageError for a folder that holds something else
    """
    is_told = False
    while (reason := _not_begun_reason(folder)) is not None:
        if not is_told:
            on_wait(reason)
            is_told = True
        time.sleep(interval)


def _not_begun_reason(folder: Path) -> str | None:
    """Returns the reason to keep waiting for a run in the folder; None if the run has begun. Raises
    UsageError if the folder holds no run.
    """
    if not folder.exists():
        return f"no such folder yet{_similar_run(folder)}"
    try:
        require_run_files(folder)
    except UsageError:
        if is_locked(folder):
            return "the run's checks come first"
        if folder.is_dir() and not any(folder.iterdir()):
            return "the folder is empty"
        if not folder.exists():  # a run whose checks failed has just removed it
            return "no such folder yet"
        raise
    return None


def _similar_run(folder: Path) -> str:
    runs = [file.parent.name for file in folder.parent.glob(f"*/{RESOLVED}")]
    similar = get_close_matches(folder.name, runs, n=1)
    return f" (did you mean {folder.parent / similar[0]}?)" if similar else ""


def _last_lines(folder: Path) -> str:
    """Returns the last lines of the run's log. The text is empty if there is no log, or if the log
    is a link that leads out of the folder.
    """
    try:
        with open_inside(folder, folder / LOG) as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - LOG_TAIL_BYTES))
            return "\n".join(
                log.read(LOG_TAIL_BYTES).decode("utf-8", "replace").splitlines()[-LOG_LINES:]
            )
    except OSError:
        return ""


class _Handler(BaseHTTPRequestHandler):
    server: WatchServer
    protocol_version = "HTTP/1.1"
    timeout = 60  # seconds without a byte from the browser

    def do_GET(self) -> None:
        self._respond({"": self._page, SCRIPT: self._script})

    def do_POST(self) -> None:
        # The form has no fields, so the body is not read, and the connection is closed after the
        # response.
        self.close_connection = True
        length = self.headers.get("Content-Length") or "0"
        if length.isascii() and length.isdecimal() and int(length[:12]) <= MAX_BODY:
            self._respond({"stop": self._stop})
        else:
            self._send(HTTPStatus.BAD_REQUEST, b"a form without fields is expected\n", "text/plain")

    def _respond(self, routes: dict[str, Any]) -> None:
        _, token, *rest = [*unquote(urlsplit(self.path).path).split("/"), ""]
        path = "/".join(rest).removesuffix("/")
        if not secrets.compare_digest(token.encode(), self.server.token.encode()):
            self.close_connection = True
            self._send(
                HTTPStatus.NOT_FOUND,
                b"the address that isotype watch printed is needed\n",
                "text/plain",
            )
        elif path in routes:
            try:
                routes[path]()
            except IsotypeError as error:
                self._send(HTTPStatus.CONFLICT, f"{error}\n".encode(), "text/plain")
        elif (
            self.command == "GET"
            and (picture := read_picture(self.server.folder, {"file": path})) is not None
        ):
            self._send(HTTPStatus.OK, picture, picture_type(picture))
        else:
            self._send(HTTPStatus.NOT_FOUND, b"nothing here\n", "text/plain")

    def _page(self) -> None:
        tag, content = self.server.page()
        if self.headers.get("If-None-Match") == tag:
            self._send(HTTPStatus.NOT_MODIFIED, b"", "text/html", tag)
        else:
            self._send(HTTPStatus.OK, content, "text/html", tag)

    def _script(self) -> None:
        scripts = [
            files(__package__).joinpath(name).read_bytes() for name in (STEPS_SCRIPT, SCRIPT)
        ]
        self._send(HTTPStatus.OK, b"\n".join(scripts), "text/javascript")

    def _stop(self) -> None:
        self.server.stop()
        self._send(HTTPStatus.SEE_OTHER, b"", "text/plain")

    def _send(self, status: HTTPStatus, content: bytes, kind: str, tag: str | None = None) -> None:
        headers = {
            "Content-Type": kind if kind.startswith("image/") else f"{kind}; charset=utf-8",
            "Content-Length": str(len(content)),
            "Content-Security-Policy": CONTENT_SECURITY_POLICY,
            "Cache-Control": "no-store",
            "Referrer-Policy": "no-referrer",  # the token is in the address
            "X-Content-Type-Options": "nosniff",
        }
        if tag is not None:
            headers["ETag"] = tag
        if status == HTTPStatus.SEE_OTHER:
            headers["Location"] = "./"
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass
